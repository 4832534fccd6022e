"""AReaL's own clip for our losses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from metronome_areal.arguments import WHERE

_NAMES = {"clip_low": "eps_clip", "clip_high": "eps_clip_higher", "dual_clip": "c_clip"}


def with_clip(actor: Any, block: dict[str, Any]) -> dict[str, Any]:
    """``block`` with ``actor``'s ``eps_clip``, ``eps_clip_higher`` and ``c_clip``, where the user set none of ours."""
    name, own = str(block.get("loss")), block.get(str(block.get("loss"))) or {}
    if name not in ("ppo", "a3po") or not isinstance(own, Mapping):
        return block
    return {**block, name: {**_taken(actor, own), **own}}


def told_of_clip(actor: Any, written: Mapping[str, Any] | None, part: Any) -> list[str]:
    """Lines to print: what ``with_clip`` took from ``actor`` for the block as it was ``written``."""
    name = str(part.block.get("loss"))
    if name not in ("ppo", "a3po"):
        return []
    taken = _taken(actor, (written or {}).get(name) or {})
    shown = " ".join(f"{WHERE}.{name}.{key}={value:g}" for key, value in taken.items())
    return [f"{shown}  (actor.{', actor.'.join(_NAMES[key] for key in taken)})"] if taken else []


def _taken(actor: Any, own: Mapping[str, Any]) -> dict[str, float]:
    high = actor.eps_clip if actor.eps_clip_higher is None else actor.eps_clip_higher
    hosts = {"clip_low": actor.eps_clip, "clip_high": high, "dual_clip": actor.c_clip}
    return {key: float(value) for key, value in hosts.items() if key not in own and value is not None}
