"""The clipped surrogate that both losses share."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Surrogate(NamedTuple):
    """What is maximised per token, and where a clip decided it; every tensor ``[T]``."""

    objective: torch.Tensor
    clipped: torch.Tensor
    dual_clipped: torch.Tensor | None


def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float, dual_clip: float | None
) -> Surrogate:
    """``min(r A, clip(r, 1 - low, 1 + high) A)``, bounded below by ``dual_clip * A`` where A < 0.

    PPO, arXiv 1707.06347, with separate bounds (DAPO, arXiv 2503.14476) and
    Dual-Clip PPO, arXiv 1912.09729.

    Args:
        ratio: ``[T]``, with gradient.
        advantages: ``[T]``.
        low, high, dual_clip: see ``options.ClipOptions``.
    """
    free = ratio * advantages
    held = ratio.clamp(1 - low, 1 + high) * advantages
    clipped = (held < free).detach()
    # The minimum; torch.minimum would halve the gradient between two equal branches and round it twice.
    objective = torch.where(clipped, held, free)
    if dual_clip is None:
        return Surrogate(objective, clipped, None)
    floor = dual_clip * advantages
    bounded = ((advantages < 0) & (objective < floor)).detach()
    return Surrogate(torch.where(bounded, floor, objective), clipped, bounded)
