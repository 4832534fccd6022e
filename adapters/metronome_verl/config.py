"""verl's configuration and ours: what the user chose, what a mode needs besides, and what workers are told.

The user adds ``+metronome.<key>=...`` to verl's command line. ``arrange`` reads it in the trainer's process, sets
what the chosen mode needs and says so, or refuses with the line to add. Workers see only the part of verl's
configuration that is theirs, so the block travels in ``actor_rollout_ref.rollout.custom.metronome``, verl's own
extension point.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from metronome.contracts import AttentionBackend, PolicyLoss, RunFacts
from metronome.device import Device, resolve_device
from metronome.errors import ConfigurationError
from metronome.plugins import Selection, offered_names, plugin_manager, resolve
from metronome.sagc.options import SagcOptions
from metronome.settings import Settings, parse_settings
from metronome_verl.ascend import check_ascend
from metronome_verl.cpu import ROLLOUT as CPU_ROLLOUT
from metronome_verl.needs import (
    dynamic_batches,
    fixed_prompts_only,
    group_size,
    in_flight_of,
    merged_adapter,
    no_threshold,
    one_step,
    own_loss,
    rollout_pool,
    sharing,
    with_clip,
)
from metronome_verl.routing import check_routing

MODES = {"synchronous": "sync", "periodic": "separate_async", "bounded": "separate_async"}
"""Our rollout sources, and the trainer of verl that each extends."""

_WHERE = "metronome"


@dataclass(frozen=True)
class WorkerPart:
    """What a worker process needs to know.

    Attributes:
        mode: ``synchronous``, ``periodic`` or ``bounded``.
        loss: the policy loss; None leaves verl's own ``ppo_loss``, because ``metronome.loss`` wasn't set.
        attention: a backend that shares prompts; None leaves verl's engine as it is.
    """

    mode: str
    loss: PolicyLoss | None
    attention: AttentionBackend | None


@dataclass(frozen=True)
class Arranged:
    """The trainer's side: settings, the four objects, what was set besides (lines to print), and ``in_flight``."""

    settings: Settings
    selection: Selection
    block: Mapping[str, Any]
    mode: str
    notes: tuple[str, ...]
    in_flight: str


def block_of(config: DictConfig) -> dict[str, Any]:
    """The ``metronome`` block as a plain mapping; empty where there is none."""
    found = OmegaConf.select(config, "metronome")
    if found is None:
        return {}
    block = OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found
    if not isinstance(block, dict):
        raise ConfigurationError(
            "the metronome block must be a mapping", found=block, where=_WHERE, remedy="+metronome.loss=a3po"
        )
    return {str(key): value for key, value in block.items()}


def arrange(config: DictConfig) -> Arranged:
    """Reads the block, resolves its plug-ins, and sets in ``config`` what the mode needs.

    Raises ConfigurationError for what can't be true together, with the line that mends it.
    """
    notes: list[str] = []
    block = with_clip(config, block_of(config), notes)
    asked = block.pop("in_flight", None)
    manager = plugin_manager()
    settings = parse_settings(block, offered_names(manager), where=_WHERE)
    device = device_of(config)
    selection = resolve(settings, device, int(config.data.get("seed") or 0), manager)
    mode = settings.rollout_source
    if int(config.data.train_batch_size) < 1:
        raise ConfigurationError(
            "a batch has at least one prompt",
            found=config.data.train_batch_size,
            where="data.train_batch_size",
            remedy="data.train_batch_size=1 or more",
        )
    if mode not in MODES:
        raise ConfigurationError(
            "this rollout source has no trainer in verl",
            found=mode,
            where=f"{_WHERE}.rollout_source",
            remedy=", ".join(MODES),
        )
    in_flight = in_flight_of(asked, mode)
    with open_dict(config):
        config.trainer.v1.trainer_mode = MODES[mode]
        if mode != "synchronous":
            rollout_pool(config, notes)
        merged_adapter(config, mode, notes)
        if mode == "periodic":
            one_step(config, notes, ours="loss" in block)
            selection.rollout_source.check(facts_of(config))
            engine = OmegaConf.select(config, "actor_rollout_ref.rollout.name")
            if engine not in (None, CPU_ROLLOUT):
                notes.append(
                    f"rollouts of {engine} don't follow seeds by prompt: the gradient is that of one batch of these"
                    " rollouts, another run samples others"
                )
        if "loss" in block:
            own_loss(config, settings, selection, notes)
        if settings.group_controller != "fixed" or "group_controller" in block:
            if mode == "bounded" and settings.group_controller == "sagc":
                budget = settings.options_of("sagc").get("budget", SagcOptions().budget)
                if budget != "fixed_prompts":
                    raise fixed_prompts_only(f"metronome.sagc.budget={budget}")
            dynamic_batches(config, notes, "G may change")
            group_size(config, selection, notes)
        if selection.attention.shares_prompt:
            sharing(config, notes)
        if mode == "bounded":
            no_threshold(config, notes)
        check_routing(config, mode, selection.attention.shares_prompt, notes)
        check_ascend(config, mode, device.kind, notes)
        part = {"mode": mode, "block": block, "device": device.kind}
        OmegaConf.update(config, "actor_rollout_ref.rollout.custom.metronome", part, force_add=True)
    return Arranged(settings, selection, block, mode, tuple(notes), in_flight)


def worker_part(config: DictConfig) -> WorkerPart:
    """What the trainer left for this worker in ``actor_rollout_ref`` (``config``).

    Raises ConfigurationError where nothing was left: the worker belongs to a trainer that isn't ours.
    """
    found = OmegaConf.select(config, "rollout.custom.metronome")
    if found is None:
        raise ConfigurationError(
            "a metronome worker got no settings from its trainer",
            where="actor_rollout_ref.rollout.custom.metronome",
            remedy="trainer.v1.trainer_mode=metronome",
        )
    part: Any = OmegaConf.to_container(found, resolve=True)
    block = part["block"]
    manager = plugin_manager()
    settings = parse_settings(block, offered_names(manager), where=_WHERE)
    selection = resolve(settings, _device(part["device"], "the worker's device"), 0, manager)
    return WorkerPart(
        mode=part["mode"],
        loss=selection.loss if "loss" in block else None,
        attention=selection.attention if selection.attention.shares_prompt else None,
    )


def device_of(config: DictConfig) -> Device:
    """The device that verl trains on, by verl's own name.

    Raises ConfigurationError for one that neither verl's platform layer nor torch sees here.
    """
    return _device(str(config.trainer.device), "trainer.device")


def _device(name: str, where: str) -> Device:
    """The device and its collective backend by verl's platform layer.

    The trainer's process may have no device of its own (Ray gives it a CPU), so that torch can't be asked first.
    """
    from verl.plugin.platform import get_platform

    platform = get_platform()
    chosen = os.environ.get("VERL_PLATFORM") or platform.is_platform_available(use_smi_check=True)
    if name == platform.device_name and chosen:
        return Device(name, platform.communication_backend_name())
    return resolve_device(name, where)


def facts_of(config: DictConfig) -> RunFacts:
    """What the run does, as far as periodic asynchrony's promise depends on it.

    The promise here is the gradient of the rollouts that were sampled. Whether another run would sample the same is
    the rollout engine's matter: ``arrange`` tells where it doesn't, and ``seeds_per_prompt`` isn't held against it.
    """
    actor = config.actor_rollout_ref.actor
    override = config.actor_rollout_ref.model.get("override_config") or {}
    rates = [
        float(value) for key, value in override.items() if "dropout" in str(key) and isinstance(value, int | float)
    ]
    return RunFacts(
        optimiser_steps=int(actor.ppo_epochs),
        normaliser=str(actor.loss_agg_mode),
        ratio_is_one=True,
        dropout=max(rates, default=0.0),
        router_losses=bool(override.get("output_router_logits", False)),
        seeds_per_prompt=True,
    )
