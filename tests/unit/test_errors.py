"""An error's message has four parts on one line and survives the way between processes."""

from __future__ import annotations

import pickle

import pytest

from metronome.device import resolve_device
from metronome.errors import (
    ConfigurationError,
    EqualityViolated,
    MetronomeError,
    PluginError,
    VersionMismatch,
    WaitTimeout,
    WorkerFailed,
    nearest,
)

EVERY = [
    MetronomeError,
    ConfigurationError,
    PluginError,
    VersionMismatch,
    WaitTimeout,
    WorkerFailed,
    EqualityViolated,
]


def test_a_message_says_what_was_found_where_and_what_to_set() -> None:
    error = ConfigurationError("G is too small", found=1, where="recipe: size", remedy="size: 8")
    assert str(error) == "G is too small; found 1; in recipe: size; to mend: size: 8"


def test_parts_that_are_not_known_are_left_out() -> None:
    assert str(MetronomeError("it failed")) == "it failed"
    assert str(MetronomeError("it failed", remedy="retry")) == "it failed; to mend: retry"


def test_a_found_value_of_zero_or_false_is_shown() -> None:
    assert "found 0" in str(MetronomeError("wrong", found=0))
    assert "found False" in str(MetronomeError("wrong", found=False))


@pytest.mark.parametrize("kind", EVERY)
def test_a_message_is_one_line_whatever_its_parts_hold(kind: type[MetronomeError]) -> None:
    assert "\n" not in str(kind("a\nb", found="c\nd", where="e\n\nf", remedy="g\r\nh"))


@pytest.mark.parametrize("kind", EVERY)
def test_an_error_survives_the_way_between_processes(kind: type[MetronomeError]) -> None:
    error = kind("G is too small", found=[1, 2], where="worker 1", remedy="size: 8")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error)
    assert (copy.what, copy.found, copy.where, copy.remedy) == (
        error.what,
        error.found,
        error.where,
        error.remedy,
    )


def test_bad_input_exits_with_2_and_a_failed_run_with_1() -> None:
    codes = {kind.__name__: kind.exit_code for kind in EVERY}
    assert {name for name, code in codes.items() if code == 2} == {"ConfigurationError", "PluginError"}
    assert set(codes.values()) == {1, 2}


@pytest.mark.parametrize(
    ("word", "known", "remedy"),
    [
        ("periodc", ["periodic", "bounded"], "use 'periodic'"),
        ("zzz", ["b", "a"], "use one of a, b"),
        ("zzz", [], "use one of none"),
    ],
)
def test_the_nearest_known_word_is_proposed(word: str, known: list[str], remedy: str) -> None:
    assert nearest(word, known) == remedy


def test_an_unknown_device_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigurationError, match=r"'cuad'; in machine\.device; to mend: use 'cuda'"):
        resolve_device("cuad", "machine.device")


def test_the_cpu_is_resolved_without_torch() -> None:
    assert (resolve_device("cpu").kind, resolve_device("cpu").collective) == ("cpu", "gloo")
