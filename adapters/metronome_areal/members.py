"""A group of any size: the workflow run G times for one prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from areal.api import InferenceEngine, RolloutWorkflow
from areal.utils import logging
from areal.utils.data import concat_padded_tensors
from areal.utils.dynamic_import import import_from_string

_log = logging.getLogger("metronome")


class Members(RolloutWorkflow):
    """``size`` episodes of ``workflow`` for one prompt, side by side.

    A member that fails, or whose episode is refused (None), is left out; a group without members is refused. One
    episode may give several rows.

    Args:
        workflow: of one episode; as an import path it is made here, with ``named``.
        size: G.
        named: arguments of a workflow that comes as a path.
        failed: is told the first error of the group's members.
        done: is told when the last member is.
    """

    def __init__(
        self,
        workflow: RolloutWorkflow | str,
        size: int,
        named: dict[str, Any] | None = None,
        failed: Callable[[Exception], None] | None = None,
        done: Callable[[], None] | None = None,
    ) -> None:
        if isinstance(workflow, str):
            workflow = import_from_string(workflow)(**(named or {}))
        self.workflow, self.size, self._failed, self._done = workflow, size, failed, done

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any] | None:
        """AReaL's: one dict of the group's rows, padded on the right, or of an agent's interactions."""
        episodes = [self.workflow.arun_episode(engine, data) for _ in range(self.size)]
        found = await asyncio.gather(*episodes, return_exceptions=True)
        if self._done is not None:
            self._done()
        rows: list[dict[str, Any]] = []
        errors: list[Exception] = []
        for one in found:
            if isinstance(one, Exception):
                errors.append(one)
            elif isinstance(one, BaseException):
                raise one
            elif one:
                rows.append(one)
        if errors:
            _log.error("metronome: %d members of a group failed: %r", len(errors), errors[0], exc_info=errors[0])
            if self._failed is not None:
                self._failed(errors[0])
        if len(rows) < self.size:
            _log.warning("metronome: %d of %d members of a group are left out", self.size - len(rows), self.size)
        return _together(rows) if rows else None


def _together(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Tensors of rows below each other; interactions, which AReaL's executor makes tensors of, in one dict."""
    if all("input_ids" in one for one in rows):
        return dict(concat_padded_tensors(rows))
    merged: dict[str, Any] = {}
    for number, one in enumerate(rows):
        for name, interaction in one.items():
            merged[f"{name}/{number}" if name in merged else name] = interaction  # members may count alike
    return merged
