"""Layers of a recipe lie over each other in one order, whatever the host."""

from pathlib import Path
from typing import Any

import pytest

from metronome.errors import ConfigurationError
from metronome.host_process import Room, places, run_folder
from metronome.overlays import LayeredRecipe, Machine, flat, layered, parse_layered, typed_settings
from metronome.recipes import load_recipe

TEXT = """
host: local
args: {a: 1, b.c: 2, b: {d: 3}, folder: ~/x, +e: 0}
metronome: {loss: a3po, a3po: {cap: 5.0, fresh: target}, group_controller: sagc, sagc: {sizes: [4, 8]}}
paper: {row: r, source: s, ours: [o]}
data: {train: t, evaluation: [v], prepare: []}
overlays:
  more: {args: {a: 10, b: {c: 20}}, note: Read this}
  plain: {metronome: {loss: null, a3po: null}}
  again: {args: {a: 100}}
smoke: {args: {b.d: 30}, metronome: {a3po: {cap: 2.0}, sagc: {sizes: [2, 4]}}}
"""


def machine(source: str) -> dict[str, Any]:
    return {"model": "{assets}/model", "a": f"by {source}"}


def recipe_of(tmp_path: Path, *overrides: str) -> tuple[dict[str, Any], str]:
    path = tmp_path / "recipe.yaml"
    path.write_text(TEXT)
    return load_recipe(path, overrides), str(path)


def composed(tmp_path: Path, *overrides: str, smoke: bool = False, name: Any = str) -> tuple[dict[str, Any], Any]:
    recipe, where = recipe_of(tmp_path, *overrides)
    parsed = parse_layered(LayeredRecipe, recipe, where, smoke=smoke)
    room = Machine(machine, Path("/tiny")) if smoke else None
    return layered(parsed, typed_settings(recipe, where), room, name)


def test_dotted_and_nested_keys_are_one() -> None:
    assert dict(flat({"a": {"b": 1}, "c.d": 2, "e": {}})) == {"a.b": 1, "c.d": 2, "e": {}}


def test_later_overlays_lie_over_earlier_ones_and_what_is_typed_over_all(tmp_path: Path) -> None:
    assert composed(tmp_path)[0]["a"] == 1
    assert composed(tmp_path, "overlay=[more,again]")[0]["a"] == 100
    assert composed(tmp_path, "overlay=[again,more]")[0]["a"] == 10
    args, _ = composed(tmp_path, "overlay=[more,again]", "args.a=7")
    assert (args["a"], args["b.c"], args["b.d"]) == (7, 20, 3)
    assert composed(tmp_path, "args.a=7", smoke=True)[0]["a"] == 7


def test_a_typed_value_that_is_the_recipe_s_own_counts_over_an_overlay_only_where_spelt_otherwise(
    tmp_path: Path,
) -> None:
    """``args.b.c=2`` nests what the file spells ``b.c``: it is typed; the file's own spelling isn't."""
    assert composed(tmp_path, "overlay=more", "args.b.c=2")[0]["b.c"] == 2


def test_a_null_takes_a_key_of_the_block_and_its_options_away(tmp_path: Path) -> None:
    assert composed(tmp_path, "overlay=plain")[1] == {"group_controller": "sagc", "sagc.sizes": [4, 8]}


def test_in_a_smoke_run_the_machine_lies_over_overlays_and_leaves_unselected_options(tmp_path: Path) -> None:
    args, block = composed(tmp_path, "overlay=[more,plain]", smoke=True)
    assert args["a"] == "by synchronous"
    assert args["model"] == "/tiny/model"
    assert args["b.d"] == 30
    assert block == {"group_controller": "sagc", "sagc.sizes": [2, 4]}


def test_the_home_folder_is_written_out(tmp_path: Path) -> None:
    assert composed(tmp_path)[0]["folder"] == str(Path("~/x").expanduser())


def test_a_host_may_have_several_spellings_of_a_key(tmp_path: Path) -> None:
    def plain(key: str) -> str:
        return key.lstrip("+")

    args, _ = composed(tmp_path, "args.e=1", "args.++a=2", name=plain)
    assert (args["+e"], args["++a"]) == (1, 2)
    assert not {"e", "a", "+a"} & args.keys()
    assert composed(tmp_path, "args.e=1")[0].keys() >= {"e", "+e"}


def test_overlays_say_their_notes_and_unknown_ones_are_refused(tmp_path: Path) -> None:
    recipe, where = recipe_of(tmp_path, "overlay=[more,plain]")
    assert parse_layered(LayeredRecipe, recipe, where, smoke=False).notes() == ["more: Read this"]
    for overlay, words in (("moore", "more"), ("smoke", "--smoke")):
        with pytest.raises(ConfigurationError, match=words):
            parse_layered(LayeredRecipe, recipe | {"overlay": overlay}, where, smoke=False)
    with pytest.raises(ConfigurationError, match="--smoke"):
        parse_layered(LayeredRecipe, recipe | {"assets": "x"}, where, smoke=False)


@pytest.mark.parametrize(
    ("typed", "remedy"),
    [
        ("b.c=5", "args.b.c=5"),
        ("b.x.y=true", "args.b.x.y=True"),
        ("data.max_len=64", "args.data.max_len=64"),  # the recipe has a key data of its own
        ("loss=ppo", "metronome.loss=ppo"),
    ],
)
def test_a_key_that_lies_in_args_or_metronome_is_told_its_whole_name(tmp_path: Path, typed: str, remedy: str) -> None:
    recipe, where = recipe_of(tmp_path, "args.data.length=3", typed)
    with pytest.raises(ConfigurationError) as refused:
        parse_layered(LayeredRecipe, recipe, where, smoke=False)
    assert refused.value.remedy == remedy


def test_a_key_of_nothing_is_still_told_the_nearest(tmp_path: Path) -> None:
    recipe, where = recipe_of(tmp_path, "overlai=more")
    with pytest.raises(ConfigurationError, match="use 'overlay'"):
        parse_layered(LayeredRecipe, recipe, where, smoke=False)


def test_a_smoke_run_makes_its_files_or_takes_all_of_the_user_s(tmp_path: Path) -> None:
    made: list[Path] = []

    def make(folder: Path) -> None:
        made.append(folder)
        folder.mkdir(parents=True)
        (folder / "model").touch()

    own = Room(*places(None, str(tmp_path / "run")), ("model",), "module")
    own.fill(make)
    assert made == [tmp_path / "run" / "smoke"]
    assert own.prepare == [f"python -m module {tmp_path / 'run' / 'smoke'}"]
    given = Room(*places(str(made[0]), None), ("model", "data"), "module")
    assert given.work != given.assets
    assert given.prepare == []
    with pytest.raises(ConfigurationError, match="no data"):
        given.fill(make)
    assert len(made) == 1


def test_a_resumed_run_has_one_folder() -> None:
    assert run_folder(None, None) is None
    assert run_folder("a", None) == run_folder(None, "a") == Path("a").absolute()
    with pytest.raises(ConfigurationError, match="leave --output out"):
        run_folder("a", "b")
