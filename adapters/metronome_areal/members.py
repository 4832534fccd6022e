"""A group of any size: the workflow run G times for one prompt."""

from __future__ import annotations

import asyncio
from typing import Any

from areal.api import InferenceEngine, RolloutWorkflow
from areal.utils import logging
from areal.utils.data import concat_padded_tensors

_log = logging.getLogger("metronome")


class Members(RolloutWorkflow):
    """``size`` episodes of ``workflow`` for one prompt, side by side.

    A member that fails, or whose episode is refused (None), is left out; a group without members is refused. One
    episode may give several rows.

    Args:
        workflow: of one episode.
        size: G.
    """

    def __init__(self, workflow: RolloutWorkflow, size: int) -> None:
        self.workflow, self.size = workflow, size

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any] | None:
        """AReaL's: one dict of the group's rows, padded on the right."""
        episodes = [self.workflow.arun_episode(engine, data) for _ in range(self.size)]
        found = await asyncio.gather(*episodes, return_exceptions=True)
        rows = []
        for one in found:
            if isinstance(one, BaseException):
                if not isinstance(one, Exception):
                    raise one
                _log.error("metronome: a member of a group failed: %r", one)
            elif one is not None:
                rows.append(one)
        if len(rows) < self.size:
            _log.warning("metronome: %d of %d members of a group are left out", self.size - len(rows), self.size)
        return dict(concat_padded_tensors(rows)) if rows else None
