"""What a group controller is told about a step, from the tags that verl keeps of every trajectory."""

from __future__ import annotations

from typing import Any

import transfer_queue as tq
from omegaconf import DictConfig

from metronome.contracts import GroupStats, StepStats


def step_stats(batch: Any, step: int, config: DictConfig, bubble: float | None) -> StepStats:
    """The generated groups of a step: true sizes, response lengths, truncation, rewards, generation seconds.

    A response is truncated if it is as long as ``data.max_response_length``. verl keeps no clock of single
    trajectories in its tags; ``start`` is 0 and ``end`` the group's longest generation time, where it is recorded.
    """
    longest = int(config.data.max_response_length)
    places = [place for place, tag in enumerate(batch.tags) if not tag.get("is_padding", False)]
    keys = [batch.keys[place] for place in places]
    data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["rm_scores", "metrics"])
    rewards = [float(scores.sum()) for scores in data["rm_scores"].unbind()]
    seconds = [_seconds(one) for one in data["metrics"]] if "metrics" in data else [0.0] * len(keys)
    groups: dict[str, list[tuple[int, float, float]]] = {}
    for place, key, reward, spent in zip(places, keys, rewards, seconds, strict=True):
        length = int(batch.tags[place]["response_len"])
        groups.setdefault(key.split("_")[0], []).append((length, reward, spent))
    size = int(config.actor_rollout_ref.rollout.n)
    return StepStats(
        step=step,
        groups=[
            GroupStats(
                size=size,
                lengths=[length for length, _, _ in rows],
                truncated=[length >= longest for length, _, _ in rows],
                rewards=[reward for _, reward, _ in rows],
                start=0.0,
                end=max(spent for _, _, spent in rows),
            )
            for rows in groups.values()
        ],
        bubble=bubble,
    )


def _seconds(metrics: Any) -> float:
    found = getattr(metrics, "data", metrics)
    return float(found.get("generate_sequences", 0.0)) if isinstance(found, dict) else 0.0
