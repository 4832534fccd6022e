"""What a group controller is told about a step, from what verl keeps of every row of a rollout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import transfer_queue as tq
from omegaconf import DictConfig

from metronome.contracts import GroupStats, StepStats

GROUP_SIZE = "metronome_group_size"
"""Field of a prompt that its rows keep: the G that generated it."""

_FIELDS = ["rm_scores", "loss_mask", "metrics", GROUP_SIZE]


@dataclass
class _Rollout:
    """One rollout over its rows, which verl names ``{uid}_{session}_{index}``."""

    last: int = -1
    sampled: int = 0
    cut: bool = False
    reward: float = 0.0
    seconds: float = 0.0


def step_stats(batch: Any, step: int, config: DictConfig, bubble: float | None) -> StepStats:
    """The generated groups of a step: true sizes, sampled tokens, truncation, rewards, seconds; one of each a rollout.

    A rollout's length is the tokens that the model sampled in all its rows, tool tokens left out. It is truncated if
    one of its rows is as long, tool tokens included, as ``data.max_response_length``. Its reward is that of its last
    row, as in verl. verl keeps no clock of single trajectories in its tags; ``start`` is 0 and ``end`` the group's
    longest time of generation and tools, where it is recorded.
    """
    longest = int(config.data.max_response_length)
    places = [place for place, tag in enumerate(batch.tags) if not tag.get("is_padding", False)]
    keys = [batch.keys[place] for place in places]
    data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=_FIELDS)
    rewards = [float(scores.sum()) for scores in data["rm_scores"].unbind()]
    sampled = [int(mask.sum()) for mask in data["loss_mask"].unbind()]
    seconds = [_seconds(one) for one in data["metrics"]] if "metrics" in data else [0.0] * len(keys)
    size = int(config.actor_rollout_ref.rollout.n)
    sizes = [int(getattr(one, "data", one)) for one in data[GROUP_SIZE]] if GROUP_SIZE in data else [size] * len(keys)
    groups: dict[str, dict[str, _Rollout]] = {}
    group_sizes: dict[str, int] = {}
    for row, (place, key) in enumerate(zip(places, keys, strict=True)):
        uid, session, index = key.split("_")
        group_sizes[uid] = sizes[row]
        rollout = groups.setdefault(uid, {}).setdefault(session, _Rollout())
        rollout.sampled += sampled[row]
        rollout.cut |= int(batch.tags[place]["response_len"]) >= longest
        # Rows may share one record of the whole rollout, so they aren't added up.
        rollout.seconds = max(rollout.seconds, seconds[row])
        if int(index) > rollout.last:
            rollout.last, rollout.reward = int(index), rewards[row]
    return StepStats(
        step=step,
        groups=[
            GroupStats(
                size=group_sizes[uid],
                lengths=[one.sampled for one in rollouts.values()],
                truncated=[one.cut for one in rollouts.values()],
                rewards=[one.reward for one in rollouts.values()],
                start=0.0,
                end=max(one.seconds for one in rollouts.values()),
            )
            for uid, rollouts in groups.items()
        ],
        bubble=bubble,
    )


def _seconds(metrics: Any) -> float:
    found = getattr(metrics, "data", metrics)
    if not isinstance(found, dict):
        return 0.0
    return float(found.get("generate_sequences", 0.0)) + float(found.get("tool_calls", 0.0))
