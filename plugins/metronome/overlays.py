"""Recipes for hosts with settings of their own, and how their layers become one set of keys.

In ``args`` and ``metronome`` a key may be dotted or nested; both name the same setting. Laid over each other come the
recipe, its overlays in their order, in a smoke run the machine that is there and the recipe's ``smoke``, and last what
the command line set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field

from metronome.errors import ConfigurationError, nearest
from metronome.recipes import parse_yaml
from metronome.settings import SELECTORS, Options, parse_options


class Overlay(Options):
    """A variant of a recipe.

    Attributes:
        args: keys of the host's.
        metronome: keys of the block; a null takes a key of the recipe's away.
        note: what whoever chooses it must know; printed.
    """

    args: dict[str, Any] = Field(default_factory=dict)
    metronome: dict[str, Any] = Field(default_factory=dict)
    note: str = ""


class Paper(Options):
    """The row of a paper that a recipe stands for, where it is stated, and what the paper doesn't say (ours)."""

    row: str
    source: str
    ours: list[str]


class Data(Options):
    """The training and evaluation sets by name, and the commands that write their files."""

    train: str
    evaluation: list[str]
    prepare: list[str]


class LayeredRecipe(Options):
    """A recipe with overlays; a host's own names its ``host`` and what else it has.

    Attributes:
        args: the host's own settings and their values.
        metronome: the block of selectors and options.
        overlays: variants by name.
        smoke: what a smoke run needs besides its machine.
        overlay: the overlays to apply, in their order.
        assets: a folder for smoke runs with the tiny model and its data; without it a smoke run makes its own.
    """

    host: str
    description: str = ""
    args: dict[str, Any]
    metronome: dict[str, Any]
    paper: Paper
    data: Data
    overlays: dict[str, Overlay] = Field(default_factory=dict)
    smoke: Overlay = Overlay()
    overlay: str | list[str] = Field(default_factory=list)
    assets: str | None = None

    def chosen(self) -> list[str]:
        """The names under ``overlay``."""
        return [self.overlay] if isinstance(self.overlay, str) else self.overlay

    def notes(self) -> list[str]:
        """What the chosen overlays say."""
        return [f"{name}: {self.overlays[name].note}" for name in self.chosen() if self.overlays[name].note]


RecipeT = TypeVar("RecipeT", bound=LayeredRecipe)

Settings = tuple[dict[str, Any], dict[str, Any]]
"""The host's keys and ours, each flat."""


@dataclass(frozen=True)
class Machine:
    """The machine of a smoke run.

    Attributes:
        keys: the host's keys that it needs, given the name of the rollout source.
        assets: the folder that ``{assets}`` stands for.
    """

    keys: Callable[[str], Mapping[str, Any]]
    assets: Path


def parse_layered(model: type[RecipeT], recipe: Mapping[str, Any], where: str, *, smoke: bool) -> RecipeT:
    """The recipe as read; raises ConfigurationError for a wrong key or type, an unknown overlay, assets of no use."""
    _check_keys(model, recipe, where)
    parsed = parse_options(model, recipe, where)
    for name in parsed.chosen():
        if name not in parsed.overlays:
            raise ConfigurationError(
                "no such overlay",
                found=name,
                where=f"{where}: overlay",
                remedy="metronome run RECIPE --smoke" if name == "smoke" else nearest(name, parsed.overlays),
            )
    if parsed.assets is not None and not smoke:
        raise ConfigurationError(
            "only a smoke run has assets", found=parsed.assets, where=f"{where}: assets", remedy="--smoke"
        )
    return parsed


def _check_keys(model: type[LayeredRecipe], recipe: Mapping[str, Any], where: str) -> None:
    """Raises ConfigurationError for a key of ``args`` or ``metronome`` that stands outside of it."""
    sections = {key.partition(".")[0] for key, _ in flat(recipe.get("args") or {})}
    for way, value in _leaves(recipe):
        field = model.model_fields.get(way[0])
        inner = getattr(field and field.annotation, "model_fields", {})
        known = field is not None and (len(way) == 1 or way[1] in inner or not inner)
        part = "args" if way[0] in sections else "metronome" if way[0] in SELECTORS else None
        if not known and part is not None:
            key = ".".join(way)
            raise ConfigurationError(f"this key lies in {part}", found=key, where=where, remedy=f"{part}.{key}={value}")


def layered(
    recipe: LayeredRecipe, typed: Settings, machine: Machine | None = None, name: Callable[[str], str] = str
) -> Settings:
    """The host's keys and ours: the recipe, its overlays, and ``typed``, what the command line set, over them.

    Args:
        recipe: as parsed.
        typed: ``typed_settings``.
        machine: makes it a smoke run. It comes after the overlays, since the machine that is there has the last word
            but for what was typed.
        name: what a key names, where the host has several spellings of one; the longest that is written stays.
    """
    args: dict[str, Any] = {}
    _lay(args, flat(recipe.args), name)
    block = dict(flat(recipe.metronome))
    for one in recipe.chosen():
        _lay(args, flat(recipe.overlays[one].args), name)
        block = _laid(block, recipe.overlays[one].metronome)
    if machine is not None:
        _lay(args, flat(machine.keys(str(block.get("rollout_source", "synchronous")))), name)
        _lay(args, flat(recipe.smoke.args), name)
        # It goes with every overlay, so it leaves the options of a plug-in that one of them took away.
        selected = {block.get(selector) for selector in SELECTORS}
        options = flat(recipe.smoke.metronome)
        block = _laid(
            block, {key: value for key, value in options if "." not in key or key.partition(".")[0] in selected}
        )
    _lay(args, flat(typed[0]), name)
    _lay(block, flat(typed[1]), str)
    folder = None if machine is None else str(machine.assets)
    return {key: _path(value, folder) for key, value in args.items()}, block


def typed_settings(recipe: Mapping[str, Any], where: str) -> Settings:
    """What of ``args`` and ``metronome`` doesn't stand so in the file ``where``: the command line set it."""
    path = Path(where)
    written = parse_yaml(path.read_text(encoding="utf-8"), where) if path.is_file() else recipe
    if not isinstance(written, Mapping):
        written = recipe
    args, block = (
        {
            ".".join(way): value
            for way, value in _leaves(recipe.get(part))
            if (way, value) not in _leaves(written.get(part))
        }
        for part in ("args", "metronome")
    )
    return args, block


def flat(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """``{"a": {"b": 1}, "c.d": 2}`` as ``a.b, 1`` and ``c.d, 2``; an empty mapping is a value."""
    for way, value in _leaves(values):
        yield ".".join(way), value


def _path(value: Any, assets: str | None) -> Any:
    """``{assets}`` and ``~/`` written out, since hosts expand neither; other values as they are."""
    if isinstance(value, list):
        return [_path(one, assets) for one in value]
    if not isinstance(value, str):
        return value
    if assets is not None:
        value = value.replace("{assets}", assets)
    return str(Path(value).expanduser()) if value.startswith("~/") else value


def _laid(block: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``block`` with ``over`` laid over it; a null takes its key and what lies below it away."""
    laid = dict(block)
    _lay(laid, flat(over), str)
    gone = [key for key, value in flat(over) if value is None]
    return {
        key: value for key, value in laid.items() if not any(key == one or key.startswith(f"{one}.") for one in gone)
    }


def _leaves(values: Any, way: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    if not isinstance(values, Mapping) or (way and not values):
        return [(way, values)] if way else []
    return [leaf for key, value in values.items() for leaf in _leaves(value, (*way, str(key)))]


def _lay(under: dict[str, Any], over: Iterable[tuple[str, Any]], name: Callable[[str], str]) -> None:
    for key, value in over:
        same = next((other for other in under if name(other) == name(key)), None)
        if same is None:
            under[key] = value
        else:
            under.pop(same)
            under[max(same, key, key=len)] = value
