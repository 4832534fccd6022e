"""The bounded queue between rollout workers and the trainer, for hosts that have none of their own."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any, Generic

from metronome.contracts import Flow, RolloutSource, Verdict
from metronome.errors import MetronomeError, VersionMismatch, WaitTimeout, WorkerFailed
from metronome.periodic.ledger import RETRIES, Ledger, Slot
from metronome.periodic.records import Aborted, Arrival, GroupT, PeriodReport, PromptT, Ticket

__all__ = ["Aborted", "Arrival", "GroupStream", "PeriodReport", "Ticket"]


class GroupStream(Generic[PromptT, GroupT]):
    """Sends prompts out as the rollout source admits them and hands finished groups to the trainer.

    A host opens a period, trains what ``arrivals()`` yields, closes the period, publishes, opens the next:

        stream.open_period(version, batch)
        for arrival in stream.arrivals():
            if unwanted(arrival.group):
                stream.filter(arrival)        # dynamic sampling: refilled one for one at the same version
            else:
                train(arrival.group)
        report = stream.close_period()

    It has no thread of its own: prompts go out in the thread that opens the period, asks for arrivals,
    filters, or completes a group's future. ``prompt_at`` and ``generate`` are never called twice at a time,
    and never under the stream's lock. Nothing goes out between periods. Prompts that go out again come before
    new ones.

    Args:
        source: decides admission, release and verdict.
        prompt_at: the prompt of an index 0, 1, ...
        generate: starts a group and returns its future; ``Aborted`` in the future sends the prompt out again.
        versions_of: the versions of a group's sampled tokens.
        total: number of prompts of the run; None for no end.
        timeout: seconds without any arrival after which a wait raises WaitTimeout.
        describe: what the workers are doing, for that message.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        source: RolloutSource,
        prompt_at: Callable[[int], PromptT],
        generate: Callable[[Ticket[PromptT]], Future[GroupT]],
        versions_of: Callable[[GroupT], Sequence[int]],
        *,
        total: int | None = None,
        timeout: float = 600.0,
        describe: Callable[[], str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source, self._prompt_at, self._generate = source, prompt_at, generate
        self._versions_of, self._timeout = versions_of, timeout
        self._describe, self._clock = describe, clock
        self._changed = threading.Condition()
        self._events = 0  # grows with whatever a waiting trainer must look at
        self._pumping = self._open = self._closed = False
        self._version, self._batch, self._opened = 0, 0, 0.0
        self._ledger = Ledger(total)
        self._queued: deque[Arrival[PromptT, GroupT]] = deque()
        self._failures: deque[BaseException] = deque()
        self._kept: dict[int, Arrival[PromptT, GroupT]] = {}  # handed out in this period and not filtered
        self._counts: Counter[str] = Counter()
        self._totals: Counter[str] = Counter()
        self._waits = 0.0

    # --- periods ----------------------------------------------------------------------------------

    def open_period(self, version: int, batch: int) -> None:
        """Starts a period that trains ``batch`` groups at ``version`` and sends out what the source admits.

        Raises MetronomeError if a period is open, the version falls or the batch is below 1.
        """
        with self._changed:
            self._require_not_closed()
            if self._open:
                raise MetronomeError(
                    f"period {self._version} is still open", found=version, remedy="call close_period() first"
                )
            if version < self._version or batch < 1:
                raise MetronomeError(
                    "a period needs a version that doesn't fall and a batch of at least 1",
                    found={"version": version, "batch": batch, "last version": self._version},
                    remedy="count versions up by publications",
                )
            self._version, self._batch, self._open = version, batch, True
            self._opened, self._waits = self._clock(), 0.0
            self._ledger.new_period()
        self._pump()

    def arrivals(self) -> Iterator[Arrival[PromptT, GroupT]]:
        """Yields groups in order of arrival, until the period is complete or prompts run out.

        Errors of a future, ``prompt_at``, ``generate`` or ``versions_of`` are raised here as they are, a
        wrong version as VersionMismatch, a silent wait as WaitTimeout. The slot of a failed group has been
        given back and its prompt is pending, so calling ``arrivals()`` again sends it out again.
        """
        while (arrival := self._take()) is not None:
            yield arrival

    def filter(self, arrival: Arrival[PromptT, GroupT]) -> None:
        """Says that this group of the open period isn't trained: its place is refilled at the same version.

        Raises MetronomeError for a group that this period didn't hand out or that is filtered already.
        """
        with self._changed:
            self._require_open()
            if self._kept.get(arrival.ticket.index) is not arrival:
                raise MetronomeError(
                    "only a group that the open period handed out can be filtered, once",
                    found=arrival.ticket.index,
                    remedy="filter an arrival before close_period()",
                )
            del self._kept[arrival.ticket.index]
            self._counts["filtered"] += 1
        self._pump()

    def close_period(self) -> PeriodReport:
        """Ends the period; nothing goes out until the next one opens.

        Raises an error that hasn't been raised yet, or MetronomeError if the period isn't complete or groups
        are under way though the source's groups may not span versions.
        """
        with self._changed:
            self._require_open()
            if self._failures:
                raise self._failures.popleft()
            flow = self.flow()
            if not self._source.period_complete(flow):
                raise MetronomeError("the period isn't complete", found=flow, remedy="train until arrivals() ends")
            if not self._source.spans_versions and (self._ledger.running or self._queued):
                raise MetronomeError(
                    f"groups of {self._source.name} may not span versions, yet some are under way",
                    found=sorted([*self._ledger.running, *self._queued_indices()]),
                    remedy="a source whose capacity is 0 once the batch is complete",
                )
            report = PeriodReport(
                version=self._version,
                batch=self._batch,
                arrivals=tuple(max(0.0, one.arrived - self._opened) for one in self._kept.values()),
                waits=self._waits,
                trained=len(self._kept),
                filtered=self._counts["filtered"],
                dropped=self._counts["dropped"],
                aborted=self._counts["aborted"],
                indices=tuple(self._kept),
            )
            self._counts["trained"] = report.trained
            self._totals.update(self._counts)
            self._counts.clear()
            self._kept.clear()
            self._open = False
            return report

    def flow(self) -> Flow:
        """The counts from which the source decides; the batch is cut to what prompts can still give."""
        with self._changed:
            running, queued, trained = len(self._ledger.running), len(self._queued), len(self._kept)
            left = self._ledger.left()
            batch = self._batch if left is None else min(self._batch, trained + queued + running + left)
            return Flow(self._version, batch, running, queued, trained)

    def exhausted(self) -> bool:
        """Whether no prompt is left: none new, none to go out again, none under way."""
        with self._changed:
            return self._ledger.left() == 0 and not self._ledger.running and not self._queued

    def close(self) -> None:
        """Ends the stream at once: cancels futures, forgets queued groups, wakes a waiting trainer.

        The trainer's wait ends in MetronomeError. A group that can't be cancelled is ignored when it arrives;
        its prompt is pending in ``state_dict``.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
            futures = self._ledger.abandon(self._queued_indices())
            self._queued.clear()
            self._failures.clear()
            self._wake()
        for future in futures:
            with contextlib.suppress(Exception):  # a host's future may refuse; closing goes on
                future.cancel()

    def state_dict(self) -> dict[str, Any]:
        """JSON-able: the next new index, the indices under way or pending, totals, and the source's state.

        Raises MetronomeError inside a period, whose groups no optimiser step has taken in yet.
        """
        with self._changed:
            if self._open:
                raise MetronomeError(
                    f"period {self._version} is open: its groups are neither trained nor untrained",
                    remedy="take the state between close_period() and open_period()",
                )
            totals = self._totals + self._counts
            return {
                "next_index": self._ledger.next_index,
                "pending": self._ledger.unfinished(self._queued_indices()),
                "totals": {name: totals[name] for name in ("trained", "filtered", "dropped", "aborted")},
                "source": self._source.state_dict(),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues a run: pending indices go out first, so that each prompt is trained exactly once.

        Raises ConfigurationError for a state that can't be true or that another source wrote, MetronomeError
        on a stream that has been used.
        """
        with self._changed:
            if self._open or self._ledger.next_index:
                raise MetronomeError("only a new stream can take a state", remedy="load before open_period()")
            self._source.load_state_dict(state.get("source", {}))
            self._ledger.restore(state.get("next_index"), state.get("pending"))
            self._totals = Counter(state.get("totals", {}))

    # --- taking: the trainer's thread -------------------------------------------------------------

    def _take(self) -> Arrival[PromptT, GroupT] | None:
        while True:
            self._pump()
            with self._changed:
                self._require_open()
                if self._failures:
                    raise self._failures.popleft()
                flow = self.flow()
                if self._source.period_complete(flow):
                    return None
                if self._queued and self._source.release(flow) > 0:
                    arrival = self._queued.popleft()
                    if self._accept(arrival):
                        return arrival
                    continue
                if not self._ledger.running and not self._pumping:
                    raise MetronomeError(
                        f"rollout source {self._source.name} admits and releases nothing: no period can end",
                        found=flow,
                        remedy="metronome.testing.rollout_source.check_rollout_source names the fault",
                    )
                woken = self._wait()
            if not woken:
                raise self._silence()

    def _accept(self, arrival: Arrival[PromptT, GroupT]) -> bool:
        ticket = arrival.ticket
        try:
            verdict = self._source.verdict(arrival.versions, self._version)
        except Exception as error:
            self._ledger.give_back(ticket.index)
            if not isinstance(error, VersionMismatch):
                raise
            raise VersionMismatch(
                error.what,
                found=error.found,
                where=f"the group of prompt {ticket.index}, sent out at version {ticket.version}",
                remedy=error.remedy,
            ) from error
        if verdict is Verdict.TRAIN:
            self._kept[ticket.index] = arrival
            self._ledger.finished(ticket.index)
            return True
        self._send_again(ticket, "dropped", f"sampled at {sorted(set(arrival.versions))}")
        return False

    def _wait(self) -> bool:
        seen, started = self._events, self._clock()
        woken = self._changed.wait_for(lambda: self._events != seen, self._timeout)
        self._waits += self._clock() - started
        return woken

    def _silence(self) -> WaitTimeout:
        with self._changed:
            running = sorted(self._ledger.running.items())
        names = [
            f"{index} at version {slot.version}{'' if slot.future else ' (being sent out)'}"
            for index, slot in running[:16]
        ]
        more = f" and {len(running) - 16} more" if len(running) > 16 else ""
        said = f"; the workers say: {self._describe()}" if self._describe is not None else ""
        return WaitTimeout(
            f"no group arrived in {self._timeout:g} s while {len(running)} were running: prompts "
            f"{', '.join(names)}{more}{said}",
            where=f"period {self._version}",
            remedy="look at the rollout workers, or raise the timeout",
        )

    # --- sending: any thread, one at a time -------------------------------------------------------

    def _pump(self) -> None:
        """Sends out whatever the source admits; returns at once if another thread is doing so.

        That thread asks the source again after each prompt, under the lock in which it stops: no change is
        missed, and a future that is done at once doesn't recurse.
        """
        with self._changed:
            if self._pumping:
                return
            self._pumping = True
        try:
            while (reserved := self._reserve()) is not None:
                self._send(*reserved)
        except BaseException:
            with self._changed:
                self._pumping = False
                self._wake()
            raise

    def _reserve(self) -> tuple[int, Slot] | None:
        """The next index with its slot taken, or None, and then pumping has ended."""
        with self._changed:
            reserved = None
            try:
                # An error that the trainer hasn't seen stops the pump: what failed would only fail again.
                ready = self._open and not self._closed and not self._failures
                if ready and self._source.capacity(self.flow()) > 0:
                    reserved = self._ledger.reserve(self._version)
            except Exception as error:  # the source's own fault; a future's callback would swallow it
                self._failures.append(error)
            if reserved is None:
                self._pumping = False
                self._wake()
            return reserved

    def _send(self, index: int, slot: Slot) -> None:
        try:
            ticket = Ticket(index, self._prompt_at(index), slot.version, slot.attempt)
            future = self._generate(ticket)
        except BaseException as error:
            with self._changed:
                if self._ledger.arrive(index, slot.attempt):
                    self._ledger.give_back(index)
                    if isinstance(error, Exception):
                        self._failures.append(error)
            if isinstance(error, Exception):
                return
            raise
        with self._changed:
            slot.future = future
            closed = self._closed
        if closed:
            future.cancel()
        else:
            future.add_done_callback(partial(self._arrived, ticket))

    def _arrived(self, ticket: Ticket[PromptT], future: Future[GroupT]) -> None:
        outcome: Arrival[PromptT, GroupT] | BaseException
        try:
            group = future.result()
            outcome = Arrival(ticket, group, tuple(self._versions_of(group)), self._clock())
        except BaseException as error:  # whatever a worker raised travels to the trainer
            outcome = error
        with self._changed:
            if self._closed:
                return
            if not self._ledger.arrive(ticket.index, ticket.attempt):
                self._failures.append(
                    MetronomeError(
                        "a group arrived twice",
                        found=ticket.index,
                        where=f"period {self._version}",
                        remedy="complete each future once",
                    )
                )
            elif isinstance(outcome, Arrival):
                self._queued.append(outcome)
            elif isinstance(outcome, Aborted):
                self._send_again(ticket, "aborted", str(outcome))
            else:
                self._ledger.give_back(ticket.index)
                self._failures.append(_cancelled(ticket) if isinstance(outcome, CancelledError) else outcome)
            self._wake()
        self._pump()

    def _send_again(self, ticket: Ticket[PromptT], why: str, detail: str) -> None:
        self._counts[why] += 1
        if self._ledger.give_back_counted(ticket.index):
            self._failures.append(
                WorkerFailed(
                    f"the group of one prompt was {why} {RETRIES} times in one period ({detail})",
                    found=ticket.index,
                    where=f"period {self._version}",
                    remedy="look at the rollout workers: do they apply the published version and finish?",
                )
            )

    # --- small helpers, under the lock ------------------------------------------------------------

    def _queued_indices(self) -> list[int]:
        return [arrival.ticket.index for arrival in self._queued]

    def _wake(self) -> None:
        self._events += 1
        self._changed.notify_all()

    def _require_not_closed(self) -> None:
        if self._closed:
            raise MetronomeError("the group stream has been closed", remedy="make a new stream and load its state")

    def _require_open(self) -> None:
        self._require_not_closed()
        if not self._open:
            raise MetronomeError("no period is open", remedy="call open_period(version, batch)")


def _cancelled(ticket: Ticket[Any]) -> WorkerFailed:
    return WorkerFailed(
        "the future of a group was cancelled",
        found=ticket.index,
        where=f"version {ticket.version}",
        remedy="raise metronome.periodic.stream.Aborted in it if the prompt is to go out again",
    )
