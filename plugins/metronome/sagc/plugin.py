"""Offers the group controllers ``sagc`` and ``fixed``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from metronome.contracts import GroupController, Offer
from metronome.hookspecs import hookimpl
from metronome.sagc.controller import SagcController
from metronome.sagc.fixed import Fixed, FixedOptions
from metronome.sagc.options import SagcOptions
from metronome.settings import parse_options


@hookimpl
def group_controller(name: str, settings: Mapping[str, Any], seed: int) -> GroupController | None:
    """``sagc`` or ``fixed`` from their options; None for any other name."""
    if name == "sagc":
        return SagcController(parse_options(SagcOptions, settings, "metronome.sagc"), seed)
    if name == "fixed":
        return Fixed(parse_options(FixedOptions, settings, "metronome.fixed"))
    return None


@hookimpl
def describe() -> list[Offer]:
    """The two controllers with their defaults."""
    return [
        Offer(
            "group_controller",
            "sagc",
            "moves G between steps so that stragglers stay under a rate",
            SagcOptions().model_dump(),
        ),
        Offer("group_controller", "fixed", "one G for the whole run", FixedOptions().model_dump()),
    ]
