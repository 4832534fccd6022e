"""The local host's recipes train as they stand, with a tiny model in SmolLM2's place."""

from pathlib import Path

import pytest
import tiny_local
import tiny_runs

from metronome.cli import main

RECIPES = Path(__file__).parents[2] / "recipes" / "local"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model with room for the longest prompt of the recipes, in characters."""
    folder = tmp_path_factory.mktemp("model")
    tiny_local.model(max_position_embeddings=2048).save_pretrained(folder)
    tiny_local.tokenizer().save_pretrained(folder)
    return folder


# demo, learn and two_digits ran on their real work: docs/results
@pytest.mark.parametrize(
    ("name", "package"), [("bounded", None), ("calculator", None), ("spell_backward", "reasoning_gym")]
)
def test_a_recipe_trains_two_periods(model, tmp_path, name, package):
    if package:
        pytest.importorskip(package, reason="the recipe needs the extra reasoning-gym")
    overrides = ["training.periods=2", "training.prompts=2", "evaluation.every=0", "sampling.max_tokens=12"]
    overrides.append("training.entropy=0.01")  # a gradient where a random model earns no reward
    machine = ["machine.threads=1", "machine.pin=false", f"model.name={model}"]
    recipe = str(RECIPES / f"{name}.yaml")
    assert main(["run", recipe, *overrides, *machine, "--output", str(tmp_path / "run")]) == 0
    periods = tiny_runs.periods_in(tmp_path / "run")
    assert [one["period"] for one in periods] == [1, 2]
    assert len({one["fingerprint"] for one in periods}) == 2  # each step moved the weights
    assert all(one["tokens_computed"] < one["tokens_separate"] for one in periods)  # prompts were shared
    assert len(tiny_runs.trained_in(tmp_path / "run")) == 4
