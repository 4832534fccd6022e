"""One rollout engine: continuous batching as processor sharing, in virtual time.

Every running sequence decodes ``rate(n)`` tokens a second while n run. Virtual time V is the tokens that a sequence
running since the engine was last empty would have; a rollout of L tokens that begins at V ends at V + L. So a heap of
ends is all there is to keep, and an arrival or a departure costs O(log n) whatever it does to the others' speed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import simpy

    from metronome.simulate.pool import Rollout


class Engine:
    """Slots that take rollouts, prefill their prompts one after the other, and decode them together.

    Whoever changes an engine (``add``, ``fail``, ``pause``, ``resume``) calls ``arm`` once when the changes of that
    moment are done.

    Args:
        environment: the simulation's clock.
        index: of the engine.
        rates: ``[slots + 1]`` tokens a second of each sequence by the number that run; the first is never used.
        prefill: seconds for one prompt token.
        cached: whether a group's members share what the first of them read.
        stops: whether nothing decodes while a prompt is read.
        ended: called with the engine and the rollouts that end at one moment, their slots free already.
    """

    __slots__ = (
        "_cached", "_changed", "_ended", "_ends", "_environment", "_prefill", "_prefill_due", "_prefilling", "_rates",
        "_read", "_since", "_stops", "_timer", "_virtual", "busy", "index", "occupied", "paused", "slot_seconds",
        "slots", "up",
    )  # fmt: skip

    def __init__(
        self,
        environment: simpy.Environment,
        index: int,
        rates: Sequence[float],
        prefill: float,
        ended: Callable[[Engine, list[Rollout]], None],
        *,
        cached: bool = False,
        stops: bool = False,
    ) -> None:
        self.index, self.slots = index, len(rates) - 1
        self.up, self.paused, self.occupied = True, False, 0
        self.busy: list[tuple[float, float]] = []
        self.slot_seconds = 0.0
        self._environment, self._rates, self._prefill, self._ended = environment, rates, prefill, ended
        self._ends: list[tuple[float, int, Rollout]] = []
        self._prefilling: deque[tuple[Rollout, float]] = deque()  # with the seconds that each takes
        self._cached, self._stops, self._read = cached, stops, set[tuple[int, int, int]]()
        self._prefill_due = 0.0  # when the first of them is done; seconds left of it while paused
        self._virtual = self._changed = 0.0
        self._since: float | None = None
        self._timer: Any = None

    def free(self) -> bool:
        """Whether a slot can take a rollout now."""
        return self.up and self.occupied < self.slots

    def add(self, rollout: Rollout) -> None:
        """Puts a rollout into a free slot."""
        self._advance()
        self.occupied += 1
        seconds = self._reading(rollout)
        if seconds > 0.0 or self._prefilling:
            self._prefilling.append((rollout, seconds))
            if len(self._prefilling) == 1:
                self._prefill_due = self._environment.now + seconds
        else:
            self._decode(rollout)

    def fail(self) -> list[Rollout]:
        """Takes the engine down; returns the rollouts that it ran, in the order of their serial numbers."""
        self._advance()
        lost = [*(rollout for rollout, _ in self._prefilling), *(rollout for _, _, rollout in self._ends)]
        self._prefilling.clear()
        self._read.clear()
        self._ends.clear()
        self.up, self.occupied = False, 0
        return sorted(lost, key=lambda rollout: rollout.serial)

    def pause(self) -> None:
        """Stops the engine where it is."""
        self._advance()
        self.paused = True
        self._prefill_due -= self._environment.now

    def resume(self) -> None:
        """Goes on where ``pause`` stopped."""
        self._advance()
        self.paused = False
        self._prefill_due += self._environment.now

    def close(self) -> None:
        """Ends the accounts: ``busy`` and ``slot_seconds`` reach up to now."""
        self._advance()
        if self._since is not None:
            self.busy.append((self._since, self._environment.now))
            self._since = None

    def arm(self) -> None:
        """Sets the timer to the next end of a prefill or of a rollout."""
        now = self._environment.now
        working = self.occupied > 0 and not self.paused
        if working and self._since is None:
            self._since = now
        elif not working and self._since is not None:
            self.busy.append((self._since, now))
            self._since = None
        self._timer = None
        if not working:
            return
        prefill = self._prefill_due - now if self._prefilling else float("inf")
        decode = float("inf")
        if self._decodes():
            decode = (self._ends[0][0] - self._virtual) / self._rates[len(self._ends)]
        self._timer = self._environment.timeout(max(0.0, min(prefill, decode)), value=prefill < decode)
        self._timer.callbacks.append(self._due)

    def _reading(self, rollout: Rollout) -> float:
        """Seconds to read the prompt of ``rollout``."""
        if self._cached:
            key = rollout.version, rollout.group.step, rollout.group.prompt
            if key in self._read:
                return 0.0
            self._read.add(key)
        return self._prefill * rollout.group.prompt_tokens

    def _decodes(self) -> bool:
        return bool(self._ends) and not (self._stops and self._prefilling)

    def _decode(self, rollout: Rollout) -> None:
        if not self._ends:
            self._virtual = 0.0
        heappush(self._ends, (self._virtual + rollout.tokens, rollout.serial, rollout))

    def _advance(self) -> None:
        """Brings virtual time and the account of slots up to now."""
        now = self._environment.now
        seconds = now - self._changed
        self._changed = now
        if seconds > 0.0 and not self.paused:
            self.slot_seconds += seconds * self.occupied
            if self._decodes():
                self._virtual += seconds * self._rates[len(self._ends)]

    def _due(self, timer: Any) -> None:
        if timer is not self._timer:
            return  # the engine changed after this timer was set
        self._advance()
        if timer.value:
            self._decode(self._prefilling.popleft()[0])
            if self._prefilling:
                self._prefill_due += self._prefilling[0][1]
            self.arm()
            return
        self._virtual = self._ends[0][0]  # exactly, so that rounding can't leave the first one unfinished
        done = []
        while self._ends and self._ends[0][0] <= self._virtual:
            done.append(heappop(self._ends)[2])
        self.occupied -= len(done)
        self._ended(self, done)
