"""What stops a step of our trainers: a sample of another version, unequal shares of ranks, weights that stand still."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from metronome.errors import ConfigurationError, MetronomeError, VersionMismatch

_ROWS = ("grpo", "gae", "reinforce_plus_plus")


def check_versions(tags: list[dict[str, Any]], wanted: int, where: str) -> None:
    """Holds every sample of a period to one version of the weights.

    Raises VersionMismatch naming the first that isn't of version ``wanted``, or that doesn't say its version.
    """
    for tag in tags:
        if tag.get("is_padding", False):
            continue
        versions = tag.get("min_global_steps"), tag.get("max_global_steps")
        if None in versions:
            raise VersionMismatch(
                "a sample doesn't say which version of the weights generated it",
                found=f"versions {versions[0]} to {versions[1]}",
                where=where,
                remedy="an agent loop gives every row the extra_fields of the row's first generate() output",
            )
        if versions != (wanted, wanted):
            raise VersionMismatch(
                "a sample of another version of the weights came into a periodic batch",
                found=f"versions {versions[0]} to {versions[1]}, trained is {wanted}",
                where=where,
                remedy="metronome.rollout_source=bounded, or report it: periodic mode has no such samples",
            )


def check_rows(keys: Sequence[str], estimator: str) -> None:
    """Holds rollouts of several rows (an agent loop's list of outputs) to estimators that count rollouts, not rows.

    verl's compute_advantage_for_multi_trajectories does so for grpo; gae and reinforce_plus_plus look at a row alone.

    Raises ConfigurationError for others, whose groups would count each row as a rollout.
    """
    rollouts = [key.rsplit("_", 1)[0] for key in keys]
    if estimator not in _ROWS and len(set(rollouts)) < len(rollouts):
        found = next(rollout for rollout, count in Counter(rollouts).items() if count > 1)
        raise ConfigurationError(
            "a rollout gave several rows, and this advantage estimator would take each for a rollout of the group",
            found=f"{estimator}, {rollouts.count(found)} rows of rollout {found}",
            where="algorithm.adv_estimator",
            remedy="algorithm.adv_estimator=grpo, or an agent loop that gives one row",
        )


def check_mini_batch(prompts: int, size: int, ranks: int) -> None:
    """Holds a mini-batch of ``prompts`` groups of G = ``size`` to equal shares for the data-parallel ranks.

    Raises ConfigurationError. Periodic mode has no mini-batches: its ranks may get different numbers of rows.
    """
    if prompts * size % ranks:
        raise ConfigurationError(
            f"a mini-batch with G = {size} doesn't divide into equal shares for the data-parallel ranks",
            found=f"{prompts} prompts x {size} responses over {ranks} ranks",
            where="actor_rollout_ref.actor.ppo_mini_batch_size",
            remedy=f"actor_rollout_ref.actor.ppo_mini_batch_size=<a multiple of {ranks}>, or metronome.sagc.sizes of"
            f" multiples of {ranks}",
        )


def check_change(metrics: dict[str, Any], where: str) -> None:
    """Stops a publication that changes nothing: a gradient, a learning rate above 0, and every weight as before.

    Raises MetronomeError. A gradient that isn't finite steps nowhere in verl, and neither does a warm-up from rate 0.
    """
    norm, rate = float(metrics.get("actor/grad_norm", 0.0)), float(metrics.get("metronome/weights/lr", 0.0))
    if math.isfinite(norm) and norm > 0 and rate > 0 and not metrics["metronome/weights/changed"]:
        raise MetronomeError(
            "the optimiser step changed no weight, so that its publication would change nothing",
            found=f"gradient norm {norm:g}, learning rate {rate:g}",
            where=where,
            remedy="weights that keep more digits than the step needs"
            " (actor_rollout_ref.actor.fsdp_config.model_dtype=fp32), or a larger actor_rollout_ref.actor.optim.lr",
        )


def named(metrics: dict[str, Any]) -> dict[str, Any]:
    """Ours under ``metronome/``: verl puts the worker's name before every metric of a worker."""
    found = {}
    for name, value in metrics.items():
        found[name.removeprefix("actor/") if name.startswith("actor/metronome/") else name] = value
    return found
