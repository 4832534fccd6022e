"""What a period leaves behind: one line of metrics, and one line for each trained prompt."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from metronome.contracts import GroupStats, StepStats
from metronome.errors import MetronomeError
from metronome.periodic.closed_form import periodic_seconds, synchronous_seconds
from metronome.periodic.stream import PeriodReport
from metronome_local.rollouts import Group
from metronome_local.scoring import degenerate

if TYPE_CHECKING:
    from metronome_local.gradient import Gradient
    from metronome_local.trainer import Parts, Period


class PeriodClock:
    """Seconds of one period, and the gradient's counters at its start.

    Attributes:
        work: training seconds of each group, in the order trained (one sum where there are several steps).
        step_seconds: seconds of the optimiser's steps.
    """

    def __init__(self, gradient: Gradient) -> None:
        self._started = time.monotonic()
        self._marks: dict[str, float] = {}
        self.work: list[float] = []
        self.step_seconds = 0.0
        self._gradient = gradient
        self._before = self._counters()

    def mark(self, name: str) -> None:
        """Ends the stage called ``name``."""
        self._marks[name] = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds from the period's start to its last mark."""
        return max(self._marks.values()) - self._started

    def between(self, first: str, second: str) -> float:
        """Seconds from one mark to another."""
        return self._marks[second] - self._marks[first]

    def counted(self) -> dict[str, float]:
        """The gradient's counters since the start."""
        return {name: value - self._before[name] for name, value in self._counters().items()}

    def _counters(self) -> dict[str, float]:
        gradient = self._gradient
        return {
            "seconds_proximal": gradient.proximal_seconds,
            "tokens_computed": gradient.log_probs.computed_tokens,
            "tokens_separate": gradient.log_probs.separate_tokens,
            "calls/policy_loss": gradient.loss_calls,
            "calls/attention": gradient.log_probs.attention_calls,
        }


def period_record(
    period: Period, report: PeriodReport, control: dict[str, float], parts: Parts, number: int
) -> dict[str, Any]:
    """The metrics of a period; times in seconds, lengths in tokens, TPSPD in tokens per second and process.

    ``tokens`` counts prompt and response of every trained row, as separate rows would have them; TPSPD divides
    it by the period's seconds and by the processes (rollout workers and trainer).
    """
    clock, groups = period.clock, period.generated
    step, publish = clock.step_seconds, clock.between("stepped", "published")
    several = len(clock.work) != len(report.arrivals)  # several steps wait for the whole batch
    if several or parts.selection.rollout_source.name == "synchronous":
        last = max(report.arrivals, default=0.0)
        closed = synchronous_seconds([last], [sum(clock.work)], step, publish)
    else:
        closed = periodic_seconds(list(report.arrivals), clock.work, step, publish)
    tokens = sum(len(row.ids) for group in period.trained for row in group.rows)
    lengths = [length for group in groups for length in group.lengths()]
    return {
        "period": number,
        "version": period.version,
        "group_size": period.size,
        "prompts": period.prompts,
        "reward": _mean([reward for group in groups for reward in group.rewards]),
        "exact": _mean(
            [
                parts.task.accuracy(group.prompt, text, reward)
                for group in groups
                for text, reward in zip(group.texts, group.rewards, strict=True)
            ]
        ),
        "response_length": _mean(lengths),
        "response_length_max": max(lengths, default=0),
        "degenerate": _mean([float(degenerate(group.rewards)) for group in groups]),
        "filtered": report.filtered,
        "dropped": report.dropped,
        "aborted": report.aborted,
        "reward_raised": parts.rollouts.scorer.raised,
        "worker_restarts": parts.pool.restarts,
        "seconds": clock.seconds,
        "seconds_waiting": report.waits,
        "seconds_training": sum(clock.work),
        "seconds_step": step,
        "seconds_publish": publish,
        "seconds_closed_form": closed,
        "arrivals": list(report.arrivals),
        "work": clock.work,
        "tokens": tokens,
        "tpspd": tokens / clock.seconds / (1 + parts.recipe.machine.workers),
        "lr": parts.scheduler.get_last_lr()[0],
        "fingerprint": parts.pool.fingerprint,
        "calls/rollout_source": report.trained,
        "calls/group_controller": 1,
        **clock.counted(),
        **{f"loss/{name}": value for name, value in period.metrics.items()},
        **{f"group/{name}": value for name, value in control.items()},
    }


def trained_record(group: Group, period: int, version: int) -> dict[str, Any]:
    """One trained prompt: where and when it was generated, at which versions, and what came of it."""
    return {
        "period": period,
        "index": group.prompt.index,
        "trained_at": version,
        "versions": group.versions(),
        "size": group.size,
        "worker": group.worker,
        "start": group.start,
        "end": group.end,
        "rewards": group.rewards,
        "lengths": group.lengths(),
        "texts": group.texts,
    }


def _mean(values: list[float] | list[int]) -> float:
    return sum(values) / len(values) if values else 0.0


def step_stats(groups: Sequence[Group], period: int, bubble: float) -> StepStats:
    """What the group controller learns of a period: every generated group, and the trainer's idle fraction."""
    return StepStats(
        period,
        [
            GroupStats(
                size=group.size,
                lengths=group.lengths(),
                truncated=[rows[-1].truncated for rows in group.rollouts],
                rewards=group.rewards,
                start=group.start,
                end=group.end,
            )
            for group in groups
        ],
        min(1.0, bubble),
    )


def prove_life(record: Mapping[str, Any], shares_prompt: bool) -> None:
    """Raises MetronomeError if a selected hook did nothing in a period that had something to train."""
    needed = ["rollout_source", "policy_loss", *(["attention"] if shares_prompt else [])]
    idle = [hook for hook in needed if not record[f"calls/{hook}"]]
    if idle:
        raise MetronomeError(
            "a selected plug-in wasn't called in the first period",
            found=idle,
            where="proof of life",
            remedy="report this with the recipe; the flag would have had no effect",
        )
