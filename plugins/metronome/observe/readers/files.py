"""Text, JSON lines and numbers of a run's files, with an error that names file and line."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metronome.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Line:
    """A record of a JSONL file and where it stands: ``where`` is ``file, line n``."""

    data: dict[str, Any]
    where: str

    def number(self, *keys: str) -> float | None:
        """The first of ``keys`` that is there, as a finite number; None if there is none.

        Raises ConfigurationError for a value that isn't a number, or is NaN or infinite.
        """
        for key in keys:
            if self.data.get(key) is not None:
                return finite(self.data[key], key, self.where)
        return None

    def whole(self, *keys: str) -> int | None:
        """As ``number``, but an integer."""
        value = self.number(*keys)
        return None if value is None else integer(value, keys[0], self.where)

    def refuse_negative(self, *names: str) -> None:
        """Raises ConfigurationError for a negative number, or a list with one, under a key that begins with a name."""
        for key, value in self.data.items():
            if key.startswith(names):
                for one in value if isinstance(value, list) else [value]:
                    if isinstance(one, int | float) and one < 0:
                        raise ConfigurationError(f"{key} can't be negative", found=one, where=self.where, remedy=MEND)

    def numbers(self, key: str) -> list[float]:
        """The list under ``key``, each a finite number; empty if there is none."""
        value = self.data.get(key)
        if value is None:
            return []
        if not isinstance(value, list):
            raise ConfigurationError(f"{key} must be a list of numbers", found=value, where=self.where, remedy=MEND)
        return [finite(one, key, self.where) for one in value]


IN_TURNS = ("synchronous", "colocated")
"""Sources under which generation and training take turns."""
MEND = "mend or remove that line, or give the file that the host itself wrote"


def finite(value: object, name: str, where: str) -> float:
    """``value`` as a finite number; raises ConfigurationError naming ``name`` and ``where``."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigurationError(f"{name} must be a finite number", found=value, where=where, remedy=MEND)
    return float(value)


def integer(value: object, name: str, where: str) -> int:
    """``value`` as a whole number; raises ConfigurationError naming ``name`` and ``where``."""
    number = finite(value, name, where)
    if number != int(number):
        raise ConfigurationError(f"{name} must be a whole number", found=value, where=where, remedy=MEND)
    return int(number)


def read_text(path: Path) -> str:
    """The file's text; raises ConfigurationError for a file that can't be read or isn't UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"the file can't be read: {error}", found=str(path), remedy="give a readable file in UTF-8"
        ) from None


def read_jsonl(path: Path, notes: list[str]) -> list[Line]:
    """The records of a JSONL file, in their order; a last line that is cut (a run that still writes) is left out.

    Appends a note for a cut line. Raises ConfigurationError for any other line that isn't a JSON object.
    """
    lines = read_text(path).split("\n")
    result = []
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        where = f"{path}, line {number}"
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            if number == len(lines):  # no line break follows: it is being written, or was cut by a kill
                notes.append(f"The last line of {path.name} is cut (a run that still writes, or was killed); left out.")
                break
            raise ConfigurationError(
                f"a line isn't JSON: {error.msg}", found=text[:80], where=where, remedy=MEND
            ) from None
        if not isinstance(data, dict):
            raise ConfigurationError("a line isn't a JSON object", found=text[:80], where=where, remedy=MEND)
        result.append(Line(data, where))
    return result


def host_metrics(
    data: Mapping[str, Any], notes: list[str], where: str, leave_out: Iterable[str] = ()
) -> dict[str, float]:
    """The host's own numbers under its own names; what isn't finite is left out with a note."""
    skipped = set(leave_out)
    result, broken = {}, []
    for key, value in data.items():
        if key in skipped or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if math.isfinite(value):
            result[key] = float(value)
        else:
            broken.append(key)
    if broken:
        notes.append(f"Not a finite number in {where}, left out: {', '.join(sorted(broken))}.")
    return result


def source_of(given: Mapping[str, object], found: str | None) -> str | None:
    """The schedule that the user gave, else the one that was ``found``."""
    source = given.get("source")
    return source if isinstance(source, str) else found


def renumbered(own: Sequence[int], called: str) -> list[str]:
    """A note that says which of the host's ``own`` step numbers is which here; none where they are 0, 1, 2, ...

    Args:
        own: in their order.
        called: what a step is called by the host: ``verl's step``.
    """
    if not own or list(own) == list(range(len(own))):
        return []
    last = f", {called} {own[-1]} is {len(own) - 1}" if len(own) > 1 else ""
    return [f"Steps are numbered from 0 here: {called} {own[0]} is 0{last}."]
