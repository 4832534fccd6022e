"""What a publication does to episodes that are running, in bounded mode.

AReaL interrupts requests at a publication and continues them with the tokens so far, under the new weights:
``resume``. With ``finish`` it waits until no episode runs; with ``abort`` those that run begin anew.
"""

from __future__ import annotations

import asyncio
from typing import Any

from areal.api import InferenceEngine, RolloutWorkflow
from areal.utils.dynamic_import import import_from_string

from metronome.errors import MetronomeError
from metronome_areal.bounded import BoundedFlow
from metronome_areal.parts import Ranks

_LOOK = 0.1


class Anew(RolloutWorkflow):
    """``abort``: an episode that runs over a publication begins anew, all its turns.

    An episode's result counts only if the engine had one version from its beginning to its end; what it did before is
    cancelled as soon as the next version is seen, and at the latest dropped at its end.

    Args:
        workflow: of one episode; as an import path it is made here, with ``named``.
        named: arguments of a workflow that comes as a path.
    """

    def __init__(self, workflow: RolloutWorkflow | str, named: dict[str, Any] | None = None) -> None:
        if isinstance(workflow, str):
            workflow = import_from_string(workflow)(**(named or {}))
        self.workflow = workflow
        self._running: dict[asyncio.Task[Any], int] = {}
        self._watching: asyncio.Task[None] | None = None

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any] | None:
        """AReaL's: the episode's rows, all of one version."""
        while True:
            version = engine.get_version()
            episode = asyncio.ensure_future(self.workflow.arun_episode(engine, data))
            self._running[episode] = version
            if self._watching is None:
                self._watching = asyncio.ensure_future(self._watch(engine))
            try:
                await asyncio.wait({episode})
            finally:
                del self._running[episode]
                episode.cancel()  # where this task was cancelled; nothing where the episode is done
                if not self._running and self._watching is not None:
                    self._watching.cancel()
                    self._watching = None
            if engine.get_version() == version:
                found: dict[str, Any] | None = episode.result()
                return found
            if not episode.cancelled():
                episode.exception()  # asked for, so that asyncio doesn't complain of it

    async def _watch(self, engine: InferenceEngine) -> None:
        """One watcher for all episodes of a run, cancelled with the last of them."""
        while True:
            version = engine.get_version()
            for episode, begun in self._running.items():
                if begun != version:
                    episode.cancel()
            await asyncio.sleep(_LOOK)


class Finishing:
    """``finish``: AReaL's rollout engine or controller, whose ``pause`` waits until no episode runs.

    Args:
        rollout: AReaL's.
        flow: of this process; None on ranks that don't generate.
        ranks: wait for each other, since one of them pauses every server.
    """

    def __init__(self, rollout: Any, flow: BoundedFlow | None, ranks: Ranks) -> None:
        self._rollout, self._flow, self._ranks = rollout, flow, ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rollout, name)

    def pause(self) -> None:
        """Lets running groups end, starts none meanwhile, then AReaL's.

        Raises WaitTimeout if none ends for too long, on every rank.
        """
        error: MetronomeError | None = None
        if self._flow is not None:
            self._flow.hold()
            try:
                self._flow.finish()
            except MetronomeError as found:
                error = found
        error = next((one for one in self._ranks.everywhere(error) if one is not None), None)
        if error is None:
            self._rollout.pause()
        if self._flow is not None:
            self._flow.release()  # what is held doesn't start: AReaL's is paused now
        if error is not None:
            raise error
