"""The schema of a recipe for verl, and how its overlays become one set of keys.

In ``args`` and ``metronome`` a key may be dotted or nested; both name the same setting. Laid over each other come the
recipe, its overlays in their order, and last what the command line set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from metronome.errors import ConfigurationError, nearest
from metronome.recipes import parse_yaml
from metronome.settings import SELECTORS, Options, parse_options
from metronome_verl.smoke import BY_SOURCE, CPU_ROOM


class Overlay(Options):
    """A variant of a recipe. A null in ``metronome`` takes a key of the recipe's block away."""

    args: dict[str, Any] = Field(default_factory=dict)
    metronome: dict[str, Any] = Field(default_factory=dict)


class Paper(Options):
    """The row of a paper that a recipe stands for, where it is stated, and what the paper doesn't say (ours)."""

    row: str
    source: str
    ours: list[str]


class Data(Options):
    """The training and evaluation sets by name, and the host's own commands that write their files."""

    train: str
    evaluation: list[str]
    prepare: list[str]


class Recipe(Options):
    """A recipe for verl.

    Attributes:
        args: verl's own configuration keys and their values; ``+`` before a key adds it, as on verl's command line.
        metronome: the block of selectors and options.
        overlays: variants by name.
        smoke: what a smoke run needs besides ``CPU_ROOM``.
        overlay: the overlays to apply, in their order.
        assets: a folder for smoke runs with ``model``, ``train.parquet``, ``validation.parquet`` and ``reward.py``
            (``compute_score``); without it a smoke run makes its own.
    """

    host: Literal["verl"]
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


def parse_recipe(recipe: Mapping[str, Any], where: str) -> Recipe:
    """The recipe as read; raises ConfigurationError for a wrong key, a wrong type or an unknown overlay."""
    parsed = parse_options(Recipe, recipe, where)
    for name in parsed.chosen():
        if name not in parsed.overlays:
            raise ConfigurationError(
                "no such overlay",
                found=name,
                where=f"{where}: overlay",
                remedy="metronome run RECIPE --smoke" if name == "smoke" else nearest(name, parsed.overlays),
            )
    return parsed


def settings_of(
    recipe: Recipe, typed: tuple[Mapping[str, Any], Mapping[str, Any]], assets: Path | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """verl's keys and ours, flat: the recipe, its overlays, and ``typed``, what the command line set, over them.

    ``assets`` makes it a smoke run: the CPU room and the recipe's ``smoke`` come after the overlays, since the machine
    that is there has the last word but for what was typed, and ``{assets}`` stands for this folder.
    """
    args, block = dict(flat(recipe.args)), dict(flat(recipe.metronome))
    for name in recipe.chosen():
        _lay(args, flat(recipe.overlays[name].args))
        block = _laid(block, recipe.overlays[name].metronome)
    if assets is not None:
        source = str(block.get("rollout_source", "synchronous"))
        _lay(args, flat(CPU_ROOM | BY_SOURCE.get(source, {})))
        _lay(args, flat(recipe.smoke.args))
        # It goes with every overlay, so it leaves the options of a plug-in that one of them took away.
        selected = {block.get(selector) for selector in SELECTORS}
        options = flat(recipe.smoke.metronome)
        block = _laid(block, {key: value for key, value in options if "." not in key or _head(key) in selected})
    _lay(args, flat(typed[0]))
    _lay(block, flat(typed[1]))
    folder = None if assets is None else str(assets)
    return {key: _path(value, folder) for key, value in args.items()}, block


def typed_settings(recipe: Mapping[str, Any], where: str) -> tuple[dict[str, Any], dict[str, Any]]:
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
    """``{assets}`` and ``~/`` written out, since verl expands neither; other values as they are."""
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
    _lay(laid, flat(over))
    gone = [key for key, value in flat(over) if value is None]
    return {
        key: value for key, value in laid.items() if not any(key == one or key.startswith(f"{one}.") for one in gone)
    }


def _head(key: str) -> str:
    return key.partition(".")[0]


def _leaves(values: Any, way: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    if not isinstance(values, Mapping) or (way and not values):
        return [(way, values)] if way else []
    return [leaf for key, value in values.items() for leaf in _leaves(value, (*way, str(key)))]


def _lay(under: dict[str, Any], over: Any) -> None:
    """Sets the keys of ``over``; ``+key`` and ``key`` are one key, spelt as in the recipe's first mention of ``+``."""
    for key, value in over:
        plain = key.lstrip("+")
        same = next((other for other in under if other.lstrip("+") == plain), None)
        if same is None:
            under[key] = value
        else:
            spelt = max(same, key, key=lambda one: one.startswith("+"))
            under.pop(same)
            under[spelt] = value
