"""The seeded length model of SAGC's rows, and the shipped controller on it.

No value of the paper is public for tau, delta, eta, lambda, gamma or the prior, so none of these rows is a
reproduction of its runs: they show what the shipped controller does where lengths are lognormal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metronome.contracts import GroupStats, StepStats
from metronome.sagc import controller, events, options

MODEL = "Lengths lognormal (sigma 0.5), 8 prompts a step, tau 2: ours."
CALIBRATED = "CALIBRATED: delta isn't public and was chosen so that this model shows the paper's rate."

SIZES = (4, 8, 16)
SIGMA, PROMPTS, STEPS = 0.5, 8, 4000

Lengths = NDArray[np.int64]


def lengths(size: int, steps: int = STEPS) -> Lengths:
    """Response lengths in tokens ``[steps, PROMPTS, size]``, seeded by the size."""
    normal = np.random.default_rng(100 + size).standard_normal((steps, PROMPTS, size))
    drawn: Lengths = np.rint(1000 * np.exp(SIGMA * normal)).astype(np.int64)
    return drawn


def groups(of_step: Lengths) -> list[GroupStats]:
    """One step's groups ``[PROMPTS, size]`` as a host reports them."""
    size = of_step.shape[-1]
    nothing = [False] * size, [0.0] * size
    return [GroupStats(size, own, *nothing, 0.0, 1.0) for own in of_step.tolist()]


@dataclass(frozen=True)
class Run:
    """What a controller did, per step: its event, the size that generated it, and its switches."""

    events: NDArray[np.float64]
    sizes: NDArray[np.float64]
    switched: NDArray[np.float64]
    infeasible: NDArray[np.float64]

    @property
    def rate(self) -> float:
        """Share of the steps with stragglers."""
        return float(self.events.mean())

    def share(self, size: int) -> float:
        """Share of the steps at this size."""
        return float((self.sizes == size).mean())


def control(of: Mapping[int, Lengths] | None = None, **chosen: Any) -> Run:
    """The shipped controller on the length model, its defaults but for ``chosen``."""
    of = {size: lengths(size) for size in SIZES} if of is None else of
    chooser = controller.SagcController(options.SagcOptions(sizes=SIZES, **chosen), seed=0)
    rows = []
    for step in range(len(of[SIZES[0]])):
        size = chooser.size()
        seen = chooser.observe(StepStats(step, groups(of[size][step])))
        rows.append((seen["straggler_rate"], size, seen["switched"], seen["infeasible"]))
    return Run(*np.array(rows).T)


def fixed_rate(size: int) -> float:
    """How often a step of a fixed size straggles."""
    steps = lengths(size)
    return float(np.mean([events.ratio_event(groups(one), 2.0).straggles for one in steps]))
