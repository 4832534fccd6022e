"""Whether gradients of parts of a batch add up to that of the batch, by verl's configuration of the actor."""

from __future__ import annotations

from typing import Any

from metronome.errors import ConfigurationError, nearest
from metronome_verl.megatron_limits import check_settings

NORMALISERS = {
    "token-mean": "token-mean",
    "seq-mean-token-mean": "seq-mean",
    "seq-mean-token-sum": "seq-mean-token-sum",
    "seq-mean-token-sum-norm": "dr-grpo",
}
"""verl's ``loss_agg_mode`` and the core's name for it; ``token-sum`` has no denominator and needs no rescaling."""

_ADD_UP = ("vanilla", "dppo_tv", "dppo_kl", "gspo", "gpg", "cispo", "bypass_mode")
"""verl's losses whose sum doesn't depend on the split. ``clip_cov``, ``kl_cov`` and ``geo_mean`` rank or average over
a micro-batch, ``sapo`` averages over sequences whatever ``loss_agg_mode`` says."""


def check_streaming(config: Any, *, ours: bool, distillation: bool = False) -> None:
    """Raises ConfigurationError if gradients of parts don't add up to that of one batch under verl's ``ActorConfig``.

    Args:
        config: verl's ``ActorConfig``.
        ours: whether the policy loss is a plug-in's rather than verl's.
        distillation: whether verl's distillation is on.
    """
    if config.strategy == "megatron":
        check_settings(config.megatron)
    elif config.strategy not in ("fsdp", "fsdp2"):
        raise ConfigurationError(
            "it isn't known where this engine keeps the gradients of parts",
            found=config.strategy,
            where="actor_rollout_ref.actor.strategy",
            remedy="actor_rollout_ref.actor.strategy=fsdp2 | fsdp | megatron, or metronome.rollout_source=synchronous",
        )
    mode = config.loss_agg_mode
    if mode != "token-sum" and mode not in NORMALISERS:
        raise ConfigurationError(
            "this way of averaging the loss can't be added up over parts of a batch",
            found=mode,
            where="actor_rollout_ref.actor.loss_agg_mode",
            remedy=nearest(mode, NORMALISERS),
        )
    if mode == "seq-mean-token-sum-norm" and config.loss_scale_factor is None:
        raise ConfigurationError(
            "without a constant verl divides by the longest response of each micro-batch, which depends on the split",
            where="actor_rollout_ref.actor.loss_scale_factor",
            remedy="actor_rollout_ref.actor.loss_scale_factor=<data.max_response_length>",
        )
    if not ours and config.policy_loss.loss_mode not in _ADD_UP:
        raise ConfigurationError(
            "this loss ranks or averages over a micro-batch, has a denominator of its own, or isn't tested: parts of a"
            " batch needn't add up",
            found=config.policy_loss.loss_mode,
            where="actor_rollout_ref.actor.policy_loss.loss_mode",
            remedy="actor_rollout_ref.actor.policy_loss.loss_mode=vanilla, or metronome.loss=ppo",
        )
    if distillation:
        raise ConfigurationError(
            "distillation in parts of a batch isn't tested",
            where="distillation.enabled",
            remedy="distillation.enabled=False, or metronome.rollout_source=synchronous",
        )
