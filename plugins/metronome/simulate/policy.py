"""How a cluster is run: the schedule, the group size, the rows and the proximal policy."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from metronome.contracts import GroupController, RolloutSource
from metronome.errors import ConfigurationError
from metronome.periodic.sources import Bounded, Periodic, Synchronous
from metronome.sagc.controller import SagcController
from metronome.sagc.fixed import Fixed, FixedOptions
from metronome.sagc.options import SagcOptions
from metronome.settings import Options, parse_options

SourceName = Literal["synchronous_colocated", "synchronous", "periodic", "bounded"]


class Policy(Options):
    """One way to run a cluster.

    Attributes:
        source: ``synchronous_colocated`` (all devices generate, then all train), ``synchronous`` (two sides, one of
            which waits), ``periodic`` (groups are trained as they arrive, one version) or ``bounded``.
        max_staleness: bound of ``bounded`` in versions; 2 if it isn't given.
        group_controller: ``fixed`` (the cluster's group_size) or ``sagc``.
        sagc: options of ``sagc``; sizes that aren't given follow the cluster's group_size (``fitted``). The utility
            ``dapo`` needs rewards, which aren't simulated.
        shared_prompt: the prompt of a group is trained once for all its responses.
        proximal: ``none``, ``a3po`` (costs nothing here) or ``recompute`` (a forward pass of every trained token).
    """

    source: SourceName = "periodic"
    max_staleness: int | None = Field(default=None, ge=0, strict=True)
    group_controller: Literal["fixed", "sagc"] = "fixed"
    sagc: SagcOptions = SagcOptions()
    shared_prompt: bool = False
    proximal: Literal["none", "a3po", "recompute"] = "none"

    @field_validator("sagc", mode="before")
    @classmethod
    def _starts_at_a_size(cls, sagc: Any) -> Any:
        if isinstance(sagc, dict) and sagc.get("start") is not None and "sizes" not in sagc:
            raise ValueError("sagc: give sizes beside start, as {sizes: [4, 8], start: 4}; without them they follow G")
        return sagc

    @model_validator(mode="after")
    def _have_effect(self) -> Policy:
        if self.max_staleness is not None and self.source != "bounded":
            raise ValueError("max_staleness bounds source: bounded alone; remove it")
        if self.group_controller != "sagc" and self.sagc != SagcOptions():
            raise ValueError("sagc options need group_controller: sagc")
        if self.sagc.utility == "dapo":
            raise ValueError("sagc.utility: log2 (the utility dapo needs rewards, which aren't simulated)")
        return self

    @property
    def bound(self) -> int:
        """Largest staleness that is trained, in versions."""
        if self.source != "bounded":
            return 0
        return 2 if self.max_staleness is None else self.max_staleness

    def label(self) -> str:
        """The policy in a few words, as ``bounded(2), SAGC, shared prompt, a3po``."""
        parts = [f"bounded({self.bound})" if self.source == "bounded" else self.source.replace("_", " ")]
        if self.group_controller == "sagc":
            parts.append("SAGC" if self.sagc.budget == "fixed_rollouts" else "SAGC at fixed prompts")
        parts += ["shared prompt"] * self.shared_prompt
        parts += [self.proximal] * (self.proximal != "none")
        return ", ".join(parts)

    def rollout_source(self) -> RolloutSource:
        """The shipped object that admits and releases groups."""
        if self.source == "bounded":
            return Bounded(self.bound)
        return Periodic() if self.source == "periodic" else Synchronous()

    def fitted(self, group_size: int) -> Policy:
        """The policy at this G: SAGC without ``sizes`` chooses among G, a half and a quarter of it (ours).

        So G never rises above that of the policies without SAGC, as in ``metronome advise``. Sizes start at 2; raises
        ConfigurationError where fewer than two are left.
        """
        if self.group_controller != "sagc" or "sizes" in self.sagc.model_fields_set:
            return self
        sizes = sizes_below(group_size)
        if len(sizes) < 2:
            raise ConfigurationError(
                "SAGC has no smaller group to choose",
                found=group_size,
                where="group_size",
                remedy="group_size: 4 or more, or give the policy its sizes, as sagc: {sizes: [2, 4]}",
            )
        given = self.sagc.model_dump(exclude_unset=True)
        sagc = parse_options(SagcOptions, {**given, "sizes": sizes}, f"sagc, group_size {group_size}")
        return self.model_copy(update={"sagc": sagc})

    def controller(self, group_size: int, seed: int) -> GroupController:
        """The shipped object that chooses G."""
        if self.group_controller == "sagc":
            return SagcController(self.fitted(group_size).sagc, seed)
        return Fixed(FixedOptions(size=group_size))


def sizes_below(group_size: int) -> tuple[int, ...]:
    """What SAGC chooses among where nobody says it (ours): G, a half and a quarter of it, from 2 on."""
    return tuple(sorted({size for size in (group_size // 4, group_size // 2, group_size) if size >= 2}))


def default_policies() -> tuple[Policy, ...]:
    """What is compared where a file names no policies: each technique alone, then together."""
    return (
        Policy(source="synchronous"),
        Policy(source="synchronous_colocated"),
        Policy(source="periodic"),
        Policy(source="periodic", shared_prompt=True),
        Policy(source="periodic", group_controller="sagc"),
        Policy(source="bounded", proximal="recompute"),
        Policy(source="bounded", proximal="a3po"),
        Policy(source="bounded", proximal="a3po", shared_prompt=True, group_controller="sagc"),
    )
