"""Waiting for finished groups in verl's replay buffer: soon after one arrives, asking less often while none do."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from metronome.errors import WaitTimeout, WorkerFailed

_SOONEST, _LATEST, _SHARE = 0.005, 0.5, 0.01  # seconds between two looks; between them, this share of the wait so far
_SILENCE = 1800.0  # seconds without any group before the wait is given up


def wait_for_groups(buffer: Any, global_steps: int, most: int) -> tuple[int, dict[str, Any], float]:
    """How many groups (1 to ``most``) may be trained now, and the metrics of groups that were evicted meanwhile.

    Looks again after 5 ms, a look's own time or 1 % of the wait so far, whichever is longest; twice a second at least.
    The third value is the most seconds that a group may have lain finished: the last pause and look.

    Raises WorkerFailed if no group is left that could still finish, WaitTimeout after half an hour of silence.
    """
    pause, started = 0.0, time.monotonic()
    evicted: dict[str, Any] = {}
    while True:
        begun = time.monotonic()
        ready, found = buffer.wait_for_sampleable(global_steps, "train", 0)
        look = time.monotonic() - begun
        _add(evicted, found)
        if ready:
            return min(len(ready), most), evicted, pause + look
        if not buffer.pending_keys["train"] and not buffer.running_keys["train"]:
            raise WorkerFailed(
                "no group is running and none has finished",
                found=f"step {global_steps}, {most} groups missing",
                where="verl's replay buffer",
                remedy="look for the agent loop's error above",
            )
        if time.monotonic() - started > _SILENCE:
            raise WaitTimeout(
                "for half an hour no group came that may be trained: none finished, or a filter dropped each that did",
                found=f"step {global_steps}, {len(buffer.running_keys['train'])} groups running",
                where="verl's replay buffer",
                remedy="look at the rollout servers and at the filter; data.max_response_length bounds a group's time",
            )
        pause = min(_LATEST, max(_SOONEST, look, _SHARE * (time.monotonic() - started)))
        time.sleep(pause)


def _add(evicted: dict[str, Any], found: dict[str, Any]) -> None:
    """Counts of groups add up over looks; of staleness, which periodic batches don't have, the last look's stay."""
    for name, value in found.items():
        if isinstance(value, dict):
            evicted[name] = dict(Counter(evicted.get(name, {})) + Counter(value))
        else:
            evicted[name] = value if "_staleness/" in name else evicted.get(name, 0) + value
