"""Prompts out, groups in: our rollout source decides, AReaL's dispatcher runs what it is given.

AReaL's staleness manager gets a bound that never bites, so that admission has one owner.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from areal.infra.rpc.rtensor import RTensor
from areal.utils import logging

from metronome.contracts import Flow, GroupStats, RolloutSource, Verdict
from metronome.errors import ConfigurationError, MetronomeError, WaitTimeout

NEVER = 10**9
_SEEN = ("loss_mask", "attention_mask", "versions", "rewards")
_LOOK = 1.0
_log = logging.getLogger("metronome")


@dataclass
class Task:
    """A prompt on its way.

    Attributes:
        data: as the data set has it.
        size: G.
        start: when it went out.
        end: when its group was done; None where only its arrival is known.
    """

    data: dict[str, Any]
    size: int
    start: float
    end: float | None = None

    def done(self) -> None:
        """The group is complete now."""
        self.end = time.monotonic()


@dataclass
class Arrived:
    """A finished group: the workflow's dict, the versions of its trained tokens, what the controller is told."""

    group: dict[str, Any]
    versions: list[int]
    stats: GroupStats
    task: Task = field(repr=False)


class PromptFlow:
    """The prompts of a run, in the order of the data, and the groups that come back.

    Args:
        rollout: AReaL's inference engine or controller: ``submit`` and its dispatcher.
        source: decides how many prompts may be out and which finished groups are trained.
        prompts: the data, without end.
        largest: tokens a response may have, for the controller's statistics.
        seconds: silence after which waiting is an error.

    Attributes:
        submit: ``(task) -> task_id``; set before the first period.
        accept: AReaL's ``should_accept_fn``, resolved; a group that it refuses is replaced by another prompt's.
        generated: what came back in this period, refused or not.
        dropped, refused, failed: groups of the run that were too stale, refused by ``accept``, or came to nothing.
        cause: the last error of a member.
        discarded: dropped and refused groups whose tensors are kept on AReaL's workers.
    """

    def __init__(
        self,
        rollout: Any,
        source: RolloutSource,
        prompts: Iterator[dict[str, Any]],
        largest: int,
        seconds: float,
    ) -> None:
        self._rollout, self.source, self.batch = rollout, source, 0
        self._prompts = prompts
        self.submit: Callable[[Task], int]
        self.accept: Callable[[dict[str, Any]], bool] | None = None
        self._largest, self._seconds = largest, seconds
        self._running: dict[int, Task] = {}
        self._again: deque[dict[str, Any]] = deque()
        self._queued: deque[Arrived] = deque()
        self.version, self.size, self.trained = 0, 1, 0
        self.generated: list[GroupStats] = []
        self.dropped = self.refused = self.failed = self._failed_in_a_row = self._refused_in_a_row = 0
        self.cause: Exception | None = None
        self.discarded: list[dict[str, Any]] = []
        self._heard = time.monotonic()

    def open(self, version: int, size: int, batch: int) -> None:
        """Begins a period of ``version`` with ``batch`` groups of ``size``; what is out stays out."""
        self.version, self.size, self.batch, self.trained = version, size, batch, 0
        self.generated = []
        self._heard = time.monotonic()
        self.dispatch()

    def dispatch(self) -> None:
        """Submits as many prompts as the source allows."""
        for _ in range(self.source.capacity(self._flow())):
            data = self._again.popleft() if self._again else next(self._prompts)
            task = Task(data, self.size, time.monotonic())
            self._running[self.submit(task)] = task

    def take(self, most: int, block: bool = True) -> list[Arrived]:
        """Finished groups that may be trained now, at most ``most``; waits for the first if ``block``.

        Raises WaitTimeout after ``seconds`` without an arrival, and MetronomeError if nothing but failures arrives.
        """
        while True:
            self._collect(_LOOK if block and not self._queued else 0.0)
            self.dispatch()
            found = self._released(most)
            if found:
                return found
            if time.monotonic() - self._heard > self._seconds:
                raise WaitTimeout(
                    f"no group has finished for {self._seconds:.0f} s",
                    found=f"{len(self._running)} prompts out, {len(self._queued)} groups waiting",
                    where="rollout",
                    remedy="look at the inference servers' logs, or a larger rollout.request_timeout",
                )
            if not block:
                return []

    def note(self, error: Exception) -> None:
        """A member's error, for the message of a run that has no other members."""
        self.cause = error

    def complete(self) -> bool:
        """Whether the period has its batch."""
        return self.source.period_complete(self._flow())

    def prompts_out(self) -> list[dict[str, Any]]:
        """Prompts that were taken from the data and aren't trained, for a checkpoint."""
        waiting = [one.task.data for one in self._queued]
        return [*waiting, *(task.data for task in self._running.values()), *self._again]

    def _discard(self, group: dict[str, Any]) -> None:
        if RTensor.collect_shards(group):  # on a worker, until AReaL is told to clear it
            self.discarded.append(group)

    def _flow(self) -> Flow:
        return Flow(self.version, self.batch, len(self._running), len(self._queued), self.trained)

    def _released(self, most: int) -> list[Arrived]:
        found: list[Arrived] = []
        while self._queued and len(found) < most and self.source.release(self._flow()):
            one = self._queued.popleft()
            if self.source.verdict(one.versions, self.version) is Verdict.DROP:
                self.dropped += 1
                self._discard(one.group)
                self._again.append(one.task.data)
                continue
            self.trained += 1
            found.append(one)
        return found

    def _collect(self, seconds: float) -> None:
        """Takes what has finished, waiting up to ``seconds`` for the first."""
        dispatcher = _dispatcher(self._rollout)
        with dispatcher._result_cv:
            dispatcher._check_thread_exception()
            if seconds and not dispatcher._pending_results:
                dispatcher._result_cv.wait(timeout=seconds)
                dispatcher._check_thread_exception()
            done = [number for number in dispatcher._pending_results if number in self._running]
            results = {number: dispatcher._pending_results.pop(number) for number in done}
            dispatcher._active_task_ids.difference_update(done)
        if results:
            self._heard = time.monotonic()
        for number, result in results.items():
            self._arrived(self._running.pop(number), result.data)

    def _failure(self) -> tuple[str, str]:
        """Why groups come to nothing, as far as this process knows, and what to do."""
        if self.cause is not None:
            return f": {type(self.cause).__name__}: {self.cause}", "AReaL's log has each error with its traceback"
        if getattr(self._rollout, "workflow_executor", None) is None:  # members run in AReaL's workers
            return "", "the workers' logs have each error with its traceback; None of a workflow refuses its sample"
        return ": the workflow returned None for each", "return a sample: None of a workflow refuses it"

    def _arrived(self, task: Task, result: Any) -> None:
        if result is None:
            self._failed_in_a_row += 1
            self.failed += 1
            if self._failed_in_a_row > 4 * self.batch:
                cause, remedy = self._failure()
                raise MetronomeError(
                    f"every group fails{cause}",
                    found=f"{self._failed_in_a_row} in a row without a result",
                    where="the workflow's arun_episode",
                    remedy=remedy,
                ) from self.cause
            return
        self._failed_in_a_row = 0
        group = result.trajectory
        missing = [name for name in _SEEN if name not in group]
        if missing:
            raise ConfigurationError(
                "a group isn't judged without its versions, masks and rewards",
                found=f"no {', '.join(missing)} beside {', '.join(group)}",
                where="the workflow's result",
                remedy=f"{', '.join(missing)}, as RLVRWorkflow returns them",
            )
        seen = RTensor.localize({name: group[name] for name in _SEEN})
        stats = stats_of(seen, task, self._largest)
        self.generated.append(stats)
        if self.accept is not None and not self.accept(RTensor.localize(group)):
            self.refused += 1
            self._refused_in_a_row += 1
            self._discard(group)
            if self._refused_in_a_row % (4 * self.batch) == 0:  # AReaL generates without end, too, and says nothing
                _log.warning("metronome: dynamic_filter_fn refused the last %d groups", self._refused_in_a_row)
            return
        self._refused_in_a_row = 0
        versions = versions_of(seen) or [self.version]  # nothing in it was sampled, nor is trained
        self._queued.append(Arrived(group, versions, stats, task))


def versions_of(group: dict[str, Any]) -> list[int]:
    """The versions of a group's trained tokens; where none is trained, of those that are sampled."""
    versions, trained = group["versions"], group["loss_mask"].bool()
    chosen = trained if bool(trained.any()) else group["attention_mask"].bool() & (versions >= 0)
    return sorted({int(one) for one in versions[chosen]})


def stats_of(group: dict[str, Any], task: Task, largest: int) -> GroupStats:
    """What a group controller is told of a group; a row is truncated if one of its turns has ``largest`` tokens."""
    masks = group["loss_mask"].bool()
    lengths = masks.sum(1).tolist()
    return GroupStats(
        size=task.size,
        lengths=[int(one) for one in lengths],
        truncated=[_longest_turn(mask.tolist()) >= largest for mask in masks],
        rewards=[float(one) for one in group["rewards"]],
        start=task.start,
        end=time.monotonic() if task.end is None else task.end,
    )


def _longest_turn(mask: list[bool]) -> int:
    """The longest stretch of trained tokens."""
    return max((len(list(run)) for trained, run in groupby(mask) if trained), default=0)


def _dispatcher(rollout: Any) -> Any:
    executor = getattr(rollout, "workflow_executor", None)
    return rollout.dispatcher if executor is None else executor.dispatcher
