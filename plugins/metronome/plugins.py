"""Discovery of plug-ins through the entry-point group ``metronome``; resolution of a selection at start."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import pluggy

from metronome import hookspecs
from metronome.contracts import (
    AttentionBackend,
    GroupController,
    HookName,
    Offer,
    PolicyLoss,
    RolloutSource,
)
from metronome.device import Device
from metronome.errors import MetronomeError, PluginError, nearest
from metronome.settings import SELECTORS, Settings

GROUP = "metronome"
_DISTRIBUTIONS: dict[tuple[int, str], str] = {}
_CONTRACTS: dict[str, type] = {
    "rollout_source": RolloutSource,
    "policy_loss": PolicyLoss,
    "attention": AttentionBackend,
    "group_controller": GroupController,
}


@dataclass(frozen=True)
class Offered:
    """An offer and who makes it: the plug-in's name and its distribution."""

    offer: Offer
    plugin: str
    distribution: str


@dataclass(frozen=True)
class Selection:
    """The four plain objects of a run; adapters call them directly, pluggy is out of the way from here on."""

    rollout_source: RolloutSource
    loss: PolicyLoss
    attention: AttentionBackend
    group_controller: GroupController


def plugin_manager(environment: Mapping[str, str] | None = None) -> pluggy.PluginManager:
    """A manager with every plug-in of the entry-point group loaded and checked.

    ``METRONOME_DISABLE_PLUGINS=a,b`` leaves plug-ins out, ``METRONOME_LOAD_PLUGINS=a,b`` loads only these,
    ``METRONOME_TRACE_PLUGINS=1`` prints every hook call. Raises PluginError for a plug-in that can't be
    imported or that implements an unknown hook.
    """
    environment = os.environ if environment is None else environment
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(hookspecs)
    points = _points()
    blocked = _names(environment.get("METRONOME_DISABLE_PLUGINS"))
    only = _names(environment.get("METRONOME_LOAD_PLUGINS"))
    for variable, names in (("METRONOME_DISABLE_PLUGINS", blocked), ("METRONOME_LOAD_PLUGINS", only)):
        for name in sorted(names - set(points)):
            raise PluginError("no such plug-in", found=name, where=variable, remedy=nearest(name, points))
    for name, point in sorted(points.items()):
        if name in blocked or (only and name not in only):
            continue
        register(manager, name, _load(point), _distribution(point))
    if environment.get("METRONOME_TRACE_PLUGINS"):
        manager.add_hookcall_monitoring(_print_call, _print_result)
    return manager


def register(manager: pluggy.PluginManager, name: str, plugin: object, distribution: str = "unknown") -> None:
    """Adds one plug-in under ``name``; raises PluginError if it implements a hook that doesn't exist."""
    try:
        manager.register(plugin, name=name)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise PluginError(
            f"plug-in {name!r} doesn't fit the hooks: {error}",
            where=distribution,
            remedy="implement the hooks of metronome.hookspecs with their argument names",
        ) from None
    _DISTRIBUTIONS[(id(manager), name)] = distribution


def offers(manager: pluggy.PluginManager) -> list[Offered]:
    """What every loaded plug-in's ``describe`` offers, in the order of hooks and names."""
    found = []
    for implementation in manager.hook.describe.get_hookimpls():
        name = implementation.plugin_name
        distribution = _DISTRIBUTIONS.get((id(manager), name), "unknown")
        offered = _guarded(name, distribution, "describe", implementation.function)
        if not _is_offers(offered):
            raise PluginError(
                f"describe of plug-in {name!r} must return a list of metronome.contracts.Offer",
                found=offered,
                where=distribution,
                remedy=f"return [Offer(hook, name, summary)] with a hook of {', '.join(SELECTORS.values())}",
            )
        found += [Offered(offer, name, distribution) for offer in offered or ()]
    hooks = list(SELECTORS.values())
    return sorted(found, key=lambda one: (hooks.index(one.offer.hook), one.offer.name))


def offered_names(manager: pluggy.PluginManager) -> set[str]:
    """Every name offered at any hook."""
    return {one.offer.name for one in offers(manager)}


def resolve(settings: Settings, device: Device, seed: int, manager: pluggy.PluginManager) -> Selection:
    """The four objects that ``settings`` select.

    Raises PluginError for a name that nobody offers, that two plug-ins offer, or whose plug-in raises or
    breaks its contract; ConfigurationError for bad options.
    """
    extra: dict[str, dict[str, Any]] = {"attention": {"device": device}, "group_controller": {"seed": seed}}
    every = offers(manager)
    objects = {}
    for selector, hook in SELECTORS.items():
        name = getattr(settings, selector)
        objects[selector] = _one(manager, every, selector, hook, name, settings.options_of(name), extra.get(hook, {}))
    return Selection(**objects)


def _one(
    manager: pluggy.PluginManager,
    every: list[Offered],
    selector: str,
    hook: HookName | str,
    name: str,
    options: Mapping[str, Any],
    extra: Mapping[str, Any],
) -> Any:
    owners = [one for one in every if one.offer.hook == hook and one.offer.name == name]
    if not owners:
        known = [one.offer.name for one in every if one.offer.hook == hook]
        raise PluginError(
            f"no plug-in offers this {selector}",
            found=name,
            where=f"metronome.{selector}",
            remedy=nearest(name, known),
        )
    if len(owners) > 1:
        who = " and ".join(f"{one.plugin!r} ({one.distribution})" for one in owners)
        raise PluginError(
            f"two plug-ins offer this {selector}: {who}",
            found=name,
            where=f"metronome.{selector}",
            remedy=f"METRONOME_DISABLE_PLUGINS={owners[-1].plugin}",
        )
    owner = owners[0]
    others = [plugin for other, plugin in manager.list_name_plugin() if other != owner.plugin]
    call = manager.subset_hook_caller(hook, remove_plugins=others)  # a greedy plug-in displaces nobody
    built = _guarded(owner.plugin, owner.distribution, hook, lambda: call(name=name, settings=options, **extra))
    contract = _CONTRACTS[hook]
    if not isinstance(built, contract):
        raise PluginError(
            f"plug-in {owner.plugin!r} returned no {contract.__name__} for {name!r}",
            found=type(built).__name__,
            where=owner.distribution,
            remedy=f"return an object with the attributes of metronome.contracts.{contract.__name__}",
        )
    return built


def _guarded(name: str, distribution: str, hook: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except MetronomeError:
        raise
    except Exception as error:  # a stranger's code: whatever it raises becomes one clear error
        raise PluginError(
            f"plug-in {name!r} raised in {hook}: {type(error).__name__}: {error}",
            where=distribution,
            remedy=f"mend the plug-in, or METRONOME_DISABLE_PLUGINS={name}",
        ) from error


def _points() -> dict[str, EntryPoint]:
    points: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        if point.name in points:
            raise PluginError(
                "two distributions register a plug-in of one name: "
                f"{_distribution(points[point.name])} and {_distribution(point)}",
                found=point.name,
                where=f"the entry-point group {GROUP}",
                remedy="uninstall one of them",
            )
        points[point.name] = point
    return points


def _is_offers(offered: object) -> bool:
    return offered is None or (
        isinstance(offered, (list, tuple))
        and all(isinstance(offer, Offer) and offer.hook in SELECTORS.values() for offer in offered)
    )


def _load(point: EntryPoint) -> object:
    try:
        return point.load()
    except Exception as error:  # a stranger's code: whatever it raises becomes one clear error
        raise PluginError(
            f"plug-in {point.name!r} raised at import: {type(error).__name__}: {error}",
            found=point.value,
            where=_distribution(point),
            remedy=f"mend or uninstall it, or METRONOME_DISABLE_PLUGINS={point.name}",
        ) from error


def _distribution(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else "unknown distribution"


def _names(value: str | None) -> set[str]:
    return {name.strip() for name in (value or "").split(",") if name.strip()}


def _print_call(hook: str, _implementations: object, arguments: Mapping[str, Any]) -> None:
    print(
        f"metronome: {hook}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})",
        file=sys.stderr,
    )


def _print_result(outcome: Any, hook: str, _implementations: object, _arguments: object) -> None:
    result = outcome.get_result() if outcome.exception is None else repr(outcome.exception)
    print(f"metronome: {hook} -> {result}", file=sys.stderr)
