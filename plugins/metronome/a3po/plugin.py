"""Offers the policy losses ``a3po`` and ``ppo``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from metronome.a3po.options import A3poOptions, PpoOptions
from metronome.contracts import Offer, PolicyLoss
from metronome.hookspecs import hookimpl
from metronome.settings import parse_options


@hookimpl
def policy_loss(name: str, settings: Mapping[str, Any]) -> PolicyLoss | None:
    """``a3po`` or ``ppo`` with its options; raises ConfigurationError for bad ones."""
    if name == "a3po":
        a3po_options = parse_options(A3poOptions, settings, where="metronome.a3po")
        from metronome.a3po.loss import A3po  # needs torch: only where a loss is built

        return A3po(a3po_options)
    if name == "ppo":
        ppo_options = parse_options(PpoOptions, settings, where="metronome.ppo")
        from metronome.a3po.ppo import Ppo

        return Ppo(ppo_options)
    return None


@hookimpl
def describe() -> list[Offer]:
    """The two losses and the defaults of their options."""
    return [
        Offer(
            "policy_loss",
            "a3po",
            "PPO for stale data; the proximal policy is interpolated by staleness (arXiv 2512.06547)",
            A3poOptions().model_dump(),
        ),
        Offer("policy_loss", "ppo", "plain clipped PPO", PpoOptions().model_dump()),
    ]
