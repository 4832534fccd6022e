"""Steps at a run's beginning that took much longer than those after them: engines and kernels that start."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from metronome.advise.lengths import StepGroups

SLOW = 2.0
"""Times the median of the steps after it above which a leading step is taken for start-up (ours)."""

_REST = 2  # steps that must follow


def without_start_up(steps: Sequence[StepGroups], measured: list[str]) -> list[StepGroups]:
    """``steps`` without leading ones whose seconds, and seconds a token, are above ``SLOW`` times the rest's median.

    Tokens are looked at since a step with twice the work may take twice as long. Appends to ``measured`` what was left
    out.
    """
    kept = list(steps)
    while len(kept) > _REST and _slow(kept):
        first, usual = kept[0].step.seconds, median(one.step.seconds for one in kept[1:])
        measured.append(
            f"recorded step {len(steps) - len(kept) + 1} took {first:.3g} s, {first / usual:.2g} times the median of "
            "those after it: start-up, left out of the model"
        )
        kept = kept[1:]
    return kept


def _slow(steps: Sequence[StepGroups]) -> bool:
    seconds = [one.step.seconds for one in steps]
    by_token = [one.step.seconds / sum(one.fed(shared=False, padded=False)) for one in steps]
    return all(values[0] > SLOW * median(values[1:]) for values in (seconds, by_token))
