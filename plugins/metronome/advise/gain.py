"""What a policy would give over the run as it was, computed on the run's own lengths, with an interval."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from metronome.advise.calibrate import Base
from metronome.simulate.cluster import Cluster
from metronome.simulate.model import simulate
from metronome.simulate.policy import Policy

TRUSTED = 0.10
"""Error of the simulated run against the recorded one from which on its gains aren't to be relied upon."""

ENOUGH = 3
"""Steps from which on there is an interval."""

_RESAMPLES = 2000
_NORMAL = 1.645  # of a 90 % interval
_CARRIED, _CONTROLLED = 12, 60
Array = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Computed:
    """``[steps]`` seconds and rollouts for each recorded step."""

    seconds: Array
    rollouts: Array

    def rate(self, equal_steps: bool) -> float:
        """Steps, or rollouts, a second."""
        done = float(len(self.seconds)) if equal_steps else float(self.rollouts.sum())
        return done / float(self.seconds.sum())


@dataclass(frozen=True, slots=True)
class Calibration:
    """How well the computed run fits the recorded one.

    Attributes:
        computed, recorded: mean seconds of a step.
        level: ``|computed - recorded| / recorded`` of these means.
        error: mean over steps of ``|computed - recorded|``, over the mean of the recorded.
        margin: ``level`` and the 90 % sampling error of the mean difference; intervals are widened by it.
    """

    computed: float
    recorded: float
    level: float
    error: float
    margin: float

    @property
    def trusted(self) -> bool:
        """Whether the model describes the run."""
        return self.error <= TRUSTED


@dataclass(frozen=True, slots=True)
class Gain:
    """Times as fast, 1: no change.

    Attributes:
        value: computed with the technique over computed without.
        low, high: 90 % interval; None where there are fewer than ``ENOUGH`` steps.
    """

    value: float
    low: float | None
    high: float | None


def carries(policy: Policy) -> bool:
    """Whether anything goes from one step to the next: groups under way, or the controller's state."""
    return policy.source == "bounded" or policy.group_controller == "sagc"


def replayable(base: Base, policy: Policy, cluster: Cluster) -> bool:
    """Whether ``policy`` leaves every recorded arrival where it was, so that nothing need be simulated."""
    return base.replays is not None and cluster is base.cluster and not carries(policy) and not carries(base.policy)


def replayed(base: Base, policy: Policy) -> Computed:
    """``policy`` on the run's own arrivals (``metronome.advise.replay``)."""
    assert base.replays is not None
    seconds = []
    for number, one in enumerate(base.replays):
        cluster, _ = base.of_step(number, base.cluster)
        seconds.append(one.seconds(cluster.trainer, base.policy, policy))
    return Computed(np.array(seconds), np.array([float(sum(len(g.responses) for g in s.groups)) for s in base.steps]))


def simulated(base: Base, policy: Policy, cluster: Cluster, *, alone: bool) -> Computed:
    """``policy`` on ``cluster`` with the recorded lengths.

    Args:
        alone: each step alone, with its own number of groups, G and trainer's times; for policies that carry nothing
            from one step to the next. Else the recorded steps are replayed in a row, several times over, with the run's
            usual shape and times; the first time is left out, what follows is the mean by recorded step.
    """
    count = len(base.steps)
    if alone:
        seconds, rollouts = np.zeros(count), np.zeros(count)
        for number in range(count):
            work, lengths = base.of_step(number, cluster)
            outcome = simulate(work, policy, steps=1, lengths=lengths)
            seconds[number], rollouts[number] = outcome.seconds, outcome.rollouts
        return Computed(seconds, rollouts)
    least = _CONTROLLED if policy.group_controller == "sagc" else _CARRIED if carries(policy) else 1
    turns = math.ceil(least / count)
    outcome = simulate(cluster, policy, steps=(turns + 1) * count, lengths=base.lengths)
    kept = outcome.steps[count:]
    shape = (turns, count)
    return Computed(
        np.array([step.seconds for step in kept]).reshape(shape).mean(axis=0),
        np.array([float(step.rollouts) for step in kept]).reshape(shape).mean(axis=0),
    )


def calibration(base: Base, run: Computed) -> Calibration:
    """``run``, the base as it was computed, against the record."""
    recorded = np.array(base.seconds)
    mean, off = float(recorded.mean()), run.seconds - recorded
    level = abs(float(off.mean())) / mean
    return Calibration(
        computed=float(run.seconds.mean()),
        recorded=mean,
        level=level,
        error=float(np.abs(off).mean()) / mean,
        margin=level + _NORMAL * float(off.std()) / math.sqrt(len(off)) / mean,
    )


def gain(without: Computed, with_it: Computed, margin: float, *, equal_steps: bool = False, seed: int = 0) -> Gain:
    """Rate with over rate without, and its 90 % interval.

    Bootstrap over the recorded steps (the same ones with and without); both ends are then moved out by the factor
    ``1 + margin``, the calibration's error.
    """
    value = with_it.rate(equal_steps) / without.rate(equal_steps)
    count = len(without.seconds)
    if count < ENOUGH:
        return Gain(value, None, None)
    chosen = np.random.default_rng(seed).integers(count, size=(_RESAMPLES, count))
    ratios = without.seconds[chosen].sum(axis=1) / with_it.seconds[chosen].sum(axis=1)
    if not equal_steps:
        ratios = ratios * with_it.rollouts[chosen].sum(axis=1) / without.rollouts[chosen].sum(axis=1)
    low, high = np.quantile(ratios, [0.05, 0.95])
    return Gain(value, float(low) / (1.0 + margin), float(high) * (1.0 + margin))
