"""How much of a step is the suite's own: what is neither verl's call nor a wait for rollouts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class OwnTime:
    """A step's seconds by whose they are, counted from construction::

        own = elapsed - elsewhere + here + late

    ``elsewhere`` is spent in verl's calls and in waits, ``here`` in our overrides that verl's calls run, and ``late``
    is the most that finished groups may have lain before a look at the queue found them.
    """

    def __init__(self) -> None:
        self._started, self._elsewhere, self.late = time.perf_counter(), 0.0, 0.0

    @property
    def elapsed(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self._started

    @property
    def seconds(self) -> float:
        """The suite's seconds so far."""
        return self.elapsed - self._elsewhere + self.late

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Around verl's calls and waits."""
        before = self.elapsed
        yield
        self._elsewhere += self.elapsed - before

    @contextmanager
    def here(self) -> Iterator[None]:
        """Around what is ours inside of them."""
        before = self.elapsed
        yield
        self._elsewhere -= self.elapsed - before
