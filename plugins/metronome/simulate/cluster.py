"""The keys of a cluster's YAML file."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, field_validator, model_validator

from metronome.settings import Options
from metronome.simulate.policy import Policy, default_policies

# Strict, so that true isn't taken for 1. The limits lie far outside any cluster and keep every time a number.
Positive = Annotated[float, Field(gt=0, ge=1e-30, le=1e30, allow_inf_nan=False, strict=True)]
Seconds = Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False, strict=True)]
Share = Annotated[float, Field(ge=0, le=1, strict=True)]
Count = Annotated[int, Field(ge=1, le=1_000_000, strict=True)]

# Rollouts that may be under way or queued at a time: what a simulation of minutes and a few gigabytes can hold.
_ROLLOUTS = 10_000_000


class LawCurve(Options):
    """Decoding slows down with the sequences that run beside: ``tokens_per_second / (1 + running / half)`` (ours).

    Attributes:
        tokens_per_second: tokens a second of one sequence, in the limit of an empty engine.
        half: number of running sequences at which a sequence decodes half as fast.
    """

    kind: Literal["law"] = "law"
    tokens_per_second: Positive
    half: Positive

    def rate(self, running: int) -> float:
        """Tokens a second of each of ``running`` sequences."""
        return self.tokens_per_second / (1.0 + running / self.half)


class PointCurve(Options):
    """Decoding speed by points, straight lines between them.

    Attributes:
        points: ``[running, tokens a second of each sequence]`` pairs with ``running`` rising. Below the first point
            its speed holds; the last must lie at the engine's slots or beyond. One point alone is a constant speed.
    """

    kind: Literal["points"]
    points: tuple[tuple[Positive, Positive], ...]

    @field_validator("points")
    @classmethod
    def _rising(cls, points: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
        if not points or any(left[0] >= right[0] for left, right in pairwise(points)):
            raise ValueError("points: [[1, 60], [64, 20]] (at least one, the numbers of sequences rising)")
        return points

    def rate(self, running: int) -> float:
        """Tokens a second of each of ``running`` sequences."""
        if running <= self.points[0][0] or len(self.points) == 1:
            return self.points[0][1]
        for (left, fast), (right, slow) in pairwise(self.points):
            if running <= right:
                return fast + (slow - fast) * (running - left) / (right - left)
        return self.points[-1][1]


class Engines(Options):
    """The rollout side.

    Attributes:
        count: engines.
        devices: devices of one engine.
        slots: rollouts that an engine runs at a time (continuous batching).
        decode: decoding speed against running sequences; ``kind: law`` or ``kind: points``.
        prefill_seconds_per_token: seconds of an engine for one prompt token. An engine takes prompts one after the
            other while the others decode.
        prefix_cache: the first of a group's members on an engine reads the prompt, and the others cost nothing; new
            weights and failures empty the cache. False: every member reads it.
        prefill_stops_decoding: nothing decodes on an engine that reads a prompt.
    """

    count: Count
    devices: Count = 1
    slots: Count
    decode: Annotated[LawCurve | PointCurve, Field(discriminator="kind")]
    prefill_seconds_per_token: Seconds = 0.0
    prefix_cache: StrictBool = False
    prefill_stops_decoding: StrictBool = False

    @model_validator(mode="after")
    def _curve_reaches_the_slots(self) -> Engines:
        points = self.decode.points if isinstance(self.decode, PointCurve) else ()
        if len(points) > 1 and points[-1][0] < self.slots:
            raise ValueError(f"the last of decode.points must lie at {self.slots} sequences (slots) or beyond")
        return self


class Trainer(Options):
    """The training side: ranks that share every group evenly, so groups are trained one after the other.

    Attributes:
        ranks: data-parallel ranks.
        devices: devices of one rank.
        seconds_per_token: seconds of one rank, forward and backward, for one token of a separate row. It holds the
            attention too: that it grows with a row's length is left out, but for ``attention_share``.
        seconds_per_group: seconds of one group's forward and backward passes whatever its tokens (ours). Ranks don't
            divide them: each of them makes the passes for its part of the group.
        padded: a group's separate rows are as long as its longest, and what is padded costs like any token. A shared
            prompt's row isn't padded.
        efficiency: of each rank beyond the first: n ranks are ``1 + (n - 1) * efficiency`` times as fast as one (ours).
        forward_share: seconds of a forward pass over those of forward and backward; a recomputed proximal policy
            costs it.
        attention_share: part of ``seconds_per_token`` spent on attention between tokens, 0..1; it shrinks by the
            attention ratio under shared prompts, the rest by the token ratio.
        optimizer_seconds: clip and optimiser step, once a step.
    """

    ranks: Count
    devices: Count = 1
    seconds_per_token: Positive
    seconds_per_group: Seconds = 0.0
    padded: StrictBool = False
    efficiency: float = Field(default=1.0, gt=0, le=1, strict=True)
    forward_share: Share = 1 / 3
    attention_share: Share = 0.0
    optimizer_seconds: Seconds = 0.0

    def speed(self, ranks: int | None = None) -> float:
        """How many times as fast as one rank ``ranks`` of them are (all by default)."""
        return 1.0 + ((self.ranks if ranks is None else ranks) - 1) * self.efficiency


class LognormalLengths(Options):
    """Response lengths ``median * exp(sigma z)``, z normal, rounded to tokens, at least 1.

    Attributes:
        median: tokens.
        sigma: standard deviation of the logarithm within a prompt.
        prompt_sigma: standard deviation of the logarithm of the prompts' own medians; 0: all prompts alike.
        cap: the length limit in tokens.
        growth: factor by which the median grows with each step; 1: no drift.
    """

    kind: Literal["lognormal"] = "lognormal"
    median: Positive
    sigma: float = Field(ge=0, allow_inf_nan=False, strict=True)
    prompt_sigma: float = Field(default=0.0, ge=0, allow_inf_nan=False, strict=True)
    cap: Count
    growth: Positive = 1.0


class EmpiricalLengths(Options):
    """Response lengths drawn with replacement from a file.

    Attributes:
        file: numbers of tokens, separated by white space or commas; a relative path starts at the YAML file's folder.
        cap: the length limit in tokens; None: the file's largest.
        growth: factor by which the lengths grow with each step; 1: no drift.
    """

    kind: Literal["empirical"]
    file: str
    cap: Count | None = None
    growth: Positive = 1.0


class Failures(Options):
    """Engines that fail; their running rollouts begin again on any engine, and nothing is lost.

    Attributes:
        mean_seconds_between: mean seconds between two failures of one engine, exponentially distributed.
        seconds_to_return: seconds until it takes rollouts again.
    """

    mean_seconds_between: Positive
    seconds_to_return: Seconds = 60.0


class Cluster(Options):
    """A cluster, its work, and the policies to compare.

    Attributes:
        description: one sentence, printed.
        engines, trainer: the two sides; together they are the cluster's devices.
        lengths: response lengths: ``kind: lognormal`` or ``kind: empirical``.
        prompts_per_step: prompt groups that one optimiser step trains.
        group_size: G, rollouts of a prompt; with SAGC, prompts_per_step * group_size is the budget of rollouts.
        prompt_tokens: tokens of a prompt.
        publication_seconds: to bring new weights to all engines; both sides stand still meanwhile.
        resharding_seconds: of one switch between generation and training on the same devices (colocated runs; two
            switches a step; publication costs nothing there).
        queue_depth: finished groups that may wait for the trainer; engines begin no rollout while it is full.
            None: no limit. Synchronous runs keep the whole batch whatever it is.
        failures: None: engines don't fail.
        seed: of lengths, failures and SAGC.
        steps: optimiser steps to simulate.
        policies: what to compare; ratios are against the first. Without any, each technique alone and together (SAGC
            where group_size is 4 or more).
    """

    description: str = ""
    engines: Engines
    trainer: Trainer
    lengths: Annotated[LognormalLengths | EmpiricalLengths, Field(discriminator="kind")]
    prompts_per_step: Count
    group_size: int = Field(ge=2, strict=True)
    prompt_tokens: Count
    publication_seconds: Seconds = 0.0
    resharding_seconds: Seconds = 0.0
    queue_depth: Count | None = None
    failures: Failures | None = None
    seed: int = Field(default=0, ge=0, strict=True)
    steps: Count = 10
    policies: tuple[Policy, ...] = Field(default_factory=default_policies)

    @field_validator("policies")
    @classmethod
    def _some(cls, policies: tuple[Policy, ...]) -> tuple[Policy, ...]:
        if not policies:
            raise ValueError("policies: [{source: synchronous}, {source: periodic}] (at least one)")
        return policies

    @model_validator(mode="before")
    @classmethod
    def _choose(cls, values: Any) -> Any:
        """Without policies: the usual ones, of which a G without a half leaves out SAGC."""
        if not isinstance(values, dict) or "policies" in values or values.get("group_size") not in (2, 3):
            return values
        return {**values, "policies": tuple(one for one in default_policies() if one.group_controller != "sagc")}

    @model_validator(mode="after")
    def _fits_in_memory(self) -> Cluster:
        for policy in (one.fitted(self.group_size) for one in self.policies):
            largest = max(policy.sagc.sizes) if policy.group_controller == "sagc" else 0
            rollouts = max(self.prompts_per_step * self.group_size, largest) * (policy.bound + 1)
            if rollouts > _ROLLOUTS:
                raise ValueError(
                    f"prompts_per_step * group_size * (max_staleness + 1): {_ROLLOUTS:,} rollouts or fewer, "
                    f"{policy.label()} has {rollouts:,}"
                )
        return self

    def devices(self) -> int:
        """Devices of both sides."""
        return self.engines.count * self.engines.devices + self.trainer.ranks * self.trainer.devices

    def with_split(self, engines: int, ranks: int) -> Cluster:
        """The same cluster with other numbers of engines and trainer ranks."""
        return self.model_copy(
            update={
                "engines": self.engines.model_copy(update={"count": engines}),
                "trainer": self.trainer.model_copy(update={"ranks": ranks}),
            }
        )
