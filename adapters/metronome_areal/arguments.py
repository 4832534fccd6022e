"""Setting and refusing keys of AReaL's configuration, each by its name."""

from __future__ import annotations

from typing import Any

from metronome.errors import ConfigurationError

WHERE = "metronome"


def put(config: Any, key: str, value: Any, notes: list[str], why: str) -> None:
    """Sets ``key`` of ``config`` and says so, unless it has that value."""
    *path, last = key.split(".")
    place = config
    for part in path:
        place = getattr(place, part)
    if getattr(place, last) != value:
        setattr(place, last, value)
        notes.append(f"{key}={value}  ({why})")


def refuse(condition: Any, what: str, key: str, found: Any, remedy: str) -> None:
    """Raises ConfigurationError about ``key`` if ``condition`` holds."""
    if condition:
        raise ConfigurationError(what, found=found, where=key, remedy=remedy)
