"""The hooks of periodic asynchrony: rollout sources ``synchronous``, ``periodic`` and ``bounded``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import field_validator, model_validator

from metronome.contracts import Offer, RolloutSource
from metronome.hookspecs import hookimpl
from metronome.periodic.sources import Bounded, Periodic, Synchronous
from metronome.settings import Options, parse_options


class SynchronousOptions(Options):
    """``synchronous`` has no options."""


class PeriodicOptions(Options):
    """Options of ``periodic``.

    Attributes:
        strict: refuse what would break the equality with the synchronous gradient; false skips these rules.
        audit_every: recompute one period's gradient in N by index order with the reference backend; 0 never.
        audit_tolerance: largest relative L2 difference that an audit lets pass.
    """

    strict: bool = True
    audit_every: int = 0
    audit_tolerance: float = 1e-4

    @field_validator("audit_every")
    @classmethod
    def _not_negative(cls, value: int) -> int:
        if value < 0:
            raise ValueError("audit_every: 0 (never) or N (one period in N)")
        return value

    @field_validator("audit_tolerance")
    @classmethod
    def _positive(cls, value: float) -> float:
        if not (value > 0.0 and math.isfinite(value)):
            raise ValueError("audit_tolerance: a relative difference above 0, such as 1e-4")
        return value

    @model_validator(mode="after")
    def _has_effect(self) -> PeriodicOptions:
        if "audit_tolerance" in self.changed() and not self.audit_every:
            raise ValueError("audit_tolerance is the audit's: remove it, or set audit_every: N (one period in N)")
        return self


class BoundedOptions(Options):
    """Options of ``bounded``.

    Attributes:
        max_staleness: largest staleness, in versions, that is trained.
    """

    max_staleness: int = 2

    @field_validator("max_staleness")
    @classmethod
    def _not_negative(cls, value: int) -> int:
        if value < 0:
            raise ValueError("max_staleness: 0 (on policy) or more")
        return value


@hookimpl
def rollout_source(name: str, settings: Mapping[str, Any]) -> RolloutSource | None:
    """The source called ``name``, or None if it isn't ours; raises ConfigurationError for bad options."""
    where = f"metronome.{name}"
    if name == "synchronous":
        parse_options(SynchronousOptions, settings, where)
        return Synchronous()
    if name == "periodic":
        return Periodic(**parse_options(PeriodicOptions, settings, where).model_dump())
    if name == "bounded":
        return Bounded(**parse_options(BoundedOptions, settings, where).model_dump())
    return None


@hookimpl
def describe() -> list[Offer]:
    """The three rollout sources and the defaults of their options."""
    return [
        Offer("rollout_source", "synchronous", "trains when the whole batch has arrived", {}),
        Offer(
            "rollout_source",
            "periodic",
            "trains groups of one version as they arrive; the synchronous gradient",
            PeriodicOptions().model_dump(),
        ),
        Offer(
            "rollout_source",
            "bounded",
            "trains groups as they arrive, up to max_staleness versions behind; staler ones go out again",
            BoundedOptions().model_dump(),
        ),
    ]
