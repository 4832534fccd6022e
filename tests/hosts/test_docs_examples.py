"""The examples of the pages run as they stand."""

import re
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

PAGES = Path(__file__).parents[2] / "docs"


def examples(page):
    return re.findall(r"```python\n(.*?)```", (PAGES / page).read_text(encoding="utf-8"), re.DOTALL)


def test_the_example_of_shared_prompts_runs_and_trains(capsys):
    (example,) = examples("techniques/shared_prompt.md")
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    given = {"model": model, "prompt": [5, 6, 7], "responses": [[8, 9], [10], []], "advantages": torch.ones(3)}
    exec(example, given)
    assert given["log_probs"].shape == (3,)
    assert given["entropies"] is None
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert "reference: " in capsys.readouterr().out  # a row this small takes the dense mask, and says so
