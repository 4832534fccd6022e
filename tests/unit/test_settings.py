"""The ``metronome:`` block: unknown keys, wrong types and stray options are refused with the remedy."""

from __future__ import annotations

import pickle
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field, field_validator

from metronome.errors import ConfigurationError
from metronome.settings import SELECTORS, Options, parse_options, parse_settings

OFFERED = {"synchronous", "periodic", "ppo", "a3po", "host", "shared_prompt", "fixed", "sagc"}


class Inner(Options):
    depth: int = 1


class Example(Options):
    cap: float = 5.0
    mode: str
    inner: Inner = Inner()

    @field_validator("cap")
    @classmethod
    def _positive(cls, cap: float) -> float:
        if cap <= 0:
            raise ValueError("set cap above 0, such as 5.0")
        return cap


def refused(block: Any, **options: Any) -> str:
    with pytest.raises(ConfigurationError) as error:
        parse_settings(block, OFFERED, **options)
    assert error.value.exit_code == 2
    assert "\n" not in str(error.value)
    return str(error.value)


def refused_options(values: Any) -> str:
    with pytest.raises(ConfigurationError) as error:
        parse_options(Example, values, "metronome.example")
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("block", [None, {}])
def test_an_empty_block_means_the_plain_run(block: Any) -> None:
    parsed = parse_settings(block, OFFERED)
    assert {key: getattr(parsed, key) for key in SELECTORS} == {
        "rollout_source": "synchronous",
        "loss": "ppo",
        "attention": "host",
        "group_controller": "fixed",
    }
    assert parsed.options_of("ppo") == {}


def test_options_live_under_the_selected_plugin_s_name() -> None:
    parsed = parse_settings({"loss": "a3po", "a3po": {"cap": 3}}, OFFERED)
    assert parsed.options_of("a3po") == {"cap": 3}


@pytest.mark.parametrize(
    ("key", "meant"),
    [("los", "loss"), ("rollout_sorce", "rollout_source"), ("a3p0", "a3po"), ("sgac", "sagc")],
)
def test_an_unknown_key_is_refused_with_the_nearest_one(key: str, meant: str) -> None:
    text = refused({key: "x"}, where="recipe.yaml: metronome")
    assert f"found '{key}'" in text
    assert "in recipe.yaml: metronome" in text
    assert f"use '{meant}'" in text


def test_an_unknown_key_near_nothing_lists_the_known_keys() -> None:
    assert "use one of a3po, attention" in refused({"zzzzzz": 1})


@pytest.mark.parametrize("block", [[], "periodic", 3, True])
def test_a_block_that_is_no_mapping_is_refused(block: Any) -> None:
    assert "must be a mapping" in refused(block)


@pytest.mark.parametrize("value", [None, 3, ["ppo"], {"name": "ppo"}, True])
@pytest.mark.parametrize("selector", sorted(SELECTORS))
def test_a_selector_that_is_no_name_is_refused(selector: str, value: Any) -> None:
    assert f"{selector} must be a plug-in's name" in refused({selector: value})


@pytest.mark.parametrize("value", [None, 3, ["cap"], "cap"])
def test_options_that_are_no_mapping_are_refused(value: Any) -> None:
    assert "a plug-in's options must be a mapping" in refused({"loss": "a3po", "a3po": value})


def test_options_of_an_unselected_plugin_are_refused_with_the_selectors() -> None:
    text = refused({"a3po": {"cap": 3}})
    assert "found 'a3po'" in text
    assert "metronome.a3po" in text
    assert "select 'a3po' with one of rollout_source, loss, attention, group_controller" in text


def test_compare_may_keep_options_of_unselected_plugins() -> None:
    parsed = parse_settings({"a3po": {"cap": 3}}, OFFERED, allow_unselected=True)
    assert parsed.options_of("a3po") == {"cap": 3}
    assert parsed.loss == "ppo"


def test_settings_are_frozen() -> None:
    parsed = parse_settings(None, OFFERED)
    with pytest.raises(Exception, match="frozen"):
        parsed.loss = "a3po"  # type: ignore[misc]


def test_settings_reach_worker_processes_unchanged() -> None:
    parsed = parse_settings({"loss": "a3po", "a3po": {"cap": 3, "sizes": [4, 8]}}, OFFERED)
    assert pickle.loads(pickle.dumps(parsed)) == parsed


@settings(max_examples=50, deadline=None)
@given(st.text(min_size=1, max_size=12).filter(lambda key: key not in OFFERED and key not in SELECTORS))
def test_no_unknown_key_slips_through(key: str) -> None:
    refused({key: {}})


def test_options_are_parsed_with_their_defaults() -> None:
    parsed = parse_options(Example, {"mode": "mask"}, "metronome.example")
    assert (parsed.cap, parsed.mode, parsed.inner.depth) == (5.0, "mask", 1)


def test_an_unknown_option_is_refused_with_the_nearest_one() -> None:
    text = refused_options({"mode": "mask", "cpa": 3})
    assert "found 'cpa'; in metronome.example; to mend: use 'cap'" in text


def test_an_unknown_nested_option_names_its_place() -> None:
    text = refused_options({"mode": "mask", "inner": {"dept": 3}})
    assert "found 'dept'; in metronome.example.inner; to mend: use 'depth'" in text


def test_a_wrong_type_names_key_and_value() -> None:
    text = refused_options({"mode": "mask", "cap": "high"})
    assert "found 'high'; in metronome.example.cap" in text


class Typed(Options):
    rate: float = 1.0
    count: int = 1
    on: bool = True
    name: str = "x"
    sizes: tuple[int, ...] = (4,)
    mode: Literal["mask", "truncate"] = "mask"
    several: int = Field(default=2, ge=1)
    share: float = Field(default=0.5, gt=0, lt=1)
    inner: Inner = Inner()


@pytest.mark.parametrize(
    ("values", "remedy"),
    [
        ({"rate": "fast"}, "rate: a number"),
        ({"rate": None}, "rate: a number"),
        ({"count": "many"}, "count: a whole number"),
        ({"count": 1.5}, "count: a whole number"),
        ({"on": "perhaps"}, "on: true or false"),
        ({"name": 3}, "name: text"),
        ({"sizes": 4}, "sizes: a list, as [4, 8]"),
        ({"sizes": ["x"]}, "sizes: a whole number"),
        ({"mode": "cut"}, "mode: one of 'mask' or 'truncate'"),
        ({"several": 0}, "several: 1 or more"),
        ({"share": 0}, "share: above 0"),
        ({"share": 1}, "share: below 1"),
        ({"inner": 3}, "inner: a mapping"),
    ],
)
def test_a_wrong_value_is_mended_in_our_words(values: Any, remedy: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        parse_options(Typed, values, "metronome.example")
    assert error.value.remedy == remedy


def test_true_isn_t_the_number_one() -> None:
    """A flag without its value is true."""
    with pytest.raises(ConfigurationError, match=r"found True; in somewhere\.cap; to mend: cap: a value of its own"):
        parse_options(Example, {"cap": True, "mode": "fast"}, "somewhere")


def test_a_missing_option_is_named() -> None:
    assert "a required key is missing; in metronome.example.mode" in refused_options({})


def test_a_validator_s_remedy_is_shown() -> None:
    assert "found -1; in metronome.example.cap; to mend: set cap above 0" in refused_options({"mode": "m", "cap": -1})


def test_option_names_that_are_no_strings_are_refused() -> None:
    assert "option names must be strings" in refused_options({3: 4})
