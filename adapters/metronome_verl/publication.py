"""What happens to running requests when weights are published in bounded mode: ``metronome.in_flight``.

- ``resume``: verl aborts them and its client sends them on with the new weights, behind the tokens they have.
- ``abort``: ``OneVersionClient`` throws those tokens away and sends the request anew.
- ``finish``: besides, a ``Door`` lets no request in while the publication waits for those inside.

All of it stands in the client and around verl's publication, so it holds for every rollout engine whose requests go
through verl's client. A request is one turn: between the turns of a trajectory nothing runs, so nothing is waited for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from verl.workers.rollout.llm_server import LLMServerClient

from metronome.errors import WaitTimeout
from metronome_verl.versions import SpanRecordingClient

_ABORTED = ("aborted", "abort")  # vLLM's word and SGLang's, as in verl's resume loop
_SILENCE = 1800.0  # seconds in which no request ends before the wait is given up
_TELL = 10.0  # seconds between two lines
_SOONEST, _LATEST = 0.02, 0.5  # seconds between two looks or two tries


class Door:
    """Counts the requests inside, and lets none in while it's shut. One Ray actor for all agent-loop workers."""

    def __init__(self) -> None:
        self._inside, self._shut = 0, False

    def enter(self) -> bool:
        """Whether the request may go; it is counted then."""
        if not self._shut:
            self._inside += 1
        return not self._shut

    def leave(self) -> None:
        """The request has ended."""
        self._inside -= 1

    def shut(self) -> int:
        """Lets no more in; the number inside."""
        self._shut = True
        return self._inside

    def inside(self) -> int:
        """The number inside."""
        return self._inside

    def open(self) -> None:
        """Lets requests in again."""
        self._shut = False


def make_door() -> Any:
    """The actor."""
    return ray.remote(Door).options(num_cpus=0).remote()


class _Restarting(LLMServerClient):
    """An aborted request begins anew; what it had generated is thrown away."""

    async def generate(self, request_id: str, **request: Any) -> Any:
        """verl's, as often as it takes."""
        while True:
            output = await super().generate(request_id, **request)
            if output.stop_reason not in _ABORTED:
                return output
            await asyncio.sleep(1)  # as verl's resume loop


class OneVersionClient(SpanRecordingClient, _Restarting):
    """A client whose responses are each of one version of the weights, recorded like ``SpanRecordingClient``'s.

    By the order of the bases a segment is what ``_Restarting`` gives back, so neither verl's resume loop nor the
    record sees an aborted one.

    Args:
        door: for ``finish``, the actor that every request passes; None for ``abort``.
    """

    def __init__(self, *arguments: Any, door: Any = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._door = door

    async def generate(self, request_id: str, **request: Any) -> Any:
        """verl's ``generate``, once the door is open."""
        if self._door is None:
            return await super().generate(request_id, **request)
        pause = _SOONEST
        while not await self._door.enter.remote():
            await asyncio.sleep(pause)
            pause = min(_LATEST, 2 * pause)
        try:
            return await super().generate(request_id, **request)
        finally:
            self._door.leave.remote()


@contextmanager
def finished(door: Any, version: int) -> Iterator[float]:
    """Shuts the door, waits until nothing is inside, and opens it after the block; gives the seconds waited.

    Raises WaitTimeout if no request ends for half an hour.
    """
    inside = ray.get(door.shut.remote())
    started = moved = told = time.monotonic()
    if inside:
        _tell(version, inside)
    pause = _SOONEST
    while inside:
        time.sleep(pause)
        pause = min(_LATEST, 2 * pause)
        before, inside, now = inside, ray.get(door.inside.remote()), time.monotonic()
        if inside != before:
            moved = now
        elif now - moved > _SILENCE:
            raise WaitTimeout(
                "a publication waits for running requests, and none has ended for half an hour",
                found=f"{inside} requests, version {version}",
                where="metronome.in_flight=finish",
                remedy="look for a rollout server or an agent-loop worker that has died, or metronome.in_flight=abort",
            )
        if inside and now - told > _TELL:
            told = now
            _tell(version, inside)
    try:
        yield time.monotonic() - started
    finally:
        ray.get(door.open.remote())


def _tell(version: int, inside: int) -> None:
    print(f"metronome: the publication of version {version} waits for {inside} requests", flush=True)
