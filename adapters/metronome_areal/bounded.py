"""Bounded staleness: groups of several versions in a batch, each judged when it is trained."""

from __future__ import annotations

import time
from typing import Any

from areal.infra.rpc.rtensor import RTensor
from areal.utils import stats_tracker

from metronome.errors import WaitTimeout
from metronome_areal.flow import NEVER, Arrived, PromptFlow, _dispatcher
from metronome_areal.periodic import FlowActor

_LOOK = 0.5


class BoundedFlow(PromptFlow):
    """``PromptFlow`` that notes how stale its groups are, and can be held until no group runs.

    Attributes:
        ages: versions between the oldest token of each group of the period and its training.
        rows, several: rows of the period, and those of them that hold tokens of several versions.
    """

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.ages: list[int] = []
        self.rows = self.several = 0

    def open(self, version: int, size: int, batch: int) -> None:
        """``PromptFlow``'s."""
        self.ages, self.rows, self.several = [], 0, 0
        super().open(version, size, batch)

    def hold(self) -> None:
        """AReaL starts nothing of what was submitted, until ``release``."""
        manager_of(self._rollout).max_staleness = -NEVER

    def release(self) -> None:
        """Undoes ``hold``."""
        manager_of(self._rollout).max_staleness = NEVER
        dispatcher = _dispatcher(self._rollout)
        with dispatcher._input_cv:
            dispatcher._input_cv.notify()

    def finish(self) -> None:
        """Waits until no group runs; those that ended wait for ``take``.

        Raises WaitTimeout if none ends for the flow's seconds.
        """
        dispatcher = _dispatcher(self._rollout)
        heard, before = time.monotonic(), -1
        while running := self._started():
            if running != before:
                heard, before = time.monotonic(), running
            if time.monotonic() - heard > self._seconds:
                raise WaitTimeout(
                    f"a publication waits for running groups, and none has ended for {self._seconds:.0f} s",
                    found=f"{running} groups",
                    where="metronome.in_flight=finish",
                    remedy="metronome.in_flight=resume or abort, or a larger rollout.request_timeout",
                )
            with dispatcher._result_cv:
                dispatcher._check_thread_exception()
                dispatcher._result_cv.wait(timeout=min(_LOOK, self._seconds))

    def waiting(self) -> int:
        """Groups that have ended and aren't trained."""
        with (dispatcher := _dispatcher(self._rollout))._result_cv:
            return len(self._queued) + len(self._running.keys() & dispatcher._pending_results.keys())

    def _started(self) -> int:
        """Groups that AReaL has begun and not ended."""
        dispatcher = _dispatcher(self._rollout)
        with dispatcher._input_cv:
            waiting = {one.task_id for one in dispatcher._pending_inputs}
        with dispatcher._result_cv:
            ended = set(dispatcher._pending_results)
        return len(self._running.keys() - waiting - ended)

    def _released(self, most: int) -> list[Arrived]:
        found = super()._released(most)
        for one in found:
            self.ages.append(self.version - min(one.versions))
            rows, several = over_publications(one.group)
            self.rows += rows
            self.several += several
        return found


class BoundedActor(FlowActor):
    """``FlowActor`` that records how stale the batch was."""

    _dropped = 0

    def _close(self, bubble: float | None) -> None:
        super()._close(bubble)
        flow = self._parts.flow
        mine: tuple[list[int], int, int, int, int] = ([], 0, 0, 0, 0)
        if isinstance(flow, BoundedFlow):
            mine = (flow.ages, flow.rows, flow.several, flow.dropped, flow.waiting())
        told = self._parts.ranks.everywhere(mine)
        ages = [age for theirs, *_ in told for age in theirs]
        rows, several, dropped, waiting = (sum(one[place] for one in told) for place in range(1, 5))
        found = {
            "staleness_mean": sum(ages) / max(1, len(ages)),
            "staleness_max": max(ages, default=0),
            "rows_over_publications": several / max(1, rows),
            "dropped_groups": dropped - self._dropped,
            "dropped_groups_total": dropped,
            "waiting_groups": waiting,
        }
        self._dropped = dropped
        stats_tracker.scalar(**{f"metronome/bounded/{name}": float(value) for name, value in found.items()})


def manager_of(rollout: Any) -> Any:
    """AReaL's staleness manager of an engine, or of a controller."""
    executor = getattr(rollout, "workflow_executor", None)
    return rollout.staleness_manager if executor is None else executor.staleness_manager


def over_publications(group: dict[str, Any]) -> tuple[int, int]:
    """Rows of a group, and those whose trained tokens are of several versions."""
    seen = RTensor.localize({name: group[name] for name in ("versions", "loss_mask")})
    rows = zip(seen["versions"], seen["loss_mask"].bool(), strict=True)
    several = [len(set(row[mask].tolist())) > 1 for row, mask in rows]
    return len(several), sum(several)
