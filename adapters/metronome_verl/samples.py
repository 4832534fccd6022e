"""Waiting for finished groups in verl's replay buffer: soon after one arrives, asking less often while none do."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from metronome.errors import WaitTimeout, WorkerFailed

_SOONEST, _LATEST = 0.02, 0.5  # seconds between two looks
_SILENCE = 1800.0  # seconds without any group before the wait is given up


def wait_for_groups(buffer: Any, global_steps: int, most: int) -> tuple[int, dict[str, Any]]:
    """How many groups (1 to ``most``) may be trained now, and the metrics of groups that were evicted meanwhile.

    Looks again after 20 ms, then half as often each time, down to twice a second.

    Raises WorkerFailed if no group is left that could still finish, WaitTimeout after half an hour of silence.
    """
    pause, started = _SOONEST, time.monotonic()
    evicted: dict[str, Any] = {}
    while True:
        ready, found = buffer.wait_for_sampleable(global_steps, "train", 0)
        _add(evicted, found)
        if ready:
            return min(len(ready), most), evicted
        if not buffer.pending_keys["train"] and not buffer.running_keys["train"]:
            raise WorkerFailed(
                "no group is running and none has finished",
                found=f"step {global_steps}, {most} groups missing",
                where="verl's replay buffer",
                remedy="look for the agent loop's error above",
            )
        if time.monotonic() - started > _SILENCE:
            raise WaitTimeout(
                "no group has finished for half an hour",
                found=f"step {global_steps}, {len(buffer.running_keys['train'])} groups running",
                where="verl's replay buffer",
                remedy="look at the rollout servers; data.max_response_length bounds a group's time",
            )
        time.sleep(pause)
        pause = min(_LATEST, pause * 2)


def _add(evicted: dict[str, Any], found: dict[str, Any]) -> None:
    """Counts of groups add up over looks; of staleness, which periodic batches don't have, the last look's stay."""
    for name, value in found.items():
        if isinstance(value, dict):
            evicted[name] = dict(Counter(evicted.get(name, {})) + Counter(value))
        else:
            evicted[name] = value if "_staleness/" in name else evicted.get(name, 0) + value
