"""The bound of ``bounded``, and what it and the other sources of groups need of AReaL's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from metronome_areal.arguments import WHERE, refuse

_BOUND = f"{WHERE}.bounded.max_staleness"
_HOST = "rollout.max_head_offpolicyness"


def with_bound(config: Any, block: dict[str, Any]) -> dict[str, Any]:
    """``block`` with AReaL's bound, where that is set and ours isn't; AReaL's default of 0 counts as not set."""
    own = block.get("bounded") or {}
    if block.get("rollout_source") != "bounded" or not isinstance(own, Mapping) or "max_staleness" in own:
        return block
    bound = int(config.rollout.max_head_offpolicyness)
    return {**block, "bounded": {**own, "max_staleness": bound}} if bound > 0 else block


def keep_bound(config: Any, part: Any) -> list[str]:
    """Writes ``with_bound``'s into ``config.metronome``, whose other key is about to change; a line if it did."""
    written = config.metronome.get("bounded") or {}
    taken = part.block.get("bounded") or {}
    if "max_staleness" in written or "max_staleness" not in taken:
        return []
    config.metronome["bounded"] = dict(taken)
    return [f"{_BOUND}={taken['max_staleness']}  ({_HOST})"]


def own_batches(config: Any, part: Any) -> None:
    """Raises ConfigurationError for what can't be true where batches are made of our groups."""
    name = f"{WHERE}.rollout_source={part.mode}" if "rollout_source" in part.block else f"{WHERE}.group_controller"
    refuse(
        config.dynamic_bs, f"{name}: a batch has the groups that were asked for", "dynamic_bs", True, "dynamic_bs=false"
    )
    agent = config.rollout.agent
    online = agent is not None and agent.mode == "online"
    refuse(
        online,
        f"{name}: users' sessions aren't prompts that could be sent out",
        "rollout.agent.mode",
        "online",
        f"inline, or no {name.partition('=')[0]}",
    )
    if part.mode == "bounded":
        strategies = (config.actor.scheduling_strategy, config.rollout.scheduling_strategy)
        refuse(
            config.actor.offload or any(one.type == "colocation" for one in strategies),
            f"{name}: generation goes on while a batch is trained, on devices of its own",
            "rollout.scheduling_strategy",
            "colocation",
            "separation",
        )
