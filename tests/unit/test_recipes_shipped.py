"""The recipes in recipes/ are valid."""

from pathlib import Path

import pytest

from metronome.cli import main
from metronome.recipes import load_recipe
from metronome_local.validation import validate

RECIPES = sorted(Path(__file__).parents[2].glob("recipes/local/*.yaml"))


def test_there_are_recipes():
    assert {path.stem for path in RECIPES} >= {"demo", "learn", "two_digits", "bounded"}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_selects_four_plugins_and_breaks_no_promise(path):
    pytest.importorskip("torch", reason="resolving losses and attention imports torch")
    _, settings, selection, _ = validate(load_recipe(path), str(path))
    assert selection.rollout_source.name == settings.rollout_source
    assert selection.loss.name == settings.loss
    assert selection.attention.name == settings.attention
    assert selection.group_controller.name == settings.group_controller


def test_the_local_host_refuses_a_smoke_run_in_one_line(capsys):
    for more in ([], ["--dry-run"]):
        assert main(["run", str(RECIPES[0]), "--smoke", *more]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert "has no smoke runs" in said.err
        assert said.err.count("\n") == 1
