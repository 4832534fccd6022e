"""verl's configuration and ours: what the user chose, what a mode needs besides, and what workers are told.

The user adds ``+metronome.<key>=...`` to verl's command line. ``arrange`` reads it in the trainer's process, sets
what the chosen mode needs and says so, or refuses with the line to add. Workers see only the part of verl's
configuration that is theirs, so the block travels in ``actor_rollout_ref.rollout.custom.metronome``, verl's own
extension point.
"""

from __future__ import annotations

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
from metronome_verl.cpu import ROLLOUT as CPU_ROLLOUT

MODES = {"synchronous": "sync", "periodic": "separate_async", "bounded": "separate_async"}
"""Our rollout sources, and the trainer of verl that each extends."""

_WHERE = "metronome"
_GROUP_ESTIMATORS = ("grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo")
"""verl's advantage estimators that look at one group at a time (trainer/ppo/core_algos.py of 0.9.1)."""


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
    """The trainer's side: settings, the four objects, and what was set besides (lines to print)."""

    settings: Settings
    selection: Selection
    block: Mapping[str, Any]
    mode: str
    notes: tuple[str, ...]


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
    block = block_of(config)
    manager = plugin_manager()
    settings = parse_settings(block, offered_names(manager), where=_WHERE)
    device = device_of(config)
    selection = resolve(settings, device, int(config.data.get("seed") or 0), manager)
    mode = settings.rollout_source
    if mode not in MODES:
        raise ConfigurationError(
            "this rollout source has no trainer in verl",
            found=mode,
            where=f"{_WHERE}.rollout_source",
            remedy=", ".join(MODES),
        )
    notes: list[str] = []
    with open_dict(config):
        config.trainer.v1.trainer_mode = MODES[mode]
        if mode != "synchronous":
            _rollout_pool(config, notes)
        if mode == "periodic":
            _one_step(config, notes)
            selection.rollout_source.check(facts_of(config))
            engine = OmegaConf.select(config, "actor_rollout_ref.rollout.name")
            if engine not in (None, CPU_ROLLOUT):
                notes.append(
                    f"rollouts of {engine} don't follow seeds by prompt: the gradient is that of one batch of these"
                    " rollouts, another run samples others"
                )
        if "loss" in block:
            _loss(config, settings, selection, notes)
        if settings.group_controller != "fixed" or "group_controller" in block:
            if mode == "bounded" and settings.group_controller == "sagc":
                budget = settings.options_of("sagc").get("budget", SagcOptions().budget)
                if budget != "fixed_prompts":
                    raise fixed_prompts_only(f"metronome.sagc.budget={budget}")
            _dynamic_batches(config, notes, "G may change")
            _group_size(config, selection, notes)
        part = {"mode": mode, "block": block, "device": device.kind}
        OmegaConf.update(config, "actor_rollout_ref.rollout.custom.metronome", part, force_add=True)
    return Arranged(settings, selection, block, mode, tuple(notes))


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
    selection = resolve(settings, resolve_device(part["device"]), 0, manager)
    return WorkerPart(
        mode=part["mode"],
        loss=selection.loss if "loss" in block else None,
        attention=selection.attention if selection.attention.shares_prompt else None,
    )


def device_of(config: DictConfig) -> Device:
    """The device that verl trains on, by verl's own name."""
    return resolve_device(str(config.trainer.device), "trainer.device")


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


def _set(config: DictConfig, key: str, value: Any, notes: list[str], why: str) -> None:
    if OmegaConf.select(config, key) != value:
        OmegaConf.update(config, key, value, force_add=True)
        notes.append(f"{key}={value}  ({why})")


def _rollout_pool(config: DictConfig, notes: list[str]) -> None:
    """A pool of its own: colocated engines share the device with training and sleep while it trains."""
    rollout = config.actor_rollout_ref.rollout
    _set(config, "actor_rollout_ref.hybrid_engine", False, notes, "generation needs devices of its own to overlap")
    for key in ("nnodes", "n_gpus_per_node"):
        if not rollout.get(key):
            raise ConfigurationError(
                "this mode generates on a rollout pool of its own, and none is given",
                found=rollout.get(key),
                where=f"actor_rollout_ref.rollout.{key}",
                remedy="actor_rollout_ref.rollout.nnodes=1 actor_rollout_ref.rollout.n_gpus_per_node=<devices>",
            )
    if rollout.checkpoint_engine.backend == "naive":
        raise ConfigurationError(
            "weights must travel to the rollout pool, and the transport 'naive' stays within a process",
            found="naive",
            where="actor_rollout_ref.rollout.checkpoint_engine.backend",
            remedy="actor_rollout_ref.rollout.checkpoint_engine.backend=nccl (it means HCCL on an NPU)",
        )


def _one_step(config: DictConfig, notes: list[str]) -> None:
    """One optimiser step a period: one mini-batch, one epoch, no warm-up batch."""
    batch = int(config.data.train_batch_size)
    actor = config.actor_rollout_ref.actor
    if int(actor.ppo_epochs) != 1:
        raise ConfigurationError(
            "a period has one optimiser step, so every sample is visited once",
            found=int(actor.ppo_epochs),
            where="actor_rollout_ref.actor.ppo_epochs",
            remedy="actor_rollout_ref.actor.ppo_epochs=1",
        )
    if int(config.trainer.critic_warmup):
        raise ConfigurationError(
            "a period whose actor isn't updated has no gradient to step with",
            found=int(config.trainer.critic_warmup),
            where="trainer.critic_warmup",
            remedy="trainer.critic_warmup=0",
        )
    _within_groups(config)
    if actor.loss_agg_mode == "seq-mean-token-sum-norm" and actor.loss_scale_factor is None:
        longest = int(config.data.max_response_length)
        _set(config, "actor_rollout_ref.actor.loss_scale_factor", longest, notes, "a constant, whatever the split")
    _set(config, "trainer.v1.separate_async.num_warmup_batches", 0, notes, "every sample is of the trained version")
    _set(config, "trainer.v1.separate_async.parameter_sync_step", batch, notes, "groups are consumed one by one")
    _set(config, "actor_rollout_ref.actor.ppo_mini_batch_size", 1, notes, "one chunk a group, one step a period")
    _dynamic_batches(config, notes, "chunks are as large as the groups that have arrived")


def _within_groups(config: DictConfig) -> None:
    """Everything before the loss looks at one group at a time, since groups of a batch come one after another."""
    algorithm = config.algorithm
    if str(algorithm.adv_estimator) not in _GROUP_ESTIMATORS:
        raise ConfigurationError(
            "this advantage estimator looks at the whole batch (whitening, counts, a critic, a baseline rollout), or"
            " isn't known to look at one group only; a period trains groups as they finish",
            found=str(algorithm.adv_estimator),
            where="algorithm.adv_estimator",
            remedy=f"algorithm.adv_estimator={' | '.join(_GROUP_ESTIMATORS)}, or metronome.rollout_source=synchronous",
        )
    if algorithm.use_kl_in_reward and str(algorithm.kl_ctrl.type) != "fixed":
        raise ConfigurationError(
            "an adaptive KL coefficient would move from part to part of a batch",
            found=str(algorithm.kl_ctrl.type),
            where="algorithm.kl_ctrl.type",
            remedy="algorithm.kl_ctrl.type=fixed",
        )
    correction = algorithm.get("rollout_correction") or {}
    if correction.get("rollout_is_batch_normalize"):
        raise ConfigurationError(
            "importance weights normalised over a part aren't those of the batch",
            found=True,
            where="algorithm.rollout_correction.rollout_is_batch_normalize",
            remedy="algorithm.rollout_correction.rollout_is_batch_normalize=False",
        )


def fixed_prompts_only(found: str) -> ConfigurationError:
    """The error of bounded mode for a controller whose number of prompts follows G."""
    return ConfigurationError(
        "in bounded mode batches are in flight, all with data.train_batch_size prompts: their number can't follow G",
        found=found,
        where=f"{_WHERE}.group_controller",
        remedy="metronome.sagc.budget=fixed_prompts, or metronome.rollout_source=periodic",
    )


def _dynamic_batches(config: DictConfig, notes: list[str], why: str) -> None:
    _set(config, "actor_rollout_ref.actor.use_dynamic_bsz", True, notes, why)
    _set(config, "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz", True, notes, why)
    _set(config, "actor_rollout_ref.ref.log_prob_use_dynamic_bsz", True, notes, why)


def _loss(config: DictConfig, settings: Settings, selection: Selection, notes: list[str]) -> None:
    correction = config.algorithm.get("rollout_correction") or {}
    asked = [key for key in ("rollout_is", "rollout_rs") if correction.get(key)]
    if asked:
        raise ConfigurationError(
            f"verl's rollout correction and metronome.loss={settings.loss} both weigh samples by the same ratio",
            found=asked[0],
            where=f"algorithm.rollout_correction.{asked[0]}",
            remedy=f"algorithm.rollout_correction.{asked[0]}=null, or leave metronome.loss out",
        )
    recomputed = selection.loss.needs_proximal_forward
    why = "the proximal policy is recomputed" if recomputed else "no extra forward pass for old log-probs"
    _set(config, "algorithm.rollout_correction.bypass_mode", not recomputed, notes, why)
    _set(config, "actor_rollout_ref.rollout.calculate_log_probs", True, notes, "the behaviour policy's log-probs")


def _group_size(config: DictConfig, selection: Selection, notes: list[str]) -> None:
    size = selection.group_controller.size()
    _set(config, "data.gen_batch_size", 1, notes, "the number of prompts may change")
    _set(config, "actor_rollout_ref.rollout.n", size, notes, f"G of {selection.group_controller.name}")
