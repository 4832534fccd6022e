"""``metronome recipes``: every shipped recipe once, and what is said of it stands in the recipe or where it was run."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from metronome import recipe_index
from metronome.cli import main
from metronome.errors import ConfigurationError
from metronome.recipe_index import STATUSES, entries, folder

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "recipes").glob("*/*.yaml"))


def listed(capsys: pytest.CaptureFixture[str], *more: str) -> list[dict[str, Any]]:
    assert main(["recipes", "--json", *more]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def test_every_recipe_is_listed_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    assert len(FILES) > 20
    paths = [one["path"] for one in listed(capsys)]
    assert sorted(paths) == [path.relative_to(ROOT).as_posix() for path in FILES]


def test_the_table_has_one_line_a_recipe_with_a_path_that_run_takes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for place in (ROOT, tmp_path):  # from a clone, and from anywhere else
        monkeypatch.chdir(place)
        assert main(["recipes"]) == 0
        lines = capsys.readouterr().out.splitlines()
        first = [line.split()[0] for line in lines if ".yaml" in line]
        assert [Path(one).resolve() for one in first] == [Path(one.path).resolve() for one in entries()]
        assert all(Path(one).is_file() for one in first)
    row = next(line for line in lines if "verl/sagc.yaml" in line)
    assert "8 GPUs" in row
    assert "smoke only" in row
    assert "straggler rate 99.6 % (G 16) to 43.4 %, 29.50 h to 16.00 h" in row  # whole, where it isn't a terminal
    for status in STATUSES:
        assert any(line.startswith(f"{status}: ") for line in lines)


def test_one_host_s_recipes_are_listed_alone(capsys: pytest.CaptureFixture[str]) -> None:
    found = listed(capsys, "--host", "verl")
    assert {one["host"] for one in found} == {"verl"}
    assert {one["recipe"] for one in found} == {f"verl/{path.stem}" for path in FILES if path.parent.name == "verl"}


def test_an_unknown_host_is_one_line_with_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "--host", "opnrlhf"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "no recipes for such a host; found 'opnrlhf'" in said.err
    assert "to mend: use 'openrlhf'" in said.err


@pytest.mark.parametrize("one", entries(), ids=lambda one: one.recipe)
def test_what_is_said_of_a_recipe_is_the_recipe_s_own(one: recipe_index.Entry) -> None:
    recipe = yaml.safe_load((ROOT / "recipes" / f"{one.recipe}.yaml").read_text(encoding="utf-8"))
    paper = recipe.get("paper") or {}
    assert (one.host, one.row, one.source) == (recipe["host"], paper.get("row"), paper.get("source"))
    assert one.host == one.recipe.partition("/")[0]
    assert one.description
    assert one.overlays == tuple(recipe.get("overlays", ()))
    assert one.device == (f"{devices(recipe)} GPUs" if one.host != "local" else "CPU")


def devices(recipe: Mapping[str, Any]) -> int:
    """The devices that a recipe's own settings ask for: trainer's and engines', once where they share them."""
    args = dict(flat(recipe["args"]))
    if recipe["host"] == "verl":
        pool = args.get("actor_rollout_ref.rollout.nnodes", 0) * args.get(
            "actor_rollout_ref.rollout.n_gpus_per_node", 0
        )
        return int(args["trainer.nnodes"] * args["trainer.n_gpus_per_node"] + pool)
    if recipe["host"] == "openrlhf":
        trainer = args["actor.num_nodes"] * args["actor.num_gpus_per_node"]
        engines = args["vllm.num_engines"] * args["vllm.tensor_parallel_size"]
        return int(trainer if args.get("train.colocate_all") else trainer + engines)
    ways = [re.fullmatch(r"\w+:d(\d+)", args[f"{side}.backend"]) for side in ("actor", "rollout")]
    return sum(int(way[1]) for way in ways if way)


def flat(settings: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def test_every_status_is_backed_by_the_words_of_a_file() -> None:
    table = yaml.safe_load((ROOT / "recipes/index.yaml").read_text(encoding="utf-8"))
    for name, said in table.items():
        evidence = said["evidence"]
        assert evidence["says"] in (ROOT / evidence["file"]).read_text(encoding="utf-8"), name
        # A claim that something ran rests on a results page, a host's page, or a test that runs it.
        if said["status"] == "shown here":
            assert evidence["file"] == "docs/results/README.md", name
        if said["status"] == "smoke only" and evidence["file"].startswith("tests/"):
            assert re.search(r"smoke|test_local_recipes", evidence["file"]), name


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ROOT / "recipes", tmp_path / "recipes"))


def refused(place: Path) -> str:
    with pytest.raises(ConfigurationError) as error:
        entries(place)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_recipe_that_the_table_lacks_is_noticed(copy: Path) -> None:
    assert entries(copy)
    shutil.copy(copy / "verl/sagc.yaml", copy / "verl/new.yaml")
    assert "name different recipes; found 'verl/new'" in refused(copy)
    (copy / "verl/new.yaml").unlink()
    (copy / "verl/sagc.yaml").unlink()
    assert "name different recipes; found 'verl/sagc'" in refused(copy)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("status: needs hardware", "status: need hardware", "use 'needs hardware'"),
        ("device: 48 GPUs, ", "", "an entry needs device, status and evidence"),
        ("local/bounded: {", "local/bounded: {{", "not valid YAML"),
    ],
)
def test_a_table_that_is_wrong_is_one_line(copy: Path, before: str, after: str, words: str) -> None:
    text = (copy / "index.yaml").read_text(encoding="utf-8")
    assert before in text
    (copy / "index.yaml").write_text(text.replace(before, after, 1), encoding="utf-8")
    assert words in refused(copy)


def test_recipes_are_found_in_an_installed_package_and_their_lack_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, copy: Path
) -> None:
    package = tmp_path / "site-packages" / "metronome"
    package.mkdir(parents=True)
    monkeypatch.setattr(recipe_index, "__file__", str(package / "recipe_index.py"))
    copy.rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigurationError, match="the recipes aren't installed"):
        folder()
    shutil.copytree(tmp_path / "elsewhere", package / "_recipes")
    assert folder() == package / "_recipes"
    assert len(entries()) == len(FILES)


def test_the_package_brings_the_recipes_to_that_place() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    wheel = project.partition("[tool.hatch.build.targets.wheel]")[2].partition("[tool.hatch.build.targets.sdist]")[0]
    assert re.search(r'^recipes = "metronome/_recipes"', wheel, flags=re.MULTILINE)
    assert re.search(r'only-include = \[[^\]]*"recipes",', wheel)
