"""A run's own records, whichever host wrote them, as one ``RunRecord``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from metronome.errors import ConfigurationError, nearest
from metronome.observe.readers import areal, csv, local, openrlhf, verl
from metronome.observe.readers.inventory import Inventory
from metronome.observe.records import RunRecord
from metronome.recipes import near_file, override

SETTINGS: dict[str, tuple[type, ...]] = {
    "source": (str,),
    "staleness": (int, float),
    "workers": (int,),
    "slots": (int,),
    "trainer_ranks": (int,),
    "prompts": (int,),
    "group_size": (int,),
    "max_tokens": (int,),
    "loss": (str,),
    "attention": (str,),
    "group_controller": (str,),
    "tokenizer": (str,),
}
"""What ``overrides`` may set over a run's records, with its types; readers use the same keys in ``settings``."""

TRACES = Path(__file__).parent.parent / "traces"
"""Shipped real traces, one a format; their README.md says what made them."""

SOURCES = ("synchronous", "colocated", "periodic", "bounded")
_READERS = (local, csv, verl, openrlhf, areal)


def read_run(path: str | Path, overrides: Iterable[str] = ()) -> RunRecord:
    """The records of the run at ``path``: a folder or file of any host, or a CSV.

    Args:
        path: what the host wrote; the format is found by what is there. A shipped trace goes by its name
            (``TRACES``) where nothing is called so here.
        overrides: ``key=value``, what the records lack (``SETTINGS``); they stand over what was recorded.

    Raises ConfigurationError if nothing known is there (it lists what was looked for), for a broken file, and for an
    override that doesn't exist or fit.
    """
    place = Path(path).expanduser()
    shipped = not place.exists() and len(place.parts) == 1 and (TRACES / place).exists()
    if shipped:
        place = TRACES / place
    if not place.exists():
        raise ConfigurationError(
            "no such run", found=str(path), remedy=near_file(place) or "give a run's folder or file, or a CSV"
        )
    if place.is_file() and local.found(Inventory(place.parent)):
        place = place.parent
    files, given = Inventory(place), _settings(overrides)
    found = [one for one in _READERS if one.found(files)]
    if not found:
        raise ConfigurationError(
            "this isn't the record of a run",
            found=str(path),
            where="; ".join(("looked for", *(one.LOOKED_FOR for one in _READERS))),
            remedy=_inner(place) or "give one of these",
        )
    if len(found) > 1:
        names = ", ".join(one.__name__.rpartition(".")[2] for one in found)
        raise ConfigurationError(
            "records of several hosts lie here", found=names, where=str(path), remedy="give the folder of one run"
        )
    run: RunRecord = found[0].read(files, given)
    source = given.pop("source", run.source)
    notes = run.notes + (
        (f"A trace that this project ships ({place.name}); it says nothing about a cluster.",) if shipped else ()
    )
    return replace(run, source=source, settings={**run.settings, **given}, notes=notes)


def _inner(place: Path) -> str | None:
    """A remedy that names the local runs one folder down; None without any."""
    runs = sorted(one.parent.name for one in place.glob("*/metrics.jsonl"))
    return f"give one of the folders in it: {', '.join(runs[:8])}" if runs else None


def _settings(overrides: Iterable[str]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for one in overrides:
        given |= override({}, one, "the command line")
    for key, value in given.items():
        kinds = SETTINGS.get(key)
        if kinds is None:
            raise ConfigurationError(
                "no such setting of a run", found=key, where="the command line", remedy=nearest(key, SETTINGS)
            )
        fits = isinstance(value, kinds) and not isinstance(value, bool)
        if not fits or (key == "source" and value not in SOURCES) or (not isinstance(value, str) and not value >= 0):
            raise ConfigurationError(
                f"{key} can't be this",
                found=value,
                where="the command line",
                remedy=f"one of {', '.join(SOURCES)}" if key == "source" else f"{key}={'NAME' if str in kinds else 4}",
            )
    return given
