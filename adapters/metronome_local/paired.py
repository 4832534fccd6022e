"""The same period under several rollout sources: same weights, same prompts, same seeds, one after the other.

This is how sources are timed against each other: the work is the same, so the ratio is the schedule's alone,
and the gradients must agree.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from metronome.contracts import RolloutSource
from metronome.periodic.closed_form import periodic_seconds, synchronous_seconds
from metronome.periodic.stream import GroupStream
from metronome_local.gradient import TrainGroup
from metronome_local.rollouts import Group
from metronome_local.scoring import advantages
from metronome_local.trainer import Trainer


@dataclass
class Measured:
    """One source's run of the period; times in seconds from the period's opening.

    Attributes:
        seconds: until the last group's backward pass has ended.
        arrivals, work: a_(j) and w_(j) in the order trained.
        rollouts: index -> token ids of every response, to tell whether the same was sampled.
        gradient: the accumulated and rescaled gradient, one tensor a parameter.
    """

    seconds: float
    arrivals: list[float]
    work: list[float]
    rollouts: dict[int, list[list[int]]]
    gradient: list[Any] = field(repr=False)

    def closed_form(self, name: str) -> float:
        """The seconds that the schedule's closed form gives for these arrivals and this work."""
        form = synchronous_seconds if name == "synchronous" else periodic_seconds
        return form(self.arrivals, self.work)


@dataclass
class Pair:
    """One period under each source, by name, and what followed: ``step`` and ``publish`` in seconds.

    ``difference`` is the largest relative L2 difference of a gradient to the first source's.
    """

    measured: dict[str, Measured]
    step: float
    publish: float
    difference: float
    sampled_alike: int

    def seconds(self, name: str) -> float:
        """The whole period under the source called ``name``."""
        return self.measured[name].seconds + self.step + self.publish


def paired_period(
    trainer: Trainer, sources: Sequence[RolloutSource], prompts: int, size: int, first_index: int
) -> Pair:
    """Measures one period per source in the given order, then makes one step with the last gradient and publishes.

    Args:
        trainer: built and started; its own stream isn't used.
        sources: sources whose groups don't span versions.
        prompts, size: groups of a period, and G.
        first_index: the prompts are ``first_index`` to ``first_index + prompts - 1``.
    """
    measured = {source.name: _measure(trainer, source, prompts, size, first_index) for source in sources}
    first, *others = measured.values()
    difference = max((_difference(other.gradient, first.gradient) for other in others), default=0.0)
    alike = sum(all(other.rollouts[i] == first.rollouts[i] for other in others) for i in first.rollouts)
    for one in measured.values():
        one.gradient.clear()  # the step's clip scales gradients in place, and they are large
    started = time.monotonic()
    trainer.step()
    stepped = time.monotonic()
    trainer.version += 1
    trainer.publish()
    return Pair(measured, stepped - started, time.monotonic() - stepped, difference, alike)


def _difference(one: Sequence[Any], other: Sequence[Any]) -> float:
    difference = size = 0.0
    for a, b in zip(one, other, strict=True):
        if a is not None and b is not None:
            difference += float((a - b).double().square().sum())
            size += float(b.double().square().sum())
    return (difference / size) ** 0.5 if size else 0.0


def _measure(trainer: Trainer, source: RolloutSource, prompts: int, size: int, first_index: int) -> Measured:
    gradient, source_of = trainer.parts.gradient, trainer.parts.rollouts
    stream: GroupStream[Any, Group] = GroupStream(
        source,
        lambda index: source_of.prompt_at(first_index + index),
        lambda ticket: source_of.generate(ticket.prompt, size),
        lambda group: group.versions(),
        total=prompts,
        timeout=trainer.recipe.machine.timeout,
        describe=source_of.describe,
    )
    gradient.begin(prompts * size)
    work: list[float] = []
    rollouts = {}
    started = time.monotonic()
    stream.open_period(trainer.version, prompts)
    arrivals = stream.arrivals()
    if source.name == "synchronous":  # everything is there before the first group is trained
        arrivals = iter(sorted(arrivals, key=lambda arrival: arrival.ticket.index))
    for arrival in arrivals:
        taken = time.monotonic()
        group = arrival.group
        values = advantages(group.rewards, trainer.training.advantage or "group-std")
        gradient.add([TrainGroup(arrival.ticket.index, group.rollouts, values)], trainer.version)
        rollouts[arrival.ticket.index] = [row.response for row in group.rows()]
        work.append(time.monotonic() - taken)
    seconds = time.monotonic() - started
    report = stream.close_period()
    stream.close()
    gradient.finish()
    return Measured(seconds, list(report.arrivals), work, rollouts, [p.grad for p in gradient.parameters])
