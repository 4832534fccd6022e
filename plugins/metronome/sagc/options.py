"""Options of ``sagc``, and what a group size is worth."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, field_validator, model_validator

from metronome.sagc.budget import Budget
from metronome.settings import Options

Utility = Literal["log2", "dapo"]

# The estimate of a success rate is kept this far from 0 and 1, where the DAPO utility is -infinity.
_RATE_GUARD = 1e-6


class SagcOptions(Options):
    """Options of ``sagc``; no value of the paper is public, so every default is ours (docs/techniques/sagc.md).

    Attributes:
        sizes: the group sizes to choose from, sorted, each at least 2.
        start: the first G; None takes the largest.
        event: ``mean_ratio`` (mean over groups of max/median length) or ``step_idle`` (idle fraction) [ours].
        tau: threshold of ``mean_ratio``.
        idle_tau: threshold of ``step_idle``.
        delta: the straggler rate to stay under.
        eta: step of the dual variable lambda.
        lambda_start, lambda_max: where lambda starts, and its cap.
        gamma: forgetting factor of the posteriors (and of the success rate); 1 never forgets.
        prior: (a0, b0) of the Beta prior of every size.
        neighbours: how many places in ``sizes`` one move may span.
        utility: ``log2`` or ``dapo`` [ours], which discounts groups whose rewards are all alike.
        success_above: a reward above this counts as success in the ``dapo`` utility.
        min_dwell: steps at one size before the next move; 1 allows a move at every step.
        budget: ``fixed_rollouts`` or ``fixed_prompts`` (``sagc.budget.prompts``).
        infeasible_after: steps at lambda's cap after which ``delta`` counts as out of reach.
    """

    sizes: tuple[int, ...] = (4, 8, 16)
    start: int | None = None
    event: Literal["mean_ratio", "step_idle"] = "mean_ratio"
    tau: float = Field(default=2.0, gt=1, allow_inf_nan=False)
    idle_tau: float = Field(default=0.5, gt=0, lt=1)
    delta: float = Field(default=0.3, gt=0, lt=1)
    eta: float = Field(default=0.1, gt=0, allow_inf_nan=False)
    lambda_start: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    lambda_max: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    gamma: float = Field(default=0.95, gt=0, le=1)
    prior: tuple[float, float] = (1.0, 1.0)
    neighbours: int = Field(default=1, ge=1)
    utility: Utility = "log2"
    success_above: float = Field(default=0.0, allow_inf_nan=False)
    min_dwell: int = Field(default=5, ge=1)
    budget: Budget = "fixed_rollouts"
    infeasible_after: int = Field(default=20, ge=1)

    @field_validator("sizes")
    @classmethod
    def _sizes(cls, sizes: tuple[int, ...]) -> tuple[int, ...]:
        if any(size < 2 for size in sizes):
            raise ValueError("sizes of 2 or more, since a group-relative advantage needs at least 2 rollouts")
        if len(set(sizes)) < 2:
            raise ValueError("name at least 2 sizes, or set group_controller: fixed")
        if list(sizes) != sorted(set(sizes)):
            raise ValueError(f"sizes: {sorted(set(sizes))} (sorted, each once)")
        return sizes

    @field_validator("prior")
    @classmethod
    def _prior(cls, prior: tuple[float, float]) -> tuple[float, float]:
        if not all(0 < value < math.inf for value in prior):
            raise ValueError("prior: [1.0, 1.0] (both positive)")
        return prior

    @model_validator(mode="after")
    def _together(self) -> SagcOptions:
        if self.start is not None and self.start not in self.sizes:
            raise ValueError(f"start must be one of sizes: {list(self.sizes)} (found {self.start})")
        if self.lambda_start > self.lambda_max:
            raise ValueError(f"lambda_start must not exceed lambda_max: {self.lambda_max}")
        if self.eta >= self.lambda_max:
            raise ValueError(f"eta must be below lambda_max: {self.lambda_max}; one step would reach the cap")
        return self

    @model_validator(mode="after")
    def _have_effect(self) -> SagcOptions:
        written = self.changed()
        if "tau" in written and self.event != "mean_ratio":
            raise ValueError("tau is the threshold of mean_ratio: set idle_tau instead, or event: mean_ratio")
        if "idle_tau" in written and self.event != "step_idle":
            raise ValueError("idle_tau is the threshold of step_idle: set tau instead, or event: step_idle")
        if "success_above" in written and self.utility != "dapo":
            raise ValueError("success_above decides in the dapo utility: remove it, or set utility: dapo")
        return self


def utility(kind: Utility, size: int, success_rate: float = 0.5) -> float:
    """What a group of G rollouts is worth, in bits.

    ``log2``: log2 G [paper]. ``dapo``: log2 G + log2(1 - p^G - (1-p)^G) [ours], the second term being the
    chance that a group has both successes and failures and so isn't filtered; p is kept off 0 and 1.
    """
    if kind == "log2":
        return math.log2(size)
    p = min(1 - _RATE_GUARD, max(_RATE_GUARD, success_rate))
    return math.log2(size) + math.log2(1 - p**size - (1 - p) ** size)
