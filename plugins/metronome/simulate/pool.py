"""All engines behind one router: rollouts in their order, each to the engine that runs the fewest."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from metronome.errors import ConfigurationError
from metronome.simulate.cluster import Engines
from metronome.simulate.engine import Engine
from metronome.simulate.lengths import Group

if TYPE_CHECKING:
    import simpy

# Restarts for one rollout, on average, after which a cluster counts as unable to finish any.
_HOPELESS = 50


class Dispatch:
    """One group under way or finished.

    Attributes:
        step, prompt: the batch of prompts and the place in it, from which its lengths follow.
        lengths: of the group.
        sent: seconds, when it was dispatched.
        arrived: seconds, when its last rollout ended.
        versions: of the weights when each of its rollouts began, without beginnings that a failure undid.
        ends: seconds of each ended rollout.
    """

    __slots__ = ("arrived", "ends", "lengths", "prompt", "sent", "step", "versions")

    def __init__(self, step: int, prompt: int, lengths: Group, sent: float) -> None:
        self.step, self.prompt, self.lengths, self.sent = step, prompt, lengths, sent
        self.arrived = 0.0
        self.versions: list[int] = []
        self.ends: list[float] = []

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.lengths.prompt_tokens

    @property
    def size(self) -> int:
        """G."""
        return len(self.lengths.responses)


class Rollout:
    """One response of a group; ``serial`` counts dispatched rollouts, ``version`` is -1 until a slot takes it."""

    __slots__ = ("group", "serial", "tokens", "version")

    def __init__(self, group: Dispatch, tokens: int, serial: int) -> None:
        self.group, self.tokens, self.serial, self.version = group, tokens, serial, -1


class Pool:
    """The rollout side. An idle slot takes the next waiting rollout at once; ties go to the lower engine.

    Args:
        environment: the simulation's clock.
        engines: what there is.
        arrived: called with a group whose last rollout has ended.
        open: whether rollouts may begin now.
    """

    def __init__(
        self,
        environment: simpy.Environment,
        engines: Engines,
        arrived: Callable[[Dispatch], None],
        open: Callable[[], bool],
    ) -> None:
        self._environment, self._arrived, self._open = environment, arrived, open
        rates = [0.0, *(engines.decode.rate(running) for running in range(1, engines.slots + 1))]
        self.engines = [
            Engine(
                environment,
                index,
                rates,
                engines.prefill_seconds_per_token,
                self._ended,
                cached=engines.prefix_cache,
                stops=engines.prefill_stops_decoding,
            )
            for index in range(engines.count)
        ]
        self.version = 0
        self.restarted = self.dispatched = 0
        self._waiting: deque[Rollout] = deque()
        self._free = [(0, index) for index in range(engines.count)]
        self._paused = False

    def dispatch(self, groups: Iterable[Dispatch]) -> None:
        """Sends groups out, each one's rollouts in their order."""
        for group in groups:
            for tokens in group.lengths.responses:
                self._waiting.append(Rollout(group, tokens, self.dispatched))
                self.dispatched += 1
        self.fill()

    def fill(self) -> None:
        """Gives waiting rollouts to free slots."""
        self._start({})

    def pause(self) -> None:
        """All engines stand still."""
        self._paused = True
        for engine in self.engines:
            engine.pause()
            engine.arm()

    def resume(self) -> None:
        """All engines go on, and waiting rollouts begin."""
        self._paused = False
        touched = {}
        for engine in self.engines:
            engine.resume()
            touched[engine.index] = engine
        self._start(touched)

    def fail(self, engine: Engine) -> None:
        """Takes an engine down; its rollouts begin again before those that wait.

        Raises ConfigurationError if rollouts are lost again and again.
        """
        lost = engine.fail()
        self.restarted += len(lost)
        if self.restarted > _HOPELESS * max(self.dispatched, 20):
            raise ConfigurationError(
                "engines fail so often that rollouts can't end",
                found=f"{self.restarted} restarts of {self.dispatched} rollouts",
                where="failures.mean_seconds_between",
                remedy="a mean time between failures well above the seconds of a rollout",
            )
        for rollout in lost:
            rollout.group.versions.remove(rollout.version)
        self._waiting.extendleft(reversed(lost))
        self._start({engine.index: engine})

    def repair(self, engine: Engine) -> None:
        """Brings an engine back."""
        engine.up = True
        heappush(self._free, (0, engine.index))
        self.fill()

    def _ended(self, engine: Engine, rollouts: list[Rollout]) -> None:
        heappush(self._free, (engine.occupied, engine.index))
        for rollout in rollouts:
            group = rollout.group
            group.ends.append(self._environment.now)
            if len(group.ends) == group.size:
                group.arrived = self._environment.now
                self._arrived(group)
        self._start({engine.index: engine})

    def _start(self, touched: dict[int, Engine]) -> None:
        """Gives waiting rollouts to free slots, then arms these engines and the ``touched`` ones."""
        while self._waiting and self._free and not self._paused and self._open():
            occupied, index = heappop(self._free)
            engine = self.engines[index]
            if occupied != engine.occupied or not engine.free():
                continue  # an entry that a later one replaced
            rollout = self._waiting.popleft()
            rollout.version = self.version
            rollout.group.versions.append(self.version)
            engine.add(rollout)
            touched[index] = engine
            if engine.free():
                heappush(self._free, (engine.occupied, index))
        for engine in touched.values():
            engine.arm()
