"""What lies in a run's folder, so that readers find their host's files wherever the user put them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from metronome.errors import ConfigurationError
from metronome.observe.readers.tensorboard import Logged, read_scalars

_SKIPPED = ("checkpoints", "ckpt", "wandb", "swanlog", "hydra")
_MOST = 50_000
Record = dict[str, Any]


@dataclass(frozen=True)
class Inventory:
    """A run's place, a file or a folder with everything below it."""

    place: Path

    @cached_property
    def files(self) -> tuple[Path, ...]:
        """Every file, sorted; folders of checkpoints and of other trackers aren't looked into.

        Raises ConfigurationError for a folder of more files than any run writes.
        """
        if self.place.is_file():
            return (self.place,)
        found: list[Path] = []
        for folder, inner, names in os.walk(self.place):
            inner[:] = sorted(name for name in inner if name not in _SKIPPED and not name.startswith("."))
            found += [Path(folder, name) for name in names if not name.startswith(".")]
            if len(found) > _MOST:
                raise ConfigurationError(
                    f"more than {_MOST} files lie here", found=str(self.place), remedy="give the folder of one run"
                )
        return tuple(sorted(found))

    @cached_property
    def heads(self) -> dict[Path, Record]:
        """Each JSONL file's first record; files without a whole one are left out."""
        result = {}
        for path in self.files:
            if path.suffix == ".jsonl" and (head := _head(path)) is not None:
                result[path] = head
        return result

    def lines_with(self, *keys: str) -> list[Path]:
        """The JSONL files whose first record has all of ``keys``."""
        return [path for path, head in self.heads.items() if all(key in head for key in keys)]

    @cached_property
    def events(self) -> tuple[Path, ...]:
        """TensorBoard's event files."""
        return tuple(path for path in self.files if "tfevents" in path.name)

    @cached_property
    def _scalars(self) -> tuple[dict[Path, dict[int, Logged]], list[str]]:
        notes: list[str] = []
        folders = sorted({path.parent for path in self.events})
        return {
            folder: read_scalars([one for one in self.events if one.parent == folder], notes) for folder in folders
        }, notes

    def has_tag(self, known: Callable[[str], bool]) -> bool:
        """Whether any event file has a tag that is ``known``."""
        folders, _ = self._scalars
        return any(known(tag) for steps in folders.values() for one in steps.values() for tag in one.values)

    def scalars(self, known: Callable[[str], bool], notes: list[str]) -> dict[int, Logged] | None:
        """What the one folder of event files that has a tag which is ``known`` has logged; None if there is none.

        Raises ConfigurationError if several folders have such tags, which are several runs.
        """
        folders, found = self._scalars
        chosen = {
            folder: steps
            for folder, steps in folders.items()
            if any(known(tag) for logged in steps.values() for tag in logged.values)
        }
        one_of([*chosen], self.place)
        notes += found
        return next(iter(chosen.values()), None)

    @cached_property
    def logs(self) -> dict[Path, str]:
        """The texts of .log, .txt and .out files; what isn't UTF-8 in them is replaced."""
        chosen = [path for path in self.files if path.suffix in (".log", ".txt", ".out")]
        return {path: path.read_text(encoding="utf-8", errors="replace") for path in chosen}


def one_of(places: Sequence[Path], where: Path) -> Path | None:
    """The only one of ``places``, or None; raises ConfigurationError if there are several, which are several runs."""
    if len(places) > 1:
        shown = [str(one.relative_to(where)) if one.is_relative_to(where) else str(one) for one in places[:4]]
        raise ConfigurationError(
            f"the records of {len(places)} runs lie here", found=shown, where=str(where), remedy="give one of them"
        )
    return places[0] if places else None


def _head(path: Path) -> Record | None:
    try:
        with path.open(encoding="utf-8") as file:
            data = json.loads(file.readline())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError):
        return None
    return data if isinstance(data, dict) else None
