"""The recipes that come along: paper row, host, device, and what was run of each (``metronome recipes``)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from metronome.errors import ConfigurationError, nearest
from metronome.recipes import parse_yaml

HOSTS = ("local", "verl", "openrlhf", "areal")
"""The hosts in the order in which they are listed."""
STATUSES = {
    "shown here": "ran on its real work on two CPU cores",
    "smoke only": "ran with a tiny model on a CPU",
    "needs hardware": "composed and validated, never run",
}
"""What ``status`` says, and what it means."""


@dataclass(frozen=True)
class Entry:
    """One recipe.

    Attributes:
        recipe: host and name, as ``verl/sagc``.
        path: what ``metronome run`` takes.
        description: the recipe's own.
        row, source: of the paper that it stands for; None where there is none.
        device: what its real work needs.
        status: one of STATUSES.
        evidence: the file of the repository that shows the status.
        overlays: its variants.
    """

    recipe: str
    host: str
    path: str
    description: str
    row: str | None
    source: str | None
    device: str
    status: str
    evidence: str
    overlays: tuple[str, ...]


def folder() -> Path:
    """The folder of the recipes: the repository's in a clone, the one inside the package after an install.

    Raises ConfigurationError where the installed package lacks them.
    """
    package = Path(__file__).resolve().parent
    places = (package.parents[1] / "recipes", package / "_recipes")
    for place in places:
        if (place / "index.yaml").is_file():
            return place
    raise ConfigurationError(
        "the recipes aren't installed",
        where=" and ".join(map(str, places)),
        remedy="install the package again, or run from a clone of the repository",
    )


def entries(place: Path | None = None) -> list[Entry]:
    """All recipes in ``place`` (``folder()`` if None), by host and name.

    Raises ConfigurationError for a recipe that the table lacks, one that only the table has, and an unknown status.
    """
    place = folder() if place is None else place
    table = _mapping(place / "index.yaml")
    there = {f"{path.parent.name}/{path.stem}": path for path in sorted(place.glob("*/*.yaml"))}
    if odd := sorted(table.keys() ^ there.keys()):
        raise ConfigurationError(
            "the table and the folder name different recipes",
            found=", ".join(odd),
            where=str(place / "index.yaml"),
            remedy="one entry a recipe",
        )
    order = {host: number for number, host in enumerate(HOSTS)}
    named = sorted(there, key=lambda name: (order.get(there[name].parent.name, len(HOSTS)), name))
    return [_entry(name, there[name], table[name], place) for name in named]


def show(host: str | None, as_json: bool) -> int:
    """Prints the recipes, those of ``host`` if it is given; raises ConfigurationError for a host without any."""
    found = entries()
    hosts = list(dict.fromkeys(one.host for one in found))
    if host is not None and host not in hosts:
        raise ConfigurationError("no recipes for such a host", found=host, where="--host", remedy=nearest(host, hosts))
    found = [one for one in found if host in (None, one.host)]
    if as_json:
        print(json.dumps([asdict(one) for one in found], indent=2))
    else:
        _print_table(found)
    return 0


def _entry(name: str, path: Path, said: Any, place: Path) -> Entry:
    where = f"{place / 'index.yaml'}: {name}"
    keys = {"device", "status", "evidence"}
    if not isinstance(said, dict) or said.keys() != keys:
        raise ConfigurationError("an entry needs device, status and evidence", found=said, where=where, remedy="add it")
    if said["status"] not in STATUSES:
        remedy = nearest(str(said["status"]), STATUSES)
        raise ConfigurationError("no such status", found=said["status"], where=f"{where}: status", remedy=remedy)
    recipe = _mapping(path)
    paper = recipe.get("paper") or {}
    return Entry(
        recipe=name,
        host=str(recipe.get("host")),
        path=_shown(path),
        description=" ".join(str(recipe.get("description") or "").split()),
        row=paper.get("row"),
        source=paper.get("source"),
        device=str(said["device"]),
        status=said["status"],
        evidence=said["evidence"]["file"],
        overlays=tuple(recipe.get("overlays") or ()),
    )


def _mapping(path: Path) -> Mapping[str, Any]:
    try:
        read = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"can't be read: {error}", found=str(path), remedy="give a readable file") from None
    if not isinstance(read, dict):
        raise ConfigurationError(
            "must be a mapping",
            found=type(read).__name__,
            where=str(path),
            remedy="write keys and their values, as key: value",
        )
    return read


def _shown(path: Path) -> str:
    """``path`` as the command line takes it here: relative where it lies below the working folder."""
    here = Path(os.getcwd()).resolve()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _print_table(found: Sequence[Entry]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for title in ("recipe", "host", "device", "status"):
        table.add_column(title, no_wrap=True)
    table.add_column("paper row, or what it is", no_wrap=True, overflow="ellipsis")
    for one in found:
        table.add_row(one.path, one.host, one.device, one.status, one.row or one.description)
    console = Console(markup=False, highlight=False)
    widest = max(len(one.path) for one in found) + max(len(one.row or one.description) for one in found) + 60
    # One line a recipe: in a terminal rows end where it does, in a file or a pipe they are whole.
    console.width = max(console.width, max(len(one.path) for one in found) + 60) if console.is_terminal else widest
    console.print(table)
    for status, meaning in STATUSES.items():
        console.print(f"{status}: {meaning}")
    console.print("to start one: metronome run RECIPE; verl, openrlhf and areal run a tiny model on a CPU with --smoke")
