"""Who was busy when: the lanes of a run's timeline and the idle stretches in them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metronome.observe.records import Rollout, RunRecord, Span

Times = NDArray[np.float64]
TRAINER = "trainer"
UNNAMED = "rollouts, worker not recorded"
REST = "rest"
"""Kind of the time that no recorded part names, where only the parts' lengths were recorded (``RunRecord.laid``)."""


@dataclass(frozen=True)
class Stretches:
    """Stretches of time that don't touch one another, in their order; seconds from the run's start."""

    starts: Times
    ends: Times

    def covered(self, moments: Times) -> Times:
        """Seconds of the stretches before each of ``moments``."""
        if not len(self.starts):
            return np.zeros_like(moments)
        edges = np.stack([self.starts, self.ends], axis=1).ravel()
        lengths = self.ends - self.starts
        before = np.stack([np.cumsum(lengths) - lengths, np.cumsum(lengths)], axis=1).ravel()
        return np.interp(moments, edges, before)

    def within(self, windows: Stretches) -> Times:
        """Seconds of the stretches inside each window."""
        return self.covered(windows.ends) - self.covered(windows.starts)

    def complement(self, windows: Stretches) -> Stretches:
        """What the stretches leave of the windows."""
        starts: list[Times] = []
        ends: list[Times] = []
        for begin, end in zip(windows.starts, windows.ends, strict=True):
            first, last = np.searchsorted(self.ends, begin, "right"), np.searchsorted(self.starts, end, "left")
            left = np.concatenate([[begin], self.ends[first:last]])
            right = np.concatenate([self.starts[first:last], [end]])
            open_ = right > left
            starts.append(left[open_])
            ends.append(right[open_])
        return Stretches(np.concatenate(starts or [np.zeros(0)]), np.concatenate(ends or [np.zeros(0)]))


def union(starts: Any, ends: Any, gap: float = 0.0) -> Stretches:
    """The union of stretches that may overlap; those at most ``gap`` seconds apart become one."""
    begin, end = np.asarray(starts, dtype=np.float64), np.asarray(ends, dtype=np.float64)
    if not len(begin):
        return Stretches(begin, end)
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], np.maximum.accumulate(end[order])
    breaks = begin[1:] > end[:-1] + gap
    return Stretches(begin[np.concatenate([[True], breaks])], end[np.concatenate([breaks, [True]])])


@dataclass(frozen=True)
class Lane:
    """A worker or the trainer.

    Attributes:
        name: as the host wrote it.
        kinds: what it did (Span.kind, or ``REST``) -> when.
        busy: the union of all kinds.
        idle: stretches within the run's steps in which it did nothing.
        idle_share: seconds of ``idle`` over the seconds of the steps.
        in_flight: rollouts that it generated at once, the mean over the time in which it generated any; None
            where single rollouts have no times.
    """

    name: str
    kinds: dict[str, Stretches]
    busy: Stretches
    idle: Stretches
    idle_share: float
    in_flight: float | None


@dataclass(frozen=True)
class Lanes:
    """The lanes of a run, the trainer first.

    Attributes:
        lanes: in natural order of their names.
        steps: the steps' numbers.
        windows: each step's time; windows may leave time between them (an evaluation, a resumption).
        trainer_idle, worker_idle: step -> idle share of the trainer, and the mean over workers.
    """

    lanes: tuple[Lane, ...]
    steps: tuple[int, ...]
    windows: Stretches
    trainer_idle: dict[int, float]
    worker_idle: dict[int, float]


def lanes_of(run: RunRecord) -> Lanes | None:
    """The lanes of ``run``: its spans, and for workers without a span their rollouts' times; None without any."""
    found = _busy_times(run)
    if not found:
        return None
    steps, windows = _windows(run)
    if not steps:
        return None
    whole = union(windows.starts, windows.ends, gap=1e-9 * float(windows.ends[-1]))
    seconds = windows.ends - windows.starts
    if run.laid and TRAINER in found:
        found[TRAINER][REST] = _rest(run, windows)
    lanes, trainer, workers = [], {}, []
    for name in sorted(found, key=_natural):
        kinds = {kind: union(*times) for kind, times in found[name].items()}
        of_all = list(kinds.values())
        busy = union(np.concatenate([one.starts for one in of_all]), np.concatenate([one.ends for one in of_all]))
        by_step = 1 - np.divide(busy.within(windows), seconds, out=np.ones_like(seconds), where=seconds > 0)
        share = float((by_step * seconds).sum() / seconds.sum()) if seconds.sum() > 0 else 0.0
        in_flight = _in_flight(found[name].get("generate"), kinds.get("generate"))
        lanes.append(Lane(name, kinds, busy, busy.complement(whole), max(0.0, share), in_flight))
        if name == TRAINER:
            trainer = dict(zip(steps, np.clip(by_step, 0, 1).tolist(), strict=True))
        else:
            workers.append(np.clip(by_step, 0, 1))
    mean = np.mean(workers, axis=0).tolist() if workers else []
    return Lanes(tuple(lanes), steps, windows, trainer, dict(zip(steps, mean, strict=True)) if workers else {})


def _busy_times(run: RunRecord) -> dict[str, dict[str, tuple[list[float], list[float]]]]:
    """Lane -> kind -> (starts, ends), as recorded."""
    found: dict[str, dict[str, tuple[list[float], list[float]]]] = defaultdict(lambda: defaultdict(lambda: ([], [])))
    for span in run.spans:
        times = found[span.lane][span.kind]
        times[0].append(span.start)
        times[1].append(span.end)
    known = set(found)
    for one in run.rollouts:
        if one.start is None or one.end is None:
            continue
        name = UNNAMED if one.worker is None else one.worker
        if name in known or (one.worker is None and known - {TRAINER}):
            continue
        times = found[name]["generate"]
        times[0].append(one.start)
        times[1].append(one.end)
    return found


def _rest(run: RunRecord, windows: Stretches) -> tuple[list[float], list[float]]:
    """Starts and ends of the time that no span of any lane fills; what rounding leaves (a microsecond) is none."""
    named = union([span.start for span in run.spans], [span.end for span in run.spans])
    left = named.complement(windows)
    keep = left.ends - left.starts > 1e-6
    return left.starts[keep].tolist(), left.ends[keep].tolist()


def _windows(run: RunRecord) -> tuple[tuple[int, ...], Stretches]:
    """Each step's time, which lasts its seconds and follows the step before.

    It ends with the trainer's last span of the step. A run without spans of its trainer doesn't tell when a step ended:
    there it begins with the step's first dispatch, and lasts until its last arrival if its seconds are fewer. Steps
    that were laid end to end follow one another, each with all its seconds, whether a part fills them or not.
    """
    if run.laid:
        begins = [0.0]
        for step in run.steps:
            begins.append(begins[-1] + step.seconds)
        edges = np.asarray(begins, dtype=np.float64)
        return tuple(step.number for step in run.steps), Stretches(edges[:-1], edges[1:])
    of_trainer = [span for span in run.spans if span.lane == TRAINER]
    known: dict[int, tuple[float, float]] = {}
    timed: Sequence[Span | Rollout] = of_trainer or (*run.spans, *run.rollouts)
    for one in timed:
        if one.start is not None and one.end is not None:
            first, last = known.get(one.step, (one.start, one.end))
            known[one.step] = (min(first, one.start), max(last, one.end))
    steps, starts, ends = [], [], []
    free = 0.0
    for step in run.steps:
        if step.number not in known:
            continue
        first, end = known[step.number]
        if of_trainer:
            start = min(end, max(free, end - step.seconds))
        else:
            start = max(free, first)
            end = max(end, start + step.seconds)
        steps.append(step.number)
        starts.append(start)
        ends.append(end)
        free = end
    return tuple(steps), Stretches(np.asarray(starts, dtype=np.float64), np.asarray(ends, dtype=np.float64))


def _in_flight(times: tuple[list[float], list[float]] | None, generating: Stretches | None) -> float | None:
    if times is None or generating is None:
        return None
    open_ = float((generating.ends - generating.starts).sum())
    return float(np.sum(np.subtract(times[1], times[0]))) / open_ if open_ > 0 else None


def _natural(name: str) -> tuple[bool, list[tuple[bool, int, str]]]:
    """Trainer first, then worker 2 before worker 10."""
    parts = [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", name)]
    return name != TRAINER, parts
