"""What one step's response lengths say about stragglers; pure functions of host numbers, no torch.

Conventions [ours], since the paper's abstract leaves them open (docs/techniques/sagc.md):

- the median of an even number of lengths is the mean of the two middle ones (torch.median takes the lower);
- lengths below one token count as one token, so an empty response never divides by zero and a group of
  empty responses has ratio 1;
- responses cut at the length cap tie with one another: a group that is cut as a whole has ratio 1,
  "no straggler". ``truncation_rate`` is logged beside the ratio because of that;
- a group without a single response says nothing and is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from metronome.contracts import GroupStats
from metronome.errors import ConfigurationError


@dataclass(frozen=True)
class Event:
    """A measured value beside its threshold; S = 1{value > threshold}.

    Attributes:
        label: what was measured, in words.
        value: the measurement (a ratio, or a fraction of time).
        threshold: what it is compared with.
    """

    label: str
    value: float
    threshold: float

    @property
    def straggles(self) -> bool:
        """Whether the value exceeds the threshold (strictly)."""
        return self.value > self.threshold

    def __str__(self) -> str:
        sign = ">" if self.straggles else "<="
        return f"{self.label} {self.value:.2f} {sign} {self.threshold:.2f}"


def straggler_ratio(lengths: Sequence[int]) -> float:
    """Longest over median response of one group: ``max(1, max) / max(1, median)``, at least 1.

    Args:
        lengths: tokens, one per rollout, at least one of them.
    """
    ordered = sorted(int(length) for length in lengths)
    half = len(ordered) // 2
    median = ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
    return max(1, ordered[-1]) / max(1.0, median)


def with_responses(groups: Iterable[GroupStats]) -> list[GroupStats]:
    """The groups that have at least one response, in their order."""
    return [group for group in groups if len(group.lengths)]


def ratio_event(groups: Sequence[GroupStats], tau: float) -> Event:
    """``mean over groups of max/median > tau`` [ours: the paper doesn't say how a step is aggregated].

    Args:
        groups: at least one, each with responses.
        tau: threshold, a ratio.
    """
    ratios = [straggler_ratio(group.lengths) for group in groups]
    return Event("straggler ratio", sum(ratios) / len(ratios), tau)


def idle_event(groups: Sequence[GroupStats], idle_tau: float, bubble: float | None = None) -> Event:
    """``idle fraction of the step > idle_tau`` [ours, beyond the paper].

    The fraction is the measured ``bubble`` where there is one, else ``1 - mean / max`` over all response
    lengths of the step (0 if all are empty): the share of a slot's time that waits for the longest response.

    Args:
        groups: at least one, each with responses.
        idle_tau: threshold, a fraction.
        bubble: the trainer's measured idle fraction, 0..1 (clock jitter beyond is clipped).

    Raises ConfigurationError for a bubble that isn't a finite number.
    """
    if bubble is not None:
        if not math.isfinite(bubble):
            raise ConfigurationError(
                "a measured bubble must be a finite fraction",
                found=bubble,
                where="StepStats.bubble",
                remedy="report idle seconds over step seconds, or None where it isn't measured",
            )
        return Event("measured bubble", min(1.0, max(0.0, bubble)), idle_tau)
    lengths = [int(length) for group in groups for length in group.lengths]
    longest = max(lengths)
    idle = 1 - sum(lengths) / len(lengths) / longest if longest > 0 else 0.0
    return Event("idle fraction", idle, idle_tau)


def truncation_rate(groups: Sequence[GroupStats]) -> float:
    """Share of the responses that hit the length cap, 0..1; 0 if nothing is reported."""
    flags = [bool(cut) for group in groups for cut in group.truncated]
    return sum(flags) / len(flags) if flags else 0.0


def successes(groups: Sequence[GroupStats], above: float) -> tuple[int, int]:
    """(rollouts with a reward above ``above``, rollouts), over generated groups, kept or filtered."""
    rewards = [float(reward) for group in groups for reward in group.rewards]
    return sum(reward > above for reward in rewards), len(rewards)
