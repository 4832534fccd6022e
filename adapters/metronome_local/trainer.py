"""The training loop: periods of groups, one policy each, an optimiser step, a publication."""

from __future__ import annotations

import signal
import statistics
import time
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch

from metronome.a3po.metrics import Meter
from metronome.contracts import AttentionBackend, RolloutSource
from metronome.controller_check import checked_metrics, checked_prompts, checked_size, explained
from metronome.errors import EqualityViolated, MetronomeError
from metronome.periodic.stream import GroupStream, PeriodReport
from metronome.plugins import Selection
from metronome_local.audit import audit
from metronome_local.checkpoint import Checkpoints
from metronome_local.dispatch import Rollouts
from metronome_local.gradient import Gradient, TrainGroup
from metronome_local.placement import Placement, release_trainer
from metronome_local.pool import RolloutPool
from metronome_local.progress import Progress
from metronome_local.recipe import Recipe
from metronome_local.record import PeriodClock, period_record, prove_life, step_stats, trained_record
from metronome_local.rollouts import Group, Prompt
from metronome_local.scoring import advantages, degenerate
from metronome_local.tasks import Task
from metronome_local.weights import SharedWeights


class Interrupted(KeyboardInterrupt):
    """SIGINT arrived where a period can be given up without loss."""


@dataclass
class Parts:
    """What ``host.build`` puts together for a trainer."""

    recipe: Recipe
    selection: Selection
    audit_attention: AttentionBackend
    model: Any
    optimiser: torch.optim.Optimizer
    scheduler: Any
    gradient: Gradient
    weights: SharedWeights
    pool: RolloutPool
    task: Task
    rollouts: Rollouts
    progress: Progress
    checkpoints: Checkpoints
    placement: Placement


@dataclass
class Period:
    """What one period gathers: every generated group, what is trained, and the times."""

    version: int
    prompts: int
    size: int
    first_index: int
    clock: PeriodClock
    generated: list[Group] = field(default_factory=list)
    trained: list[TrainGroup] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


class Trainer:
    """Runs a recipe period by period; the state of a run lives here, its decisions in the plug-ins."""

    def __init__(self, parts: Parts) -> None:
        self.parts, self.recipe, self.training = parts, parts.recipe, parts.recipe.training
        self.source = parts.selection.rollout_source
        self.controller = parts.selection.group_controller
        self.period = self.version = 0
        self.history: list[dict[str, Any]] = []
        self.accuracies: list[tuple[int, float]] = []
        self.interrupted = False
        self._uninterruptible = False
        self._alive = self._started = self._moved = False
        self._fingerprint = ""
        self._size = 0
        self.stream = self._stream()

    def _stream(self) -> GroupStream[Prompt, Group]:
        return GroupStream(
            self.source,
            self.parts.rollouts.prompt_at,
            lambda ticket: self.parts.rollouts.generate(ticket.prompt, self._size),  # the open period's G
            lambda group: group.versions(),
            timeout=self.recipe.machine.timeout,
            describe=self.parts.rollouts.describe,
        )

    # --- the run --------------------------------------------------------------------------------

    def run(self) -> None:
        """Trains until ``training.periods``; SIGINT ends it with a checkpoint of the last whole period."""
        before = signal.signal(signal.SIGINT, self._on_sigint)
        try:
            self.start()
            while self.period < self.training.periods and not self.interrupted:
                self.run_period()
        except Interrupted:
            self.parts.progress.say("interrupted: the period in progress is given up, its prompts stay pending")
        finally:
            signal.signal(signal.SIGINT, before)
        folder = self.parts.checkpoints.save(self._boundary, self.parts)
        if self.interrupted:
            self.parts.progress.say(f"checkpoint {folder}; continue with --resume {folder.parent.parent}")

    def start(self) -> None:
        """Publishes the first weights and evaluates them, once."""
        if self._started:
            return
        self._started = True
        self.remember()  # before the workers are awaited: whoever interrupts that wait gets a checkpoint too
        self.publish()
        self._evaluate_when_due()

    def use(self, source: RolloutSource) -> None:
        """Goes on with another rollout source, between two periods; prompts under way go out again."""
        state = self.stream.state_dict() | {"source": source.state_dict()}
        self.stream.close()
        self.source = source
        self.parts.gradient.on_policy = source.max_staleness == 0 and self._one_step
        self.stream = self._stream()
        self.stream.load_state_dict(state)

    def resume(self, state: dict[str, Any]) -> None:
        """Takes over a checkpoint's state; weights and optimiser are already loaded."""
        self.period, self.version = state["period"], state["version"]
        self.stream.load_state_dict(state["stream"])
        self.controller.load_state_dict(state["controller"])
        torch.set_rng_state(torch.tensor(state["random"], dtype=torch.uint8))
        self.accuracies = [tuple(pair) for pair in state["accuracies"]]

    def close(self) -> None:
        """Ends the stream and the rollouts, and gives the process its cores back."""
        self.stream.close()
        self.parts.rollouts.close()
        release_trainer(self.parts.placement)

    def run_period(self) -> None:
        """One period: groups as the source releases them, one step (or several), one publication, one record."""
        period = self._open()
        self._train(period)
        report = self.stream.close_period()
        period.clock.mark("trained")
        every = getattr(self.source, "audit_every", 0)
        if every and self.period % every == 0 and self._one_step:
            period.metrics["audit_difference"] = audit(
                self.parts.gradient,
                period.trained,
                period.version,
                self.parts.audit_attention,
                expected_rows=period.prompts * period.size,
                tolerance=getattr(self.source, "audit_tolerance", 1e-4),
                where=f"period {self.period}",
            )
        self._uninterruptible = True
        if self._one_step:
            period.metrics |= self._timed_step(period)
        period.clock.mark("stepped")
        self.period += 1
        self.version += 1
        self.publish()
        period.clock.mark("published")
        bubble = report.waits / max(1e-9, period.clock.seconds)
        control = checked_metrics(self.controller, step_stats(period.generated, self.period, bubble))
        self._record(period, report, control)
        self.remember()
        self._uninterruptible = False
        if self.interrupted:
            return
        self._evaluate_when_due()
        if self.recipe.checkpoints.every and self.period % self.recipe.checkpoints.every == 0:
            self.parts.checkpoints.save(self._boundary, self.parts)

    # --- one period -----------------------------------------------------------------------------

    def _open(self) -> Period:
        size = self._size = checked_size(self.controller, f"period {self.period}")
        budget = self.training.prompts * self.controller.largest()
        prompts = checked_prompts(self.controller, budget, self.training.mini_batches)
        first_index = self.stream.state_dict()["next_index"]
        period = Period(self.version, prompts, size, first_index, PeriodClock(self.parts.gradient))
        self.stream.open_period(self.version, prompts)
        self.parts.progress.phase(self.period, "trainer waits for groups")
        return period

    def _train(self, period: Period) -> None:
        gradient = self.parts.gradient
        if self._one_step:
            gradient.begin(period.prompts * period.size)
        for arrival in self.stream.arrivals():
            started = time.monotonic()
            group = arrival.group
            period.generated.append(group)
            if self._filtered(group, period):
                self.stream.filter(arrival)
                continue
            values = advantages(group.rewards, self.training.advantage or "group-std")
            one = TrainGroup(arrival.ticket.index, group.rollouts, values)
            period.trained.append(one)
            if self._one_step:
                self.parts.progress.phase(self.period, f"trainer trains prompt {one.index}")
                gradient.add([one], period.version)
                self.parts.progress.phase(self.period, "trainer waits for groups")
                period.clock.work.append(time.monotonic() - started)
        if self._one_step:
            period.metrics = gradient.finish()
        else:
            self._uninterruptible = True
            period.metrics = self._several_steps(period)

    def _several_steps(self, period: Period) -> dict[str, float]:
        """Mini-batches by prompt index, and epochs; metrics over all of them, the norm as a mean."""
        gradient, training = self.parts.gradient, self.training
        groups = sorted(period.trained, key=lambda group: group.index)
        started = time.monotonic()
        if gradient.loss.needs_proximal_forward:
            for group in groups:  # of the policy that opens the period, before its first step
                group.proximal = gradient.forward_only([group])
        parts = [
            groups[len(groups) * j // training.mini_batches : len(groups) * (j + 1) // training.mini_batches]
            for j in range(training.mini_batches)
        ] * training.epochs
        meter, norms, losses = Meter(), [], []
        for number, part in enumerate(part for part in parts if part):
            gradient.begin(len(part) * period.size)
            for group in part:
                gradient.add([group], period.version, number / len(parts))
            losses.append(gradient.finish().get("loss", 0.0))
            meter.add(gradient.meter.sums, gradient.meter.maxima)
            norms.append(self._timed_step(period)["grad_norm"])
        period.clock.work.append(time.monotonic() - started - period.clock.step_seconds)
        means = {"loss": statistics.fmean(losses), "grad_norm": statistics.fmean(norms)}
        return {**meter.result(), **means}

    def _timed_step(self, period: Period) -> dict[str, float]:
        started = time.monotonic()
        metrics = self.step()
        period.clock.step_seconds += time.monotonic() - started
        return metrics

    @property
    def _one_step(self) -> bool:
        return self.training.mini_batches * self.training.epochs == 1

    def _filtered(self, group: Group, period: Period) -> bool:
        """Dynamic sampling: a group without differences is replaced, decided by its rewards and index alone.

        Beyond ``refill_limit`` batches of prompts nothing is filtered any more, so that a period ends even when
        the task is solved or hopeless.
        """
        last = period.first_index + self.training.refill_limit * period.prompts
        return bool(self.training.dynamic_sampling) and degenerate(group.rewards) and group.prompt.index < last

    def step(self) -> dict[str, float]:
        """Clips, steps optimiser and schedule; returns the norm. Raises MetronomeError if it isn't finite.

        Where every advantage was zero there is nothing to learn: the schedule goes on, the weights stay.
        """
        parts = self.parts
        parts.progress.phase(self.period, "optimiser step")
        parts.pool.hold()  # the shared buffer may be about to change
        norm = float(torch.nn.utils.clip_grad_norm_(parts.gradient.parameters, self.training.max_grad_norm))
        if not norm < float("inf"):
            raise MetronomeError(
                "the gradient isn't finite, no step was made",
                found=norm,
                where=f"period {self.period}",
                remedy="lower training.lr, or look at the rewards and log-probs of this period in groups.jsonl",
            )
        if norm > 0.0:
            parts.optimiser.step()
            self._moved = self._moved or parts.scheduler.get_last_lr()[0] > 0.0
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            parts.scheduler.step()
        return {"grad_norm": norm}

    def publish(self) -> None:
        """Publishes the weights as ``version``; raises EqualityViolated if a step left them as they were."""
        parts = self.parts
        parts.progress.phase(self.period, f"publishes version {self.version}")
        parts.pool.publish(self.version, lambda: parts.weights.write(parts.model), self.training.in_flight)
        fingerprint = parts.weights.fingerprint()
        if self._moved and fingerprint == self._fingerprint:
            raise EqualityViolated(
                f"version {self.version} was published with the weights of the version before",
                found=f"fingerprint {fingerprint}",
                where="publication",
                remedy="raise training.lr if it is below the weights' float32 resolution, else report this",
            )
        self._fingerprint, self._moved = fingerprint, False

    def _evaluate_when_due(self) -> None:
        """Every ``evaluation.every`` periods and at both ends, once each, also over a resume."""
        every, done = self.recipe.evaluation.every, {period for period, _ in self.accuracies}
        due = every and (self.period % every == 0 or self.period == self.training.periods)
        if due and self.period not in done:
            self.evaluate()

    def evaluate(self) -> None:
        """Greedy answers to the held-out prompts; nothing if ``evaluation.every`` is 0."""
        if not self.recipe.evaluation.every:
            return
        self.parts.progress.phase(self.period, "evaluates")
        prompts = self.parts.task.held_out()[: self.recipe.evaluation.max_prompts]
        if not prompts:
            return
        accuracy = self.parts.rollouts.accuracy(prompts)
        self.accuracies.append((self.period, accuracy))
        self.parts.progress.evaluation(self.period, accuracy, len(prompts))
        self.remember()

    # --- records and state ----------------------------------------------------------------------

    def _record(self, period: Period, report: PeriodReport, control: dict[str, float]) -> None:
        record = period_record(period, report, control, self.parts, self.period)
        record["group/explanation"] = explained(self.controller)
        if not self._alive and record["degenerate"] < 1.0:
            prove_life(record, self.parts.selection.attention.shares_prompt)
            self._alive = True
            self.parts.progress.say(f"      attention {self.parts.gradient.log_probs.explain()}")
        self.history.append(record)
        chosen = set(report.indices)
        trained = [
            trained_record(group, self.period, period.version)
            for group in period.generated
            if group.prompt.index in chosen
        ]
        self.parts.progress.period(record, trained)

    def remember(self) -> None:
        """The state between two periods: what a checkpoint holds besides weights and optimiser."""
        self._boundary = {
            "period": self.period,
            "version": self.version,
            "stream": self.stream.state_dict(),
            "controller": self.controller.state_dict(),
            "random": torch.get_rng_state().tolist(),
            "accuracies": self.accuracies,
        }

    def _on_sigint(self, _signal: int, _frame: Any) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True
        if not self._uninterruptible:
            raise Interrupted
