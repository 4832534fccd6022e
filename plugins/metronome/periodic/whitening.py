"""Batch-whitened advantages under streaming, by two gradient accumulators (docs/techniques/periodic.md (b), ours).

Where the policy ratio is one, the gradient is linear in the advantages, so mean mu and deviation sigma of the
batch may be applied after the last arrival:

    grad sum w_t ((A_t - mu) / sigma) r_t  =  (grad sum w_t A_t r_t  -  mu * grad sum w_t r_t) / sigma

Any other ratio, or clipping, makes it wrong (22 % as we measured): rollout sources refuse it. The price is a
second backward pass per micro-batch, and a third accumulator for terms without advantages (KL, entropy).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from metronome.errors import MetronomeError

Kind = Literal["advantage", "unit", "other"]


@dataclass(frozen=True)
class BatchMoments:
    """Sum, sum of squares and count of advantages over trained tokens; they add over any split."""

    total: float = 0.0
    squares: float = 0.0
    count: int = 0

    @classmethod
    def of(cls, advantages: Iterable[float], lengths: Iterable[int]) -> BatchMoments:
        """The moments of rows whose trained tokens share one advantage each.

        Args:
            advantages: ``[rows]`` advantage of each row.
            lengths: ``[rows]`` trained tokens of each row.
        """
        rows = list(zip(advantages, lengths, strict=True))
        return cls(
            total=math.fsum(value * length for value, length in rows),
            squares=math.fsum(value * value * length for value, length in rows),
            count=sum(length for _, length in rows),
        )

    def __add__(self, other: BatchMoments) -> BatchMoments:
        return BatchMoments(self.total + other.total, self.squares + other.squares, self.count + other.count)

    @property
    def mean(self) -> float:
        """total / count; 0.0 without tokens."""
        return self.total / self.count if self.count else 0.0

    def std(self, eps: float = 1e-8) -> float:
        """Biased deviation plus ``eps``: sqrt(squares / count - mean^2) + eps."""
        if not self.count:
            return eps
        return math.sqrt(max(0.0, self.squares / self.count - self.mean**2)) + eps


class Parameter(Protocol):
    """What of a parameter is used: its gradient, which is moved away and written back."""

    grad: Any


class TwoAccumulators:
    """Moves gradients into accumulators after each backward and combines them once.

    After each of the backward passes of a micro-batch call ``take`` with what it differentiated:

        ``advantage``  sum w_t A_t r_t, with the raw advantages
        ``unit``       sum w_t r_t, with every advantage one
        ``other``      terms without advantages, such as KL and entropy; may be left out

    ``combine`` then writes ``grad = factor * ((g_advantage - mean * g_unit) / std + g_other)``. The signs are
    the loss's own: take the three from the loss as it is minimised. Works on anything with ``grad`` whose
    value has ``add_`` and ``mul_``.

    Args:
        params: the trained parameters.
    """

    def __init__(self, params: Iterable[Parameter]) -> None:
        self._params: Sequence[Parameter] = list(params)
        self._clear()

    def take(self, kind: Kind) -> None:
        """Adds every parameter's gradient to the accumulator of ``kind`` and clears it.

        Raises MetronomeError for an unknown kind.
        """
        if kind not in self._sums:
            raise MetronomeError("unknown gradient accumulator", found=kind, remedy=f"one of {', '.join(self._sums)}")
        self._taken[kind] += 1
        sums = self._sums[kind]
        for place, param in enumerate(self._params):
            if param.grad is None:
                continue
            if sums[place] is None:
                sums[place] = param.grad  # moved, not copied: the next backward makes a new one
            else:
                sums[place].add_(param.grad)
            param.grad = None

    def combine(self, mean: float, std: float, factor: float = 1.0) -> None:
        """Writes ``factor * ((g_advantage - mean * g_unit) / std + g_other)`` as the gradient; starts anew.

        Args:
            mean: mean of the advantages over the batch's trained tokens.
            std: their deviation (> 0).
            factor: ``StreamingNormalizer.final_factor``.

        Raises MetronomeError if ``std`` isn't positive or a micro-batch lacks one of its two backward passes.
        """
        if not std > 0.0:
            raise MetronomeError("advantages can't be whitened by this deviation", found=std, remedy="eps above 0")
        if self._taken["advantage"] != self._taken["unit"]:
            raise MetronomeError(
                "each micro-batch needs one backward with its advantages and one with ones",
                found=dict(self._taken),
                remedy='call take("advantage") and take("unit") once each per micro-batch',
            )
        for place, param in enumerate(self._params):
            advantage, unit, other = (self._sums[kind][place] for kind in ("advantage", "unit", "other"))
            if unit is not None:
                unit.mul_(-mean)
                advantage = unit if advantage is None else advantage.add_(unit)
            if advantage is not None:
                advantage.mul_(factor / std)
            if other is not None:
                other.mul_(factor)
                advantage = other if advantage is None else advantage.add_(other)
            param.grad = advantage
        self._clear()

    def _clear(self) -> None:
        kinds: tuple[Kind, ...] = ("advantage", "unit", "other")
        self._sums: dict[str, list[Any]] = {kind: [None] * len(self._params) for kind in kinds}
        self._taken: dict[str, int] = dict.fromkeys(kinds, 0)
