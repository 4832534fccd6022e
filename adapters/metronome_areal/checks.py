"""A hook that is set and wasn't called, and a step that moved nothing, stop the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from metronome.errors import MetronomeError


def check_life(found: Mapping[str, float], part: Any, where: str) -> None:
    """Looks at what an update of the actor recorded.

    Raises MetronomeError naming the hook that wasn't called.
    """
    if not found:
        return
    wanted = [name for name, on in (("loss", part.own_loss), ("attention", part.shares_prompt)) if on]
    for hook in wanted:
        if not found.get(f"metronome/{hook}/calls"):
            raise MetronomeError(
                f"metronome.{hook} is set and wasn't called in this step",
                found=f"metronome/{hook}/calls = {found.get(f'metronome/{hook}/calls', 0)}",
                where=where,
                remedy=f"leave metronome.{hook} out, or report the versions that metronome doctor prints",
            )


def check_moved(norm: float, rate: float, changed: bool, where: str) -> None:
    """Stops a step with a gradient and a learning rate that left the weights as they were.

    Raises MetronomeError.
    """
    if norm > 0 and rate > 0 and not changed:
        raise MetronomeError(
            "the optimiser step changed no weight, so that its publication would change nothing",
            found=f"gradient norm {norm:g}, learning rate {rate:g}",
            where=where,
            remedy="a larger actor.optimizer.lr: weights of 16 bits don't show a smaller step",
        )


def check_received(given: bool, taken: bool, where: str) -> None:
    """Stops a run whose engine still holds the weights of the publication before.

    Args:
        given: whether what was published differs from what was published before.
        taken: whether what the engine holds differs from what it held.
        where: shown in the error.

    Raises MetronomeError.
    """
    if given and not taken:
        raise MetronomeError(
            "the new weights didn't reach the rollout engine",
            found="the weights of the publication before",
            where=where,
            remedy="report the versions that metronome doctor prints",
        )
