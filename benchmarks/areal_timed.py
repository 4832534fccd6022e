"""AReaL's loop and ours, unchanged but for a stopwatch and an engine that sleeps; used by areal_periodic.py.

The stopwatch stands over functions of the loop's thread. Every moment of it belongs to the innermost of them, so that
our own time is what our functions take outside AReaL's calls and outside waits, measured and not left over. What runs
in AReaL's rollout thread (a group's members side by side, in the place of AReaL's own grouping) isn't the loop's.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import areal_room as room  # of tests/areal_host; attaches the CPU room
from areal.api import ModelResponse
from areal.engine import FSDPPPOActor
from areal.engine.fsdp_engine import FSDPEngine
from areal.infra.remote_inf_engine import GroupedRolloutWorkflow
from areal.infra.workflow_executor import WorkflowExecutor
from areal.trainer.ppo.actor import PPOActor
from areal.utils import stats_tracker
from simulated import lengths, response

from metronome_areal.actor import MetronomeActor
from metronome_areal.packing import RowsApart
from metronome_areal.periodic import PeriodicActor

KINDS = ("waiting", "training", "own", "publication")
AREAL = "AReaL's"  # calls of AReaL's that are neither training nor publication
SPANS = (
    (FSDPEngine, "prepare_batch", "waiting"),
    (WorkflowExecutor, "submit", AREAL),
    (PPOActor, "compute_logp", "training"),
    (PPOActor, "_compute_advantages", "training"),
    (PPOActor, "ppo_update", "training"),
    (FSDPEngine, "_prepare_mb_list", "training"),
    (FSDPEngine, "forward_backward_batch", "training"),
    (FSDPEngine, "optimizer_zero_grad", "training"),
    (FSDPEngine, "optimizer_step", "training"),
    (FSDPEngine, "update_weights", "publication"),
    (MetronomeActor, "compute_advantages", "own"),
    (MetronomeActor, "train_batch", "own"),
    (PeriodicActor, "prepare_batch", "own"),
    (PeriodicActor, "compute_logp", "own"),
    (PeriodicActor, "compute_advantages", "own"),
    (PeriodicActor, "ppo_update", "own"),
)


class Watch:
    """Seconds of one thread's functions by kind; of nested ones the innermost counts."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._thread = threading.get_ident()
        self._kinds: list[str] = []
        self._since = 0.0
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def over(self, owner: Any, name: str, kind: str) -> None:
        """Replaces ``owner``'s function ``name`` by itself, timed, until the watch is left."""
        own = getattr(owner, name)

        @functools.wraps(own)
        def timed(*arguments: Any, **named: Any) -> Any:
            if threading.get_ident() != self._thread:
                return own(*arguments, **named)
            self._turn()
            self._kinds.append(kind)
            try:
                return own(*arguments, **named)
            finally:
                self._turn()
                self._kinds.pop()

        replace(self._undo, owner, name, timed)

    def taken(self) -> dict[str, float]:
        """The seconds so far; they start again at zero."""
        self._turn()
        found, self.seconds = dict(self.seconds), Counter()
        return found

    def _turn(self) -> None:
        now = time.perf_counter()
        if self._kinds:
            self.seconds[self._kinds[-1]] += now - self._since
        self._since = now


def replace(undo: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    """Sets an attribute until ``undo`` is closed."""
    before = vars(owner).get(name)
    setattr(owner, name, value)
    if before is None:
        undo.callback(delattr, owner, name)
    else:
        undo.callback(setattr, owner, name, before)


class Sleeping:
    """Generation in the place of the room's engine: it sleeps for every token, ``slots`` requests at a time.

    Args:
        engine: the room's, whose version the tokens carry.
        work: ``prompts``, ``size``, ``longest``, ``slots``, ``delay`` (seconds a token).
    """

    def __init__(self, engine: Any, work: dict[str, Any]) -> None:
        import asyncio

        self.engine, self.delay, self.longest = engine, work["delay"], work["longest"]
        self.lengths = lengths(work["prompts"] * work["size"], work["longest"])
        self.slots = asyncio.Semaphore(work["slots"])
        self.sleep = asyncio.sleep
        self.requests = 0

    async def agenerate(self, req: Any) -> ModelResponse:
        """AReaL's; the k-th request of a run gets the same tokens in every run."""
        tokens = response(self.requests, self.lengths)
        self.requests += 1
        start = time.perf_counter()
        async with self.slots:
            await self.sleep(len(tokens) * self.delay)
        latency = time.perf_counter() - start
        return ModelResponse(
            input_tokens=list(req.input_ids),
            output_tokens=tokens,
            output_logprobs=[0.0] * len(tokens),  # the actor computes its own
            output_versions=[self.engine.get_version()] * len(tokens),
            stop_reason="length" if len(tokens) == self.longest else "stop",
            latency=latency,
            ttft=latency,
            tokenizer=req.tokenizer,
        )


class StockActor(RowsApart, FSDPPPOActor):
    """AReaL's own actor, with its packs mended; into an engine of the process it publishes as ours does."""

    _update_weights_from_disk = MetronomeActor._update_weights_from_disk


class Trainer(room.PPOTrainer):
    """Our trainer, timed: without a block it is AReaL's loop, here with AReaL's own actor too."""

    work: dict[str, Any]

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        stats_tracker.export_all()
        self.rollout.agenerate = Sleeping(self.rollout, self.work).agenerate
        self.steps: list[dict[str, Any]] = []
        self._metrics: dict[str, float] = {}
        self._groups: list[tuple[float, int]] = []
        self._start: float | None = None
        commit = self.stats_logger.commit

        def keeping(*committed: Any) -> None:
            self._metrics = dict(committed[-1])
            commit(*committed)

        self.stats_logger.commit = keeping

    def _create_train_engine(self, actor_config: Any, alloc: Any) -> Any:
        if self.part.owns_rollouts:
            return super()._create_train_engine(actor_config, alloc)
        actor = StockActor(actor_config)
        actor.create_process_group(parallel_strategy=alloc.parallel)
        return actor

    def train(self, *arguments: Any, **named: Any) -> None:
        """AReaL's, or ours; ``steps`` has the seconds and metrics of each."""
        with Watch() as watch:
            for owner, name, kind in SPANS:
                watch.over(owner, name, kind)
            watch.over(self.rollout.workflow_executor.dispatcher._result_cv, "wait", "waiting")
            with self._stamped(watch):  # over the watch, so that it is taken off first
                super().train(*arguments, **named)
                self._end(watch)

    @contextlib.contextmanager
    def _stamped(self, watch: Watch) -> Iterator[None]:
        """A step begins where AReaL's loop asks for a batch; when each of AReaL's groups is complete is noted."""
        with contextlib.ExitStack() as undo:
            for owner in (FSDPEngine, PeriodicActor):
                replace(undo, owner, "prepare_batch", self._begins(owner.prepare_batch, watch))
            replace(undo, GroupedRolloutWorkflow, "arun_episode", self._notes(GroupedRolloutWorkflow.arun_episode))
            yield

    def _begins(self, prepare: Any, watch: Watch) -> Any:
        def prepare_batch(*arguments: Any, **named: Any) -> Any:
            self._end(watch)
            self._start = time.perf_counter()
            return prepare(*arguments, **named)

        return prepare_batch

    def _notes(self, run: Any) -> Any:
        async def arun_episode(*arguments: Any) -> Any:
            found = await run(*arguments)
            assert self._start is not None
            self._groups.append((time.perf_counter() - self._start, int(found["attention_mask"].sum())))
            return found

        return arun_episode

    def _end(self, watch: Watch) -> None:
        taken = watch.taken()
        if self._start is None:
            return
        seconds = {"step": time.perf_counter() - self._start} | {kind: taken.get(kind, 0.0) for kind in KINDS}
        seconds["rest"] = seconds["step"] - sum(seconds[kind] for kind in KINDS)
        groups, self._groups = self._groups, []
        self.steps.append({"seconds": seconds, "groups": groups, "metrics": self._metrics})
