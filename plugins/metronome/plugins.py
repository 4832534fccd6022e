"""Discovery of plug-ins through the entry-point group ``metronome``; resolution of a selection at start."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
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
from metronome.errors import PluginError, guarded, nearest
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
    ``METRONOME_TRACE_PLUGINS=1`` prints every call of the four choosing hooks. Raises PluginError for a
    plug-in that can't be imported or that implements an unknown hook.
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
    if environment.get("METRONOME_TRACE_PLUGINS") == "1":
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
    """What every loaded plug-in's ``describe`` offers, in the order of hooks and names.

    Names that collide are listed: ``collision`` tells them, ``resolve`` refuses them when they are selected.
    """
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
                remedy="return [Offer(hook, name, summary, options)]: name and summary strings, options a mapping with "
                f"strings as keys, hook one of {', '.join(SELECTORS.values())}",
            )
        found += [Offered(offer, name, distribution) for offer in offered or ()]
    hooks = list(SELECTORS.values())
    return sorted(found, key=lambda one: (hooks.index(one.offer.hook), one.offer.name))


def offered_names(manager: pluggy.PluginManager) -> set[str]:
    """Every name offered at any hook."""
    return {one.offer.name for one in offers(manager)}


def collision(name: str, every: Iterable[Offered], where: str | None = None) -> PluginError | None:
    """Why ``name`` can't be selected, or None: options stand under the name alone, so it must be one offer's.

    A name is taken if another offer has it, at whatever hook, or if it is a selector's key.
    """
    owners = [one for one in every if one.offer.name == name]
    if owners and name in SELECTORS:
        return PluginError(
            f"plug-in {owners[0].plugin!r} ({owners[0].distribution}) offers a name that is a selector's key",
            found=name,
            where=where,
            remedy=f"give it another name, or METRONOME_DISABLE_PLUGINS={owners[0].plugin}",
        )
    if len(owners) < 2:
        return None
    who = " and ".join(f"{one.plugin!r} ({one.distribution}) at {one.offer.hook}" for one in owners)
    other = next((one.plugin for one in reversed(owners) if one.plugin != owners[0].plugin), None)
    return PluginError(
        f"a name is offered twice, and options are written under it: {who}",
        found=name,
        where=where,
        remedy="give one of them another name" + (f", or METRONOME_DISABLE_PLUGINS={other}" if other else ""),
    )


def collisions(every: Iterable[Offered]) -> list[PluginError]:
    """``collision`` of each name that can't be selected, sorted by name."""
    every = list(every)
    found = (collision(name, every) for name in sorted({one.offer.name for one in every}))
    return [error for error in found if error is not None]


def resolve(settings: Settings, device: Device, seed: int, manager: pluggy.PluginManager) -> Selection:
    """The four objects that ``settings`` select.

    Raises PluginError for a name that nobody offers, that is taken twice (``collision``), or whose plug-in
    raises or breaks its contract; ConfigurationError for bad options.
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
    taken = collision(name, every, where=f"metronome.{selector}")
    if taken is not None:
        raise taken
    owner = owners[0]
    others = [plugin for other, plugin in manager.list_name_plugin() if other != owner.plugin]
    call = manager.subset_hook_caller(hook, remove_plugins=others)  # a greedy plug-in displaces nobody
    if options and not all("settings" in one.argnames for one in call.get_hookimpls()):
        raise PluginError(
            f"plug-in {owner.plugin!r} takes no settings in {hook}: its options would be dropped",
            found=dict(options),
            where=f"metronome.{name}",
            remedy=f"let its {hook} take the argument settings, or remove the options",
        )
    built = _guarded(owner.plugin, owner.distribution, hook, lambda: call(name=name, settings=options, **extra))
    contract = _CONTRACTS[hook]
    if isinstance(built, type) or not isinstance(built, contract):
        hint = f" (have you forgotten the () of {built.__name__}?)" if isinstance(built, type) else ""
        raise PluginError(
            f"plug-in {owner.plugin!r} returned no {contract.__name__} for {name!r}",
            found=type(built).__name__,
            where=owner.distribution,
            remedy=f"return an object with the attributes of metronome.contracts.{contract.__name__}{hint}",
        )
    return built


def _guarded(name: str, distribution: str, hook: str, call: Callable[[], Any]) -> Any:
    what, disable = f"plug-in {name!r} raised in {hook}", f"or METRONOME_DISABLE_PLUGINS={name}"

    def told() -> Any:
        try:
            return call()
        except ModuleNotFoundError as error:
            package = _not_installed(error)
            if package is None:
                raise
            message = f"{what}: {type(error).__name__}: {error}"
            raise PluginError(message, where=distribution, remedy=f"install {package}") from error

    return guarded(told, what, where=distribution, remedy=f"mend the plug-in, {disable}")


def _not_installed(error: BaseException) -> str | None:
    """The package whose lack is the error; None if it's another fault, as of a module that an installed one lacks."""
    package = (getattr(error, "name", None) or "").partition(".")[0]
    return package if isinstance(error, ModuleNotFoundError) and package and find_spec(package) is None else None


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
        isinstance(offered, (list, tuple)) and all(isinstance(offer, Offer) and _is_sound(offer) for offer in offered)
    )


def _is_sound(offer: Offer) -> bool:
    return (
        offer.hook in SELECTORS.values()
        and isinstance(offer.name, str)
        and offer.name != ""
        and isinstance(offer.summary, str)
        and isinstance(offer.options, Mapping)
        and all(isinstance(key, str) for key in offer.options)
    )


def _load(point: EntryPoint) -> object:
    try:
        return point.load()
    except (Exception, SystemExit) as error:  # a stranger's code: whatever it raises becomes one clear error
        package = _not_installed(error)
        remedy = "mend or uninstall it" if package is None else f"install {package}"
        raise PluginError(
            f"plug-in {point.name!r} raised at import: {type(error).__name__}: {error}",
            found=point.value,
            where=_distribution(point),
            remedy=f"{remedy}, or METRONOME_DISABLE_PLUGINS={point.name}",
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
