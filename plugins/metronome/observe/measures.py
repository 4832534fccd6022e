"""What a report shows of one run: its series by step, counts and shares, derived from its ``RunRecord``."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from metronome.observe.lanes import Lanes, lanes_of
from metronome.observe.records import RunRecord, Step
from metronome.sagc.events import straggler_ratio

TAU = 2.0
"""A group straggles if its longest response has more than this many times the tokens of its median one."""

CLIPPED = (
    "loss/clipped",
    "metronome/loss/clipped",
    "actor/pg_clipfrac",  # verl's own
    "ppo_clip_ratio",  # OpenRLHF's own
    "ppo_actor/update/clip_ratio/avg",  # AReaL's own
)
COMPUTED = ("tokens_computed", "metronome/attention/tokens_fed")
SEPARATE = ("tokens_separate", "metronome/attention/tokens_separate")
STALENESS = ("loss/staleness", "metronome/loss/staleness", "metronome/bounded/staleness_mean")
EVENT = ("group/straggler_rate", "metronome/group_controller/straggler_rate")
RATIO = ("group/straggler_ratio", "metronome/group_controller/straggler_ratio")
SIZE = ("metronome/group_controller/size", "metronome/group_controller/group_size", "group/group_size", "group_size")
CHANGED = ("metronome/weights/changed",)

Series = dict[int, float]
"""Step -> value; steps that recorded none are missing."""


@dataclass
class Counts:
    """What one pass over the rollouts counts, step by step; a group is a prompt's rollouts within a step."""

    rollouts: Counter[int] = field(default_factory=Counter)
    response_tokens: Counter[int] = field(default_factory=Counter)
    prompt_tokens: Counter[int] = field(default_factory=Counter)
    without_prompt_tokens: int = 0
    lengths: dict[int, dict[str, list[int]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    staleness: Counter[int] = field(default_factory=Counter)
    without_version: int = 0
    rewards: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))


def count(run: RunRecord) -> Counts:
    """One pass over ``run.rollouts``."""
    found = Counts()
    for one in run.rollouts:
        found.rollouts[one.step] += 1
        found.response_tokens[one.step] += one.response_tokens
        found.lengths[one.step][one.prompt].append(one.response_tokens)
        if one.prompt_tokens is None:
            found.without_prompt_tokens += 1
        else:
            found.prompt_tokens[one.step] += one.prompt_tokens
        if one.version is None or one.trained_version is None:
            found.without_version += 1
        else:
            found.staleness[one.trained_version - one.version] += 1
        if one.reward is not None and math.isfinite(one.reward):
            found.rewards[one.step].append(one.reward)
    return found


class Measured:
    """A run and what is derived from it.

    Args:
        run: the records.
        label: its name on the page, unlike every other run's.
    """

    def __init__(self, run: RunRecord, label: str) -> None:
        self.run, self.label = run, label

    @cached_property
    def counts(self) -> Counts:
        """The pass over the rollouts."""
        return count(self.run)

    @cached_property
    def lanes(self) -> Lanes | None:
        """Who was busy when; None for a record without clock times."""
        return lanes_of(self.run)

    def of(self, name: str) -> Series:
        """An attribute of ``Step`` by step."""
        return _series((step, getattr(step, name)) for step in self.run.steps)

    def metric(self, names: Iterable[str]) -> Series:
        """The first of ``names`` among the host's metrics that any step recorded; AReaL sets scopes before ours."""
        keys = list(dict.fromkeys(key for step in self.run.steps for key in step.metrics))
        for name in names:
            for key in keys:
                if key == name or (name.startswith("metronome/") and key.endswith(f"/{name}")):
                    return _series((step, step.metrics.get(key)) for step in self.run.steps)
        return {}

    @cached_property
    def seconds(self) -> Series:
        """Seconds of each step."""
        return self.of("seconds")

    @cached_property
    def rewards(self) -> Series:
        """Mean reward: as the step recorded it, else the mean over its rollouts."""
        found = {step: sum(values) / len(values) for step, values in self.counts.rewards.items()}
        return self._ordered(found | self.of("reward"))

    @cached_property
    def group_sizes(self) -> Series:
        """G: as recorded, else the largest number of rollouts that a prompt of the step has."""
        counted = {step: float(max(map(len, groups.values()))) for step, groups in self.counts.lengths.items()}
        return self._ordered(counted | self.metric(SIZE) | self.of("group_size"))

    @cached_property
    def straggler_rate(self) -> Series:
        """Share of the step's groups whose longest response is more than ``TAU`` times their median one."""
        result = {}
        for step, groups in self.counts.lengths.items():
            events = [straggler_ratio(lengths) > TAU for lengths in groups.values() if len(lengths) > 1]
            if events:
                result[step] = sum(events) / len(events)
        return self._ordered(result)

    @cached_property
    def trainer_idle(self) -> Series:
        """Share of each step in which the trainer had nothing to do: recorded waiting, else what its lane leaves."""
        waiting = self.of("waiting")
        if waiting:
            return {step: waiting[step] / all_ for step, all_ in self.seconds.items() if step in waiting and all_ > 0}
        return {} if self.lanes is None else self.lanes.trainer_idle

    @cached_property
    def trainer_idle_share(self) -> float | None:
        """The trainer's idle seconds over the steps' seconds."""
        return self._share(self.trainer_idle)

    @cached_property
    def worker_idle_share(self) -> float | None:
        """Idle seconds over the steps' seconds, the mean over workers."""
        return None if self.lanes is None else self._share(self.lanes.worker_idle)

    def _share(self, by_step: Series) -> float | None:
        whole = sum(self.seconds[step] for step in by_step)
        return sum(share * self.seconds[step] for step, share in by_step.items()) / whole if whole > 0 else None

    @cached_property
    def mean_staleness(self) -> float | None:
        """Versions between sampling and training: mean over rollouts, else over the steps' own metric."""
        histogram = self.counts.staleness
        if histogram:
            return sum(value * number for value, number in histogram.items()) / histogram.total()
        recorded = self.metric(STALENESS)
        return sum(recorded.values()) / len(recorded) if recorded else None

    @cached_property
    def sharing(self) -> Series:
        """Tokens that separate rows would have had, over tokens that went through the model; both recorded."""
        computed, separate = self.metric(COMPUTED), self.metric(SEPARATE)
        return {step: separate[step] / value for step, value in computed.items() if value > 0 and step in separate}

    @cached_property
    def sharing_whole(self) -> float | None:
        """``sharing`` of the whole run."""
        computed, separate = self.metric(COMPUTED), self.metric(SEPARATE)
        below = sum(computed[step] for step in self.sharing)
        return sum(separate[step] for step in self.sharing) / below if below > 0 else None

    @cached_property
    def total_rollouts(self) -> int | None:
        """Rollouts of the run; None if none is recorded."""
        return sum(self.counts.rollouts.values()) or None

    @cached_property
    def total_response_tokens(self) -> int | None:
        """Response tokens of the run; None if no rollout is recorded."""
        return sum(self.counts.response_tokens.values()) if self.total_rollouts else None

    @cached_property
    def total_seconds(self) -> float:
        """Seconds of all steps."""
        return sum(self.seconds.values())

    @cached_property
    def fingerprints(self) -> dict[int, str]:
        """Step -> fingerprint of the weights that it published."""
        return {step.number: step.fingerprint for step in self.run.steps if step.fingerprint is not None}

    @cached_property
    def weights_changed(self) -> dict[int, bool]:
        """Step -> whether its weights differ from those published before, by fingerprint or the host's own word."""
        marks = list(self.fingerprints.items())
        if marks:
            return {step: mark != before for (_, before), (step, mark) in pairwise(marks)}
        return {step: value != 0 for step, value in self.metric(CHANGED).items()}

    def _ordered(self, values: Mapping[int, float]) -> Series:
        return {step.number: values[step.number] for step in self.run.steps if step.number in values}


def _series(pairs: Iterable[tuple[Step, float | None]]) -> Series:
    """Step -> finite value; what isn't there or isn't finite is left out."""
    return {step.number: float(value) for step, value in pairs if value is not None and math.isfinite(value)}


def measure(runs: Iterable[RunRecord]) -> list[Measured]:
    """The runs with labels that tell them apart: a name that stands twice gets its number."""
    named = list(runs)
    often = Counter(run.name for run in named)
    seen: Counter[str] = Counter()
    result = []
    for run in named:
        seen[run.name] += 1
        result.append(Measured(run, f"{run.name} ({seen[run.name]})" if often[run.name] > 1 else run.name))
    return result
