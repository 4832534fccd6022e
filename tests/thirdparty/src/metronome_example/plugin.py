"""The hooks: what this package offers, and how each object is built from its options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import field_validator

from metronome import hookimpl
from metronome.contracts import GroupController, Offer, PolicyLoss
from metronome.settings import Options, parse_options
from metronome_example.alternating import Alternating


class ReinforceOptions(Options):
    """Options of ``reinforce``: ``cap`` bounds the importance weight, None leaves it as it is."""

    cap: float | None = 2.0


class AlternatingOptions(Options):
    """Options of ``alternating``: the group sizes, taken in turn."""

    sizes: tuple[int, ...] = (4, 8)

    @field_validator("sizes")
    @classmethod
    def _usable(cls, sizes: tuple[int, ...]) -> tuple[int, ...]:
        if not sizes or min(sizes) < 2:
            raise ValueError("give at least one size, none below 2, such as [4, 8]")
        return sizes


@hookimpl
def policy_loss(name: str, settings: Mapping[str, Any]) -> PolicyLoss | None:
    """The loss ``reinforce``."""
    if name != "reinforce":
        return None
    from metronome_example.reinforce import Reinforce  # imports torch: only when it's selected

    options = parse_options(ReinforceOptions, settings, where="metronome.reinforce")
    return Reinforce(cap=options.cap)


@hookimpl
def group_controller(name: str, settings: Mapping[str, Any], seed: int) -> GroupController | None:
    """The controller ``alternating``; it takes no random decision, so ``seed`` isn't used."""
    if name != "alternating":
        return None
    options = parse_options(AlternatingOptions, settings, where="metronome.alternating")
    return Alternating(sizes=options.sizes)


@hookimpl
def describe() -> list[Offer]:
    """Both names with the default of every option."""
    loss, controller = ReinforceOptions().model_dump(), AlternatingOptions().model_dump()
    return [
        Offer("policy_loss", "reinforce", "REINFORCE with a capped importance weight", loss),
        Offer("group_controller", "alternating", "group sizes in turn", controller),
    ]
