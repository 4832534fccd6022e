"""What a simulation gives: figures of every step, totals, and spans for a timeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from metronome.observe.records import Span
from metronome.simulate.policy import Policy


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """One simulated optimiser step. Seconds; arrivals and work are in the order of training.

    Attributes:
        number: from 0.
        start: from the simulation's start.
        seconds: of the step, publication included.
        generation: from the step's start to the arrival of its last group; 0 if all had arrived before.
        waiting: of the trainer for groups.
        training: forward and backward passes, without ``proximal``.
        proximal: forward passes of a recomputed proximal policy.
        optimizer: clip and optimiser step.
        publication: of the weights.
        resharding: both switches of a colocated step.
        group_size: G that the controller had chosen for the step's dispatches.
        sizes: G of each trained group, ``[groups]``.
        arrivals: ``[groups]`` seconds from the step's start; negative: arrived in an earlier step.
        work: ``[groups]`` seconds to train each, ``proximal`` included.
        rollout_seconds: ``[rollouts]`` from a rollout's dispatch to its arrival, in no order.
        response_tokens, trained_tokens: generated tokens of the trained groups; tokens the trainer passed.
        staleness: trained rollouts by staleness of their group's oldest token, in versions.
        dropped: groups found too stale in this step; their prompts went out again.
        straggler_ratio: mean over trained groups of longest over median length.
    """

    number: int
    start: float
    seconds: float
    generation: float
    waiting: float
    training: float
    proximal: float
    optimizer: float
    publication: float
    resharding: float
    group_size: int
    sizes: tuple[int, ...]
    arrivals: tuple[float, ...]
    work: tuple[float, ...]
    rollout_seconds: tuple[float, ...]
    response_tokens: int
    trained_tokens: int
    staleness: Mapping[int, int]
    dropped: int
    straggler_ratio: float

    @property
    def prompts(self) -> int:
        """Groups trained."""
        return len(self.sizes)

    @property
    def rollouts(self) -> int:
        """Rollouts trained."""
        return sum(self.sizes)

    @property
    def tail_ratio(self) -> float:
        """Longest over median of ``rollout_seconds``; 1 where the clock is too coarse for them."""
        median = float(np.median(self.rollout_seconds))
        return max(self.rollout_seconds) / median if median > 0.0 else 1.0

    @property
    def tail_seconds(self) -> float:
        """Seconds from the 95th of a hundred rollouts to the last."""
        return float(max(self.rollout_seconds) - np.quantile(self.rollout_seconds, 0.95))


@dataclass(frozen=True, slots=True)
class Outcome:
    """A simulated run of one policy.

    Attributes:
        policy: that was run.
        steps: in their order.
        dispatched, trained, dropped, unfinished: groups; dispatched = trained + dropped + unfinished. A dropped
            group's prompt counts as dispatched once more.
        restarted: rollouts that began again because their engine failed.
        rollout_idle: share of the engines' seconds without any rollout; publication and failures count as idle.
        slots_idle: share of the slots' seconds without a rollout.
        trainer_idle: share of the trainer's seconds without a pass or an optimiser step; publication counts as idle.
            In a colocated run both shares are of the same devices.
        spans: lanes ``trainer`` and ``engine N``.
    """

    policy: Policy
    steps: tuple[StepOutcome, ...]
    dispatched: int
    trained: int
    dropped: int
    unfinished: int
    restarted: int
    rollout_idle: float
    slots_idle: float
    trainer_idle: float
    spans: tuple[Span, ...] = field(default=(), repr=False)

    @property
    def seconds(self) -> float:
        """Of the whole run."""
        return sum(step.seconds for step in self.steps)

    @property
    def step_seconds(self) -> float:
        """Mean of a step."""
        return self.seconds / len(self.steps)

    @property
    def rollouts(self) -> int:
        """Rollouts trained."""
        return sum(step.rollouts for step in self.steps)

    @property
    def rollouts_per_second(self) -> float:
        """Trained rollouts over seconds."""
        return self.rollouts / self.seconds

    @property
    def tokens_per_second(self) -> float:
        """Response tokens of trained rollouts over seconds."""
        return sum(step.response_tokens for step in self.steps) / self.seconds

    @property
    def staleness(self) -> dict[int, int]:
        """Trained rollouts by staleness."""
        total: Counter[int] = Counter()
        for step in self.steps:
            total.update(step.staleness)
        return dict(sorted(total.items()))

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """G chosen, step by step."""
        return tuple(step.group_size for step in self.steps)
