"""The four hooks. An implementation returns None for a name that isn't its own; see docs/hooks.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pluggy

from metronome.contracts import AttentionBackend, GroupController, Offer, PolicyLoss, RolloutSource
from metronome.device import Device

hookspec = pluggy.HookspecMarker("metronome")
hookimpl = pluggy.HookimplMarker("metronome")


@hookspec(firstresult=True)
def rollout_source(name: str, settings: Mapping[str, Any]) -> RolloutSource | None:
    """The rollout source called ``name``, built from its own options."""


@hookspec(firstresult=True)
def policy_loss(name: str, settings: Mapping[str, Any]) -> PolicyLoss | None:
    """The policy loss called ``name``, built from its own options."""


@hookspec(firstresult=True)
def attention(name: str, settings: Mapping[str, Any], device: Device) -> AttentionBackend | None:
    """The attention called ``name`` for ``device``, built from its own options."""


@hookspec(firstresult=True)
def group_controller(name: str, settings: Mapping[str, Any], seed: int) -> GroupController | None:
    """The group controller called ``name``, built from its own options and a seed."""


@hookspec
def describe() -> list[Offer]:  # type: ignore[empty-body]
    """The names that this plug-in offers, with a summary and the default of every option."""
