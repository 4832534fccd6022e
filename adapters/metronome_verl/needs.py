"""What a mode, a loss or a controller needs in verl's configuration: set and told in ``notes``, or refused by name.

Every function changes verl's configuration in place, adds a line for what it changed, and raises ConfigurationError
with the line that mends it for what can't be.
"""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from metronome.errors import ConfigurationError, nearest
from metronome.plugins import Selection
from metronome.settings import Settings
from metronome_verl.cpu import ROLLOUT as CPU_ROLLOUT
from metronome_verl.cpu import TRANSPORT as CPU_TRANSPORT
from metronome_verl.streaming import check_streaming

IN_FLIGHT = ("finish", "abort", "resume")
"""What may happen to running requests at a publication, see ``publication.py``."""

_WHERE = "metronome"
_GROUP_ESTIMATORS = ("grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo")
"""verl's advantage estimators that look at one group at a time (trainer/ppo/core_algos.py of 0.9.1)."""

_MOST_RANKS = {"grpo_passk": 1, "opo": 2}
"""Ranks up to which an estimator stands the rows that verl adds to a part, a group of their own: ``grpo_passk`` fails
at a group of one, ``opo`` divides by the length of all its rows, which is zero where there are two."""


def _set(config: DictConfig, key: str, value: Any, notes: list[str], why: str) -> None:
    if OmegaConf.select(config, key) != value:
        OmegaConf.update(config, key, value, force_add=True)
        notes.append(f"{key}={value}  ({why})")


def in_flight_of(asked: Any, mode: str) -> str:
    """``metronome.in_flight``: verl's own way in bounded mode, and where nothing runs at a publication ``finish``."""
    usual = "resume" if mode == "bounded" else "finish"
    if asked is None:
        return usual
    if asked not in IN_FLIGHT:
        raise ConfigurationError(
            "in_flight says what happens to running requests at a publication",
            found=asked,
            where=f"{_WHERE}.in_flight",
            remedy=nearest(str(asked), IN_FLIGHT),
        )
    if mode != "bounded" and asked != usual:
        raise ConfigurationError(
            f"in {mode} mode no request runs at a publication: all of a batch are finished before it",
            found=asked,
            where=f"{_WHERE}.in_flight",
            remedy="metronome.in_flight=finish, or metronome.rollout_source=bounded",
        )
    return str(asked)


def rollout_pool(config: DictConfig, notes: list[str]) -> None:
    """A pool of its own: colocated engines share the device with training and sleep while it trains."""
    rollout = config.actor_rollout_ref.rollout
    _set(config, "actor_rollout_ref.hybrid_engine", False, notes, "generation needs devices of its own to overlap")
    for key in ("nnodes", "n_gpus_per_node"):
        if not int(rollout.get(key) or 0):
            raise ConfigurationError(
                "this mode generates on a rollout pool of its own, and none is given",
                found=rollout.get(key),
                where=f"actor_rollout_ref.rollout.{key}",
                remedy="actor_rollout_ref.rollout.nnodes=1 actor_rollout_ref.rollout.n_gpus_per_node=<devices>"
                f" actor_rollout_ref.rollout.checkpoint_engine.backend={_transport(rollout)}",
            )
    custom = OmegaConf.select(config, "trainer.v1.sampler.custom_sampler.path")
    if custom:
        raise ConfigurationError(
            "this mode has a replay buffer of its own, in whose place another one would stand",
            found=custom,
            where="trainer.v1.sampler.custom_sampler.path",
            remedy="trainer.v1.sampler.custom_sampler.path=null, or metronome.rollout_source=synchronous",
        )
    if rollout.checkpoint_engine.backend == "naive":
        raise ConfigurationError(
            "weights must travel to the rollout pool, and the transport 'naive' stays within a process",
            found="naive",
            where="actor_rollout_ref.rollout.checkpoint_engine.backend",
            remedy=f"actor_rollout_ref.rollout.checkpoint_engine.backend={_transport(rollout)}",
        )


def _transport(rollout: DictConfig) -> str:
    return CPU_TRANSPORT if OmegaConf.select(rollout, "name") == CPU_ROLLOUT else "nccl (it means HCCL on an NPU)"


def one_step(config: DictConfig, notes: list[str], ours: bool) -> None:
    """One optimiser step a period: one mini-batch, one epoch, no warm-up batch; ``ours``: the loss is a plug-in's."""
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
    check_streaming(actor, ours=ours, distillation=bool(OmegaConf.select(config, "distillation.enabled")))
    if OmegaConf.select(config, "skip.rollout_tq.enable"):
        raise ConfigurationError(
            "a period submits its batch itself and wouldn't ask the cache of rollouts",
            found=True,
            where="skip.rollout_tq.enable",
            remedy="skip.rollout_tq.enable=False, or metronome.rollout_source=synchronous",
        )
    _set(config, "trainer.v1.separate_async.num_warmup_batches", 0, notes, "every sample is of the trained version")
    if config.trainer.v1.sampler.max_off_policy_strategy == "wait":  # at threshold 1 for the whole batch
        _set(config, "trainer.v1.sampler.max_off_policy_threshold", None, notes, "nothing stale to wait for")
    _set(config, "trainer.v1.separate_async.parameter_sync_step", batch, notes, "groups are consumed one by one")
    _set(config, "actor_rollout_ref.actor.ppo_mini_batch_size", 1, notes, "one chunk a group, one step a period")
    dynamic_batches(config, notes, "chunks are as large as the groups that have arrived")


def merged_adapter(config: DictConfig, mode: str, notes: list[str]) -> None:
    """LoRA reaches a rollout pool of its own, and the CPU room, only as part of the weights."""
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    if not (model.get("lora_rank") or (model.get("lora") or {}).get("rank") or model.get("lora_adapter_path")):
        return
    why = ""
    if mode != "synchronous":  # update_weights of engine_workers.py: get_per_tensor_param() without base_sync_done
        why = "to a rollout pool of its own verl would publish the base weights without the adapter"
    elif rollout.name == CPU_ROLLOUT:
        why = f"{CPU_ROLLOUT} takes merged weights"
    if why:
        _set(config, "actor_rollout_ref.model.lora.merge", True, notes, why)


def _no_critic(config: DictConfig) -> None:
    """No critic in a period."""
    keys = {"algorithm.adv_estimator": config.algorithm.adv_estimator, "critic.enable": config.critic.get("enable")}
    for key, value in keys.items():
        if value is True or str(value) == "gae":
            raise ConfigurationError(
                "a critic needs the whole batch: verl whitens GAE's advantages over it (compute_gae_advantage_return)"
                " and steps the value loss by mini-batches; a period trains groups as they finish",
                found=value,
                where=key,
                remedy="algorithm.adv_estimator=grpo critic.enable=False, or metronome.rollout_source=synchronous",
            )


def _within_groups(config: DictConfig) -> None:
    """Everything before the loss looks at one group at a time, since groups of a batch come one after another."""
    _no_critic(config)
    algorithm = config.algorithm
    if str(algorithm.adv_estimator) not in _GROUP_ESTIMATORS:
        raise ConfigurationError(
            "this advantage estimator looks at the whole batch (whitening, counts, a baseline rollout), or"
            " isn't known to look at one group only; a period trains groups as they finish",
            found=str(algorithm.adv_estimator),
            where="algorithm.adv_estimator",
            remedy=f"algorithm.adv_estimator={' | '.join(_GROUP_ESTIMATORS)}, or metronome.rollout_source=synchronous",
        )
    ranks = int(config.trainer.nnodes) * int(config.trainer.n_gpus_per_node)
    if ranks > _MOST_RANKS.get(str(algorithm.adv_estimator), ranks):
        raise ConfigurationError(
            f"verl's {algorithm.adv_estimator} gives no numbers for the rows that verl adds so that ranks share a part",
            found=f"{ranks} devices train",
            where="algorithm.adv_estimator",
            remedy="algorithm.adv_estimator=grpo or rloo, or metronome.rollout_source=synchronous with whole shares",
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


def dynamic_batches(config: DictConfig, notes: list[str], why: str) -> None:
    """Micro-batches by tokens, not by rows, in every pass."""
    _set(config, "actor_rollout_ref.actor.use_dynamic_bsz", True, notes, why)
    _set(config, "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz", True, notes, why)
    _set(config, "actor_rollout_ref.ref.log_prob_use_dynamic_bsz", True, notes, why)


def with_clip(config: DictConfig, block: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """``block`` with verl's own clip for our losses, where the user set none of ours.

    Dual clipping, which verl has switched on for its PPO, goes to ``ppo`` only: A-3PO has none by itself.
    """
    name = block.get("loss")
    actor = config.actor_rollout_ref.actor
    hosts = {
        "clip_low": actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low,
        "clip_high": actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high,
        "dual_clip": actor.clip_ratio_c,
    }
    wanted = {"ppo": tuple(hosts), "a3po": ("clip_low", "clip_high")}.get(str(name), ())
    own = block.get(str(name)) or {}
    if not wanted or not isinstance(own, dict):
        return block
    taken = {key: float(hosts[key]) for key in wanted if key not in own}
    if taken:
        shown = " ".join(f"metronome.{name}.{key}={value:g}" for key, value in taken.items())
        notes.append(f"{shown}  (verl's actor.clip_ratio_...)")
    return {**block, str(name): {**own, **taken}}


def own_loss(config: DictConfig, settings: Settings, selection: Selection, notes: list[str]) -> None:
    """Our loss in the place of verl's: the rollout's log-probs, and a forward pass for old ones only if it's needed."""
    mode = str(OmegaConf.select(config, "actor_rollout_ref.actor.policy_loss.loss_mode") or "vanilla")
    if mode != "vanilla":
        raise ConfigurationError(
            f"metronome.loss={settings.loss} takes the place of verl's policy loss, which is set too",
            found=mode,
            where="actor_rollout_ref.actor.policy_loss.loss_mode",
            remedy="actor_rollout_ref.actor.policy_loss.loss_mode=vanilla, or leave metronome.loss out",
        )
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


def group_size(config: DictConfig, selection: Selection, notes: list[str]) -> None:
    """The controller's G, and prompts drawn one by one."""
    if str(config.algorithm.adv_estimator) == "gae" or config.critic.get("enable"):
        raise ConfigurationError(
            "a critic's mini-batches follow one G, and the group controller's may change",
            found=str(config.algorithm.adv_estimator),
            where="algorithm.adv_estimator",
            remedy="algorithm.adv_estimator=grpo, or leave metronome.group_controller out",
        )
    size = selection.group_controller.size()
    _set(config, "data.gen_batch_size", 1, notes, "the number of prompts may change")
    _set(config, "actor_rollout_ref.rollout.n", size, notes, f"G of {selection.group_controller.name}")


def sharing(config: DictConfig, notes: list[str]) -> None:
    """Groups whole in a micro-batch, which fixed numbers of rows would cut; what can't be shared is refused."""
    from metronome_verl.limits import refuse_flags

    actor = config.actor_rollout_ref.actor
    if actor.strategy in ("fsdp", "fsdp2"):
        refuse_flags(config.actor_rollout_ref.model, actor)
    dynamic_batches(config, notes, "groups stay whole in a micro-batch")
    if actor.get("shuffle"):
        notes.append("actor.shuffle=True scatters groups over mini-batches, so that less is shared")


def no_threshold(config: DictConfig, notes: list[str]) -> None:
    """One owner of admission: our verdict in the place of verl's threshold."""
    _set(config, "trainer.v1.sampler.max_off_policy_threshold", None, notes, "metronome.bounded.max_staleness rules")
