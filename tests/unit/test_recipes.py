"""Recipes: what a file, an override or a host's name can get wrong is one line with place and remedy."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metronome import recipes
from metronome.errors import ConfigurationError
from metronome.recipes import load_host, load_recipe, override, parse_vary, parse_yaml


class Point:
    """An entry point of the group metronome.hosts."""

    def __init__(self, name: str, loaded: object) -> None:
        self.name, self.module, self.loaded = name, f"metronome_{name}.host", loaded
        self.value = self.module
        self.dist = types.SimpleNamespace(name="metronome-rl", version="1")

    def load(self) -> object:
        if isinstance(self.loaded, Exception):
            raise self.loaded
        return self.loaded


@pytest.fixture(autouse=True)
def _hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    known = [
        Point("local", types.SimpleNamespace(run=None)),
        Point("verl", ModuleNotFoundError("No module named 'verl'", name="verl.trainer")),
        Point(
            "openrlhf",
            ModuleNotFoundError("No module named 'metronome_openrlhf.x'", name="metronome_openrlhf.x"),
        ),
    ]
    monkeypatch.setattr(recipes, "entry_points", lambda group: known if group == "metronome.hosts" else [])


def write(folder: Path, text: str) -> str:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def refused(call: Any, *arguments: Any) -> str:
    with pytest.raises(ConfigurationError) as error:
        call(*arguments)
    assert error.value.exit_code == 2
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_recipe_is_read_as_its_mapping(tmp_path: Path) -> None:
    path = write(tmp_path, "host: local\nmetronome: {loss: a3po}\nlr: 2.0e-5\n")
    assert load_recipe(path) == {"host": "local", "metronome": {"loss": "a3po"}, "lr": 2e-5}


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    path = str(tmp_path / "no.yaml")
    assert f"no such recipe; found '{path}'" in refused(load_recipe, path)


def test_a_missing_file_is_mended_with_the_nearest_beside_it(tmp_path: Path) -> None:
    (tmp_path / "sagc_baselines.yaml").touch()
    (tmp_path / "sagc.yaml").touch()
    assert f"to mend: use '{tmp_path / 'sagc.yaml'}'" in refused(load_recipe, tmp_path / "sagcc.yaml")
    assert "give the path of a YAML file" in refused(load_recipe, tmp_path / "other.json")
    assert "give the path of a YAML file" in refused(load_recipe, tmp_path / "nowhere" / "sagc.yaml")


def test_a_folder_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    assert "the recipe can't be read" in refused(load_recipe, tmp_path)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"\xff\xfe\x00host")
    assert "the recipe can't be read" in refused(load_recipe, path)


def test_broken_yaml_names_line_and_column(tmp_path: Path) -> None:
    path = write(tmp_path, "host: local\nmetronome: {loss: a3po\nlr: 1\n")
    text = refused(load_recipe, path)
    assert "not valid YAML" in text
    assert f"{path}, line 3, column 3" in text


def test_a_control_character_is_refused(tmp_path: Path) -> None:
    assert "not valid YAML" in refused(load_recipe, write(tmp_path, "host: lo\x07cal"))


@pytest.mark.parametrize(("text", "found"), [("", "an empty file"), ("- host", "list"), ("host", "str"), ("3", "int")])
def test_a_recipe_that_is_no_mapping_is_refused(tmp_path: Path, text: str, found: str) -> None:
    message = refused(load_recipe, write(tmp_path, text))
    assert f"a recipe must be a mapping; found '{found}'" in message


@pytest.mark.parametrize(
    ("text", "key", "line"),
    [
        ("host: local\nlr: 1\nhost: local\n", "host", 3),
        ("host: local\nmetronome:\n  loss: ppo\n  loss: a3po\n", "loss", 4),
        ("{host: local, lr: 1, lr: 2}", "lr", 1),
    ],
)
def test_a_repeated_key_is_refused_with_both_lines(tmp_path: Path, text: str, key: str, line: int) -> None:
    message = refused(load_recipe, write(tmp_path, text))
    assert f"the key '{key}' stands twice, first on line" in message
    assert f", line {line}, column" in message


def test_equal_keys_of_different_mappings_and_merged_keys_are_fine() -> None:
    text = "a: &base {x: 1, y: 2}\nb: {<<: *base, x: 3}\n1: one\n'1': text\n"
    assert parse_yaml(text, "here") == {"a": {"x": 1, "y": 2}, "b": {"x": 3, "y": 2}, 1: "one", "1": "text"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2e-5", 2e-5),
        ("1E3", 1000.0),
        ("-3.5e+2", -350.0),
        ("5", 5),
        ("e5", "e5"),
        ("2e", "2e"),
        ("'2e-5'", "2e-5"),
    ],
)
def test_numbers_in_exponent_form_are_numbers(text: str, value: object) -> None:
    parsed = parse_yaml(text, "here")
    assert parsed == value
    assert type(parsed) is type(value)


def test_a_missing_host_is_refused(tmp_path: Path) -> None:
    text = refused(load_recipe, write(tmp_path, "metronome: {}"))
    assert "a recipe must name its host" in text
    assert "to mend: host: local" in text


def test_a_host_that_is_no_name_is_refused(tmp_path: Path) -> None:
    assert "a recipe must name its host; found ['local']" in refused(load_recipe, write(tmp_path, "host: [local]"))


def test_an_unknown_host_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    text = refused(load_recipe, write(tmp_path, "host: lokal"))
    assert "no such host; found 'lokal'" in text
    assert "use 'local'" in text


def test_overrides_apply_in_their_order_and_reach_inside(tmp_path: Path) -> None:
    path = write(tmp_path, "host: local\nmetronome: {loss: ppo}\n")
    changes = [
        "metronome.loss=a3po",
        "metronome.a3po.cap=3",
        "lr=1",
        "lr=2e-5",
        "sizes=[4, 8]",
        "x=a=b",
        "none=",
    ]
    assert load_recipe(path, changes) == {
        "host": "local",
        "metronome": {"loss": "a3po", "a3po": {"cap": 3}},
        "lr": 2e-5,
        "sizes": [4, 8],
        "x": "a=b",
        "none": None,
    }


def test_an_override_may_name_the_host(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path, "lr: 1"), ["host=local"])["host"] == "local"


def test_an_override_leaves_the_original_alone() -> None:
    before = {"a": {"b": 1}}
    assert override(before, "a.b=2") == {"a": {"b": 2}}
    assert before == {"a": {"b": 1}}


@pytest.mark.parametrize("wrong", ["lr", "=3", "a..b=3", ".a=3", "a.=3", ""])
def test_an_override_that_is_no_assignment_is_refused(wrong: str) -> None:
    text = refused(override, {}, wrong)
    assert f"an override must read key=value; found {wrong!r}" in text


@pytest.mark.parametrize("value", [3, "text", [1], False])
def test_an_override_through_something_other_than_a_mapping_is_refused(value: object) -> None:
    text = refused(override, {"a": {"b": value}}, "a.b.c=1", "recipe.yaml")
    assert "runs through a.b, which isn't a mapping" in text
    assert "in recipe.yaml" in text


def test_an_override_whose_value_is_not_yaml_is_refused() -> None:
    assert "the override 'a=[1'" in refused(override, {}, "a=[1")


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.text("abcde", min_size=1, max_size=3), min_size=1, max_size=4),
    st.one_of(st.integers(), st.booleans(), st.floats(allow_nan=False, allow_infinity=False)),
)
def test_an_override_can_be_read_back(path: list[str], value: object) -> None:
    found: Any = override({}, f"{'.'.join(path)}={str(value).lower()}")
    for part in path:
        found = found[part]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "metronome.rollout_source=synchronous,periodic",
            ("metronome.rollout_source", ["synchronous", "periodic"]),
        ),
        ("sizes=[4,8],[16]", ("sizes", ["[4,8]", "[16]"])),
        ("x={a: 1, b: 2}, 3", ("x", ["{a: 1, b: 2}", "3"])),
        ("x='a,b',c", ("x", ["'a,b'", "c"])),
    ],
)
def test_vary_takes_a_key_and_its_values(text: str, expected: tuple[str, list[str]]) -> None:
    assert parse_vary(text) == expected


@pytest.mark.parametrize("wrong", ["", "lr", "lr=", "lr=1", "=1,2", "lr=1,", "lr=1,,2", "lr=1,1"])
def test_vary_without_two_different_values_is_refused(wrong: str) -> None:
    assert "--vary takes one key and at least two different values" in refused(parse_vary, wrong)


def test_a_host_is_loaded_by_name() -> None:
    assert hasattr(load_host("local"), "run")


def test_a_host_whose_extra_is_missing_says_what_to_install() -> None:
    text = refused(load_host, "verl")
    assert "the host 'verl' needs a package that isn't installed; found 'verl'" in text
    assert 'pip install "metronome-rl[verl]"' in text


def test_a_fault_inside_a_host_is_not_taken_for_a_missing_extra() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"metronome_openrlhf\.x"):
        load_host("openrlhf")
