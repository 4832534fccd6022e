"""What a group's passes cost whatever its tokens: recorded seconds of single groups against the tokens fed for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from metronome.advise.lengths import StepGroups
from metronome.observe.records import RunRecord

LEAST = 8
"""Groups from which on a line is fitted."""

_WARM = 3  # of more steps than these the first is left out: it may have warmed something up
_NORMAL = 1.645  # of a 90 % interval


@dataclass(frozen=True, slots=True)
class GroupCost:
    """``fixed + per_token * tokens`` seconds of a group's passes (ours).

    Attributes:
        fixed, per_token: both 0 or more.
        low, high: 90 % interval of ``fixed``, within 0 and ``seconds``; as wide as groups that are alike leave it.
        seconds, tokens: means over the groups.
        error: root mean square of the residuals, over ``seconds``.
        groups: that were fitted.
    """

    fixed: float
    per_token: float
    low: float
    high: float
    seconds: float
    tokens: float
    error: float
    groups: int

    def at(self, fixed: float) -> GroupCost:
        """The line through the same mean with another ``fixed``."""
        return replace(self, fixed=fixed, per_token=max(0.0, self.seconds - fixed) / self.tokens)


def fit(tokens: Sequence[float], seconds: Sequence[float]) -> GroupCost | None:
    """The least squares line with ``fixed`` and ``per_token`` of 0 or more; None where the groups don't tell.

    They don't if there are fewer than ``LEAST``, if all have the same tokens, or if the interval leaves everything
    open between no fixed seconds and nothing but fixed seconds. The interval is Student's, of the line without the
    bounds: ``fixed +- t se``, ``t = z + z (z^2 + 1) / (4 (n - 2))``.
    """
    x, y = np.asarray(tokens, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    count = len(x)
    if count < LEAST or float(np.ptp(x)) == 0.0:
        return None
    mean_x, mean_y = float(x.mean()), float(y.mean())
    spread = float(np.sum((x - mean_x) ** 2))
    slope = float(np.sum((x - mean_x) * (y - mean_y))) / spread
    free = mean_y - slope * mean_x
    variance = float(np.sum((y - free - slope * x) ** 2)) / (count - 2)
    student = _NORMAL + _NORMAL * (_NORMAL**2 + 1.0) / (4.0 * (count - 2))
    margin = student * math.sqrt(variance * (1.0 / count + mean_x**2 / spread))
    if slope < 0.0:
        fixed, slope = mean_y, 0.0
    elif free < 0.0:
        fixed, slope = 0.0, float(np.sum(x * y) / np.sum(x * x))
    else:
        fixed = free
    low, high = (min(mean_y, max(0.0, one)) for one in (free - margin, free + margin))
    if low == 0.0 and high == mean_y:
        return None
    error = math.sqrt(float(np.mean((y - fixed - slope * x) ** 2))) / mean_y
    return GroupCost(fixed, slope, low, high, mean_y, mean_x, error, count)


def group_cost(
    run: RunRecord, steps: Sequence[StepGroups], *, shared: bool, padded: bool | None
) -> tuple[GroupCost | None, str]:
    """The cost of ``run``'s groups, or None and why it isn't known.

    Args:
        shared: whether prompts were shared.
        padded: of separate rows (``padding``); None: the recorded tokens are neither.
    """
    if any(group_seconds(run, one) is None for one in steps):
        return None, "no group's own seconds are recorded"
    if padded is None or not _prompts_known(steps):
        return None, "no group's own tokens are recorded"
    used = steps[1:] if len(steps) > _WARM else steps
    tokens = [float(one) for step in used for one in step.fed(shared=shared, padded=padded)]
    seconds = [one for step in used for one in group_seconds(run, step) or ()]
    if len(tokens) < LEAST:
        return None, f"seconds of {len(tokens)} groups are too few for more"
    found = fit(tokens, seconds)
    return found, "" if found else "the recorded groups are too alike in tokens, or too uneven in time, for more"


def group_seconds(run: RunRecord, one: StepGroups) -> list[float] | None:
    """``[groups]`` seconds of the trainer's spans; None where there isn't one a group."""
    spans = [span for span in run.spans if span.lane == "trainer" and span.kind == "train"]
    spans = [span for span in spans if span.step == one.step.number]
    if not one.rollouts or len(spans) != len(one.groups):
        return None
    order = dict.fromkeys(response.prompt for response in run.rollouts if response.step == one.step.number)
    seconds = {prompt: span.end - span.start for prompt, span in zip(order, spans, strict=True)}
    return [seconds[group[0].prompt] for group in one.rollouts]


def padding(steps: Sequence[StepGroups], *, shared: bool) -> bool | None:
    """Whether separate rows were padded to their group's longest, by the tokens that each step was fed.

    None: these are neither the rows' tokens nor the padded ones. A pass for a proximal policy feeds them once more.
    """
    for padded in (False, True):
        if all(_fed(one, sum(one.fed(shared=shared, padded=padded))) for one in steps):
            return padded
    return None


def _fed(one: StepGroups, tokens: int) -> bool:
    fed = one.step.fed_tokens
    return fed is None or fed in (tokens, 2 * tokens if one.step.proximal else tokens)


def _prompts_known(steps: Sequence[StepGroups]) -> bool:
    """Whether each prompt's length is recorded, or all are alike: a mean would blur the groups' tokens."""
    if all(response.prompt_tokens is not None for one in steps for group in one.rollouts for response in group):
        return True
    means = {one.step.prompt_tokens for one in steps}
    mean = next(iter(means))
    return len(means) == 1 and mean is not None and mean == round(mean)
