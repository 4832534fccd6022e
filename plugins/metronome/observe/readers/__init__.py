"""A run's own records, whichever host wrote them, as one ``RunRecord``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from metronome.errors import ConfigurationError, nearest
from metronome.observe.readers import areal, csv, local, openrlhf, verl
from metronome.observe.readers.files import IN_TURNS
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
_COUNTS = ("workers", "slots", "trainer_ranks", "prompts", "group_size", "max_tokens")
"""Settings that are 1 or more."""
_HOOKS = {"loss": "policy_loss", "attention": "attention", "group_controller": "group_controller"}
"""Settings that are names of offers, and the hook at which they are offered."""

TRACES = Path(__file__).parent.parent / "traces"
"""Shipped real traces, one a format; their README.md says what made them."""

SOURCES = ("synchronous", "colocated", "periodic", "bounded")
_READERS = (local, csv, verl, openrlhf, areal)


def read_run(path: str | Path, overrides: Iterable[str] = ()) -> RunRecord:
    """The records of the run at ``path``: a folder or file of any host, or a CSV.

    Args:
        path: what the host wrote; the format is found by what is there. A shipped trace goes by its name
            (``TRACES``) where nothing is called so here.
        overrides: ``key=value``, what the records lack (``SETTINGS``). ``source`` stands over a schedule that a reader
            only concluded from the records.

    Raises ConfigurationError if nothing known is there (it lists what was looked for), for a broken file, and for an
    override that doesn't exist, doesn't fit or contradicts what was recorded.
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
            f"this isn't the record of a run, as none of these is there ({'; '.join(_looked_for())})",
            found=str(path),
            remedy=_inner(place) or "give a folder that has one of them",
        )
    if len(found) > 1:
        names = ", ".join(one.__name__.rpartition(".")[2] for one in found)
        raise ConfigurationError(
            "records of several hosts lie here", found=names, where=str(path), remedy="give the folder of one run"
        )
    run: RunRecord = found[0].read(files, given)
    if "tokenizer" in given and not (found[0] is verl and run.rollouts):
        raise ConfigurationError(
            "only a dump of verl's is counted with a tokenizer",
            found=f"tokenizer={given['tokenizer']}",
            where=f"the command line, for {path}",
            remedy="leave tokenizer out",
        )
    _agree(run, given, str(path))
    source = given.pop("source", run.source)
    notes = run.notes + (
        (f"A trace that this project ships ({place.name}); it says nothing about a cluster.",) if shipped else ()
    )
    return replace(run, source=source, settings={**run.settings, **given}, notes=notes)


def _looked_for() -> list[str]:
    return [one.LOOKED_FOR for one in _READERS]


def _inner(place: Path) -> str | None:
    """A remedy that names the local runs one folder down; None without any."""
    runs = sorted(one.parent.name for one in place.glob("*/metrics.jsonl"))
    return f"give one of the folders in it: {', '.join(runs[:8])}" if runs else None


def _agree(run: RunRecord, given: Mapping[str, Any], path: str) -> None:
    """Raises ConfigurationError for a value that contradicts the record, in which it would be ignored or untrue."""
    recorded: dict[str, set[object]] = {
        "group_size": {one.group_size for one in run.steps},
        "prompts": {one.prompts for one in run.steps},
    }
    recorded |= {key: {value} for key, value in run.settings.items() if key in SETTINGS}
    if run.host == "local":  # its recipe says it; other readers conclude it from what was logged
        recorded["source"] = {run.source}
    for key, value in given.items():
        found = recorded.get(key, set()) - {None}
        if found - {value}:
            in_turns = key == "staleness" and run.source in IN_TURNS and run.host != "local"
            concluded = ", or give source=bounded if the run was" if in_turns else ""
            raise ConfigurationError(
                f"{key} contradicts the record, which has {', '.join(sorted(map(str, found)))}",
                found=value,
                where=f"the command line, for {path}",
                remedy=f"leave {key} out{concluded} (metronome simulate compares settings that weren't run)",
            )


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
        _check(key, value, kinds)
    return given


def _check(key: str, value: Any, kinds: tuple[type, ...]) -> None:
    """Raises ConfigurationError unless ``value`` can be that of the setting ``key``."""

    def refused(what: str, remedy: str) -> ConfigurationError:
        return ConfigurationError(what, found=value, where="the command line", remedy=remedy)

    if str in kinds:
        names = _names(key)
        if not isinstance(value, str) or (names is not None and value not in names):
            raise refused(f"{key} can't be this", f"{key}=NAME" if names is None else f"one of {', '.join(names)}")
        if key == "tokenizer" and not Path(value, "tokenizer.json").is_file():
            raise refused("no tokenizer there", "give tokenizer=FOLDER, which holds the model's tokenizer.json")
        return
    least = 1 if key in _COUNTS else 0
    number = isinstance(value, kinds) and not isinstance(value, bool) and isinstance(value, int | float)
    if not number or not value >= least:
        raise refused(f"{key} can't be this", f"{key}=4 ({least} or more)")


def _names(key: str) -> tuple[str, ...] | None:
    """What the text of a setting may be; None where it isn't a name of ours."""
    if key == "source":
        return SOURCES
    if key not in _HOOKS:
        return None
    from metronome.plugins import offers, plugin_manager

    return tuple(one.offer.name for one in offers(plugin_manager()) if one.offer.hook == _HOOKS[key])
