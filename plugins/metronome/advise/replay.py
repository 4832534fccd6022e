"""A recorded period with another schedule or other training work, from the run's own arrivals by the closed form.

Synchronous and periodic sources dispatch the same prompts at a period's start, so that what trades one for the other,
or changes the trainer's work alone, leaves every arrival where it was. Then nothing about the engines need be modelled:
``T = max_j(a_(j) + sum_{m>=j} w_(m)) + T_step + T_publish`` (docs/techniques/periodic.md, ours).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from metronome.advise.group_cost import group_seconds
from metronome.advise.lengths import StepGroups
from metronome.advise.times import Times
from metronome.observe.records import RunRecord
from metronome.periodic.closed_form import periodic_seconds, synchronous_seconds
from metronome.simulate.cluster import Trainer
from metronome.simulate.lengths import Group
from metronome.simulate.policy import Policy
from metronome.simulate.training import work


@dataclass(frozen=True, slots=True)
class Replay:
    """One recorded period.

    Attributes:
        arrivals: ``[groups]`` seconds from the first dispatch, rising.
        work: ``[groups]`` seconds that each took to train, proximal pass included.
        groups: ``[groups]`` lengths.
        times: of the trainer.
    """

    arrivals: tuple[float, ...]
    work: tuple[float, ...]
    groups: tuple[Group, ...]
    times: Times

    def seconds(self, trainer: Trainer, base: Policy, policy: Policy) -> float:
        """Seconds of the period under ``policy``, synchronous or periodic.

        Each group's work changes by the ratio of its modelled costs under ``policy`` and under ``base``.
        """
        scaled = [
            seconds * work(trainer, policy, group).seconds / work(trainer, base, group).seconds
            for seconds, group in zip(self.work, self.groups, strict=True)
        ]
        closed = periodic_seconds if policy.source == "periodic" else synchronous_seconds
        return closed(self.arrivals, scaled, self.times.serial, self.times.publication)


def replays(run: RunRecord, steps: Sequence[StepGroups], times: Sequence[Times]) -> tuple[Replay, ...] | None:
    """The recorded periods of a synchronous or periodic run; None where arrivals aren't recorded for every group."""
    if run.source not in ("synchronous", "periodic"):
        return None
    found = []
    for one, took in zip(steps, times, strict=True):
        starts = [response.start for group in one.rollouts for response in group if response.start is not None]
        ends = [[response.end for response in group if response.end is not None] for group in one.rollouts]
        if not ends or len(starts) != sum(map(len, one.rollouts)) or any(not of_group for of_group in ends):
            return None
        begun, worked = min(starts), _work(run, one, took)
        rows = sorted(zip((max(of_group) - begun for of_group in ends), worked, one.groups, strict=True), key=_arrival)
        arrivals, seconds, groups = zip(*rows, strict=True)
        found.append(Replay(arrivals, seconds, groups, took))
    return tuple(found)


def _arrival(row: tuple[float, float, Group]) -> float:
    return row[0]


def _work(run: RunRecord, one: StepGroups, took: Times) -> list[float]:
    """Seconds of each group: the trainer's spans where there is one a group, else the step's by tokens."""
    total = took.training + took.proximal
    # Spans are the trainer's time too, but for rounding; what was given stands over them.
    parts: Sequence[float] = group_seconds(run, one) or one.fed(shared=False, padded=False)
    return [total * part / sum(parts) for part in parts]
