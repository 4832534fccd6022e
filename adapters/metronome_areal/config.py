"""The ``metronome:`` block in AReaL's configuration, and what every process is told of it.

AReaL refuses keys that its configuration class doesn't have, so the block is a field of a subclass. What ``arrange``
leaves in ``config.actor`` travels with it into the training engines; ``part_of`` reads it there.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, make_dataclass, replace
from functools import lru_cache
from typing import Any

from areal.api.cli_args import GRPOConfig as HostGRPOConfig
from areal.api.cli_args import PPOActorConfig
from areal.api.cli_args import PPOConfig as HostPPOConfig

from metronome.device import device_called
from metronome.errors import ConfigurationError, nearest
from metronome.plugins import Selection, offered_names, plugin_manager, resolve
from metronome.settings import Settings, parse_settings
from metronome_areal.arguments import WHERE
from metronome_areal.clip import with_clip
from metronome_areal.queueing import with_bound

MODES = ("synchronous", "periodic", "bounded")
IN_FLIGHT = ("finish", "abort", "resume")


@dataclass
class PPOConfig(HostPPOConfig):
    """AReaL's PPOConfig with the ``metronome:`` block."""

    metronome: dict[str, Any] = field(default_factory=dict)


@dataclass
class GRPOConfig(HostGRPOConfig):
    """AReaL's GRPOConfig with the ``metronome:`` block."""

    metronome: dict[str, Any] = field(default_factory=dict)


@dataclass
class ActorConfig(PPOActorConfig):
    """AReaL's PPOActorConfig with what our engine must know; made by ``told``."""

    metronome: dict[str, Any] = field(default_factory=dict)


@lru_cache
def with_block(kind: type[Any]) -> type[Any]:
    """``kind``, or a subclass of it with a ``metronome`` field, for a user's own configuration class."""
    if "metronome" in getattr(kind, "__dataclass_fields__", {}):
        return kind
    block: Any = ("metronome", dict[str, Any], field(default_factory=dict))
    return make_dataclass(kind.__name__, [block], bases=(kind,), namespace={"__module__": kind.__module__})


@dataclass(frozen=True)
class Part:
    """What a process of a run knows of us.

    Attributes:
        mode: ``synchronous``, ``periodic`` or ``bounded``.
        settings: the parsed block.
        selection: the four objects.
        block: the block as written, without ``in_flight`` and ``cpu``.
        in_flight: what a publication does to running requests.
        device: ``cpu``, ``cuda`` or ``npu``.
        room: whether this is the CPU room, which generates in the trainer's process.
    """

    mode: str
    settings: Settings
    selection: Selection
    block: Mapping[str, Any]
    in_flight: str
    device: str
    room: bool = False

    @property
    def own_loss(self) -> bool:
        """Whether the policy loss is ours: ``metronome.loss`` was given."""
        return "loss" in self.block

    @property
    def owns_groups(self) -> bool:
        """Whether G is ours to choose."""
        return "group_controller" in self.block

    @property
    def owns_rollouts(self) -> bool:
        """Whether prompts are dispatched and groups collected by us instead of AReaL's ``prepare_batch``."""
        return "rollout_source" in self.block or self.owns_groups

    @property
    def shares_prompt(self) -> bool:
        """Whether a group's prompt stands once."""
        return bool(self.selection.attention.shares_prompt)


def read(config: Any) -> Part:
    """The part of a run, from its configuration's ``metronome`` block.

    Raises ConfigurationError for unknown keys, values and modes.
    """
    block = dict(getattr(config, "metronome", None) or {})
    cpu = block.pop("cpu", False)
    if not isinstance(cpu, bool):
        raise ConfigurationError("must be true or false", found=cpu, where=f"{WHERE}.cpu", remedy=f"{WHERE}.cpu=true")
    in_flight = block.pop("in_flight", None)
    device = "cpu" if cpu else _device()
    mode = str(block.get("rollout_source", "synchronous"))
    block = with_bound(config, with_clip(config.actor, block))
    part = replace(_resolved(block, _in_flight(in_flight, mode), device, int(config.seed)), room=cpu)
    if part.mode not in MODES:
        raise ConfigurationError(
            "this rollout source has no trainer in AReaL",
            found=part.mode,
            where=f"{WHERE}.rollout_source",
            remedy=nearest(part.mode, MODES),
        )
    return part


def told(actor: PPOActorConfig, part: Part, seed: int) -> ActorConfig:
    """``actor`` with what ``part_of`` reads in the engine's process."""
    found = copy(actor)
    found.__class__ = ActorConfig
    assert isinstance(found, ActorConfig)
    found.metronome = {
        "block": dict(part.block),
        "in_flight": part.in_flight,
        "device": part.device,
        "seed": seed,
    }
    return found


def part_of(actor: Any) -> Part:
    """The part of this process, from an engine's configuration.

    Raises ConfigurationError where the trainer left none.
    """
    left = getattr(actor, "metronome", None)
    if not left:
        raise ConfigurationError(
            "a metronome engine got no settings",
            where="config.actor",
            remedy="use metronome_areal.PPOTrainer",
        )
    return _resolved(dict(left["block"]), left["in_flight"], left["device"], int(left["seed"]))


def _resolved(block: dict[str, Any], in_flight: str, device: str, seed: int) -> Part:
    manager = plugin_manager()
    settings = parse_settings(block, offered_names(manager), where=WHERE)
    selection = resolve(settings, device_called(device), seed, manager)
    return Part(settings.rollout_source, settings, selection, block, in_flight, device)


def _in_flight(found: Any, mode: str) -> str:
    allowed = IN_FLIGHT if mode == "bounded" else ("finish",)
    if found is None:
        return "resume" if mode == "bounded" else "finish"  # AReaL's own: interrupted and continued
    if found not in allowed:
        raise ConfigurationError(
            f"nothing runs at a publication in mode {mode}" if mode != "bounded" else "unknown value",
            found=found,
            where=f"{WHERE}.in_flight",
            remedy=nearest(str(found), allowed)
            if mode == "bounded" or found not in IN_FLIGHT
            else f"{WHERE}.rollout_source=bounded, or leave {WHERE}.in_flight out",
        )
    return str(found)


def _device() -> str:
    from areal.infra.platforms import current_platform

    return str(current_platform.device_type)
