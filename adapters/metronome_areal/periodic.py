"""What AReaL's training loop sees as its actor where groups are ours to dispatch and collect.

``PPOTrainer.train`` asks its actor for a batch, log-probs, advantages and an update, in this order. In periodic mode
the batch is an empty list that fills up in the update: prompts go out in ``prepare_batch``, parts are trained as their
groups finish, and one step ends the period. The rest of the loop, publication, checkpoints, evaluation, is AReaL's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from areal.utils import stats_tracker

from metronome.contracts import StepStats
from metronome_areal.config import Part
from metronome_areal.parts import Parts


class Batch(list):  # type: ignore[type-arg]
    """The groups of a period, as they have been trained; empty when AReaL's loop first sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.advantages: list[dict[str, Any]] = []


class Reference:
    """AReaL's reference model in periodic mode; its log-probs are computed part by part."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def compute_logp(self, batch: Any) -> list[Any]:
        """Nothing for a batch that is yet to come."""
        return [] if isinstance(batch, Batch) else self._engine.compute_logp(batch)


class FlowActor:
    """AReaL's actor, or its controller, with batches from our flow: whole ones, as the rollout source allows.

    Args:
        engine: ``MetronomeActor``, or the controller of several.
        part: the run's settings.
        parts: what has finished.
        prompts: ``() -> prompts a step of this process``.
        begin: ``(named) -> None``; tells the flow which workflow to run, with ``prepare_batch``'s arguments.
    """

    def __init__(self, engine: Any, part: Part, parts: Parts, prompts: Callable[[], int], begin: Any) -> None:
        self._engine, self._part, self._parts = engine, part, parts
        self._prompts, self._begin = prompts, begin
        self._step = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def prepare_batch(self, dataloader: Any, **named: Any) -> list[dict[str, Any]]:
        """This rank's groups of the next batch."""
        self._open(named)
        found: list[dict[str, Any]] = []
        while (part := self._parts.next()) is not None:
            found += part
        return list(self._engine.metronome_here(found))

    def ppo_update(self, batch: list[dict[str, Any]]) -> None:
        """AReaL's, then what the controller says of G."""
        self._engine.ppo_update(batch)
        self._close(None)

    def clear_batches(self, *batches: Any) -> None:
        """AReaL's, of what was trained and of what won't be."""
        flow = self._parts.flow
        discarded = [] if flow is None else flow.discarded
        self._engine.clear_batches(*batches, list(discarded))
        discarded.clear()

    def _open(self, named: dict[str, Any]) -> None:
        self._parts.ranks.begin()
        self._step = int(self._engine.get_version())  # a resumed run's steps go on
        flow = self._parts.flow
        if flow is not None:
            self._begin(named)
            size = self._part.selection.group_controller.size() if self._part.owns_groups else int(named["group_size"])
            flow.open(self._step, size, self._prompts())
        self._begun = time.monotonic()

    def _close(self, bubble: float | None) -> None:
        """The same on every rank: G is chosen from what all of them generated, and from the mean of their bubbles."""
        stats = self._parts.stats()
        found = {"metronome/rollout_source/prompts": float(len(stats))}
        flow = self._parts.flow
        counts = (0, 0, 0) if flow is None else (flow.dropped, flow.refused, flow.failed)
        told = self._parts.ranks.everywhere((bubble, counts))
        for place, name in enumerate(("dropped", "refused", "failed")):
            found[f"metronome/rollout_source/{name}"] = float(sum(one[place] for _, one in told))
        if self._part.owns_groups:
            controller = self._part.selection.group_controller
            found["metronome/group_controller/size"] = float(controller.size())
            mean = None if bubble is None else sum(one for one, _ in told) / len(told)
            decided = controller.observe(StepStats(self._step, stats, mean))
            found |= {f"metronome/group_controller/{name}": value for name, value in decided.items()}
        stats_tracker.scalar(**found)


class PeriodicActor(FlowActor):
    """AReaL's actor, or its controller, whose batches come in parts.

    Args:
        reference: AReaL's reference model, or None; the rest as in ``FlowActor``.
    """

    def __init__(self, *args: Any, reference: Any) -> None:
        super().__init__(*args)
        self._reference = reference

    def prepare_batch(self, dataloader: Any, **named: Any) -> Batch:
        """Sends the batch's prompts out and returns at once."""
        self._open(named)
        return Batch()

    def compute_logp(self, batch: Batch) -> list[Any]:
        """Nothing yet: a part's log-probs are computed with it."""
        return []

    def compute_advantages(self, batch: Batch) -> Batch:
        """The batch as it is: a part's advantages are computed with it."""
        return batch

    def ppo_update(self, batch: Any) -> None:
        """Trains the groups as they finish, then steps once."""
        engine, waited, parts = self._engine, 0.0, 0
        engine.metronome_begin()
        while True:
            asked = time.monotonic()
            part = self._parts.next()
            waited += time.monotonic() - asked
            if part is None:
                break
            groups = engine.metronome_level(part)
            if self._reference is not None and groups:
                for group, found in zip(groups, self._reference.compute_logp(groups), strict=True):
                    group["ref_logp"] = found
            batch.advantages += engine.metronome_part(groups)
            batch += groups
            parts += 1
        engine.metronome_step()
        idle = waited / max(time.monotonic() - self._begun, 1e-9)
        stats_tracker.scalar(
            **{
                "metronome/periodic/parts": float(parts),
                "metronome/periodic/seconds_waiting": waited,
                "metronome/periodic/idle": idle,
            }
        )
        self._close(idle)

    def clear_batches(self, batch: Batch, *_: Any) -> None:
        """AReaL's, of what was trained and of what won't be."""
        super().clear_batches(list(batch), batch.advantages)
