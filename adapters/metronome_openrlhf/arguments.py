"""Setting and refusing OpenRLHF's arguments, each by its flag."""

from __future__ import annotations

from typing import Any

from metronome.errors import ConfigurationError

GROUP_ESTIMATORS = ("group_norm", "dr_grpo", "rloo")
"""OpenRLHF's advantage estimators that look at one group at a time (experience_maker.py of 0.11.2)."""

WHERE = "--metronome"


def put(args: Any, flag: str, value: Any, notes: list[str], why: str) -> None:
    """Sets ``--a.b`` and says so, unless it has that value."""
    *path, last = flag.split(".")
    place = args
    for part in path:
        place = getattr(place, part)
    if getattr(place, last) != value:
        setattr(place, last, value)
        notes.append(f"--{flag} {value}  ({why})")


def value_of(args: Any, flag: str) -> Any:
    """The value of ``--a.b`` in nested arguments; None where there is no such flag."""
    place = args
    for part in flag.split("."):
        place = getattr(place, part, None)
    return place


def refuse(condition: Any, what: str, flag: str, found: Any, remedy: str) -> None:
    """Raises ConfigurationError about ``--flag`` if ``condition`` holds."""
    if condition:
        raise ConfigurationError(what, found=found, where=f"--{flag}", remedy=remedy)
