"""Which prompt index is where: new, running, or to go out again. The stream holds the lock."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from metronome.errors import ConfigurationError

RETRIES = 8
"""Times that one prompt may be dropped or aborted in one period before the stream gives up on the workers."""


@dataclass
class Slot:
    """A running group: the ticket's version and attempt, and its future once ``generate`` has returned."""

    version: int
    attempt: int
    future: Future[Any] | None = None


class Ledger:
    """Hands out indices, lowest pending one first, and takes them back; an index is in one place at a time.

    Args:
        total: number of prompts of the run; None for no end.
    """

    def __init__(self, total: int | None) -> None:
        self.total = total
        self.next_index = 0
        self.running: dict[int, Slot] = {}
        self._pending: list[int] = []  # a heap
        self._attempts: dict[int, int] = {}
        self._retries: Counter[int] = Counter()

    def reserve(self, version: int) -> tuple[int, Slot] | None:
        """The next index with a running slot, or None if none is left."""
        if self._pending:
            index = heapq.heappop(self._pending)
        elif self.total is None or self.next_index < self.total:
            index, self.next_index = self.next_index, self.next_index + 1
        else:
            return None
        attempt = self._attempts.get(index, 0)
        self._attempts[index] = attempt + 1
        slot = self.running[index] = Slot(version, attempt)
        return index, slot

    def arrive(self, index: int, attempt: int) -> bool:
        """Takes the index off the running ones; False if this attempt isn't running."""
        slot = self.running.get(index)
        if slot is None or slot.attempt != attempt:
            return False
        del self.running[index]
        return True

    def give_back(self, index: int) -> None:
        """Puts an index that isn't running to those that go out again."""
        heapq.heappush(self._pending, index)

    def give_back_counted(self, index: int) -> bool:
        """As ``give_back``; True each time the index has come back ``RETRIES`` times in this period."""
        self.give_back(index)
        self._retries[index] += 1
        if self._retries[index] < RETRIES:
            return False
        del self._retries[index]
        return True

    def finished(self, index: int) -> None:
        """Forgets the attempts of an index that never goes out again."""
        self._attempts.pop(index, None)

    def new_period(self) -> None:
        """Starts to count retries anew."""
        self._retries.clear()

    def left(self) -> int | None:
        """How many indices can still go out; None for no end."""
        if self.total is None:
            return None
        return len(self._pending) + max(0, self.total - self.next_index)

    def unfinished(self, queued: Iterable[int]) -> list[int]:
        """Sorted indices that went out and aren't settled: running, ``queued`` and pending."""
        return sorted([*self._pending, *self.running, *queued])

    def abandon(self, queued: Iterable[int]) -> list[Future[Any]]:
        """Makes every unfinished index pending; returns the futures that were running."""
        futures = [slot.future for slot in self.running.values() if slot.future is not None]
        self._pending = self.unfinished(queued)
        self.running.clear()
        return futures

    def restore(self, next_index: object, pending: object) -> None:
        """Continues from a checkpoint; raises ConfigurationError for indices that can't be true."""
        if (
            not isinstance(next_index, int)
            or not isinstance(pending, list)
            or not all(isinstance(index, int) and 0 <= index < next_index for index in pending)
            or len(set(pending)) != len(pending)
        ):
            raise ConfigurationError(
                "pending prompts must be distinct and below the next index",
                found={"next_index": next_index, "pending": pending},
                where="the checkpoint's group stream",
                remedy="resume from another checkpoint",
            )
        self.next_index, self._pending = next_index, sorted(pending)
