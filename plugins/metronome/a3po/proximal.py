"""The proximal policy of A-3PO: interpolated log-probs in place of a forward pass (arXiv 2512.06547)."""

from __future__ import annotations

import torch

from metronome.a3po.options import Fresh
from metronome.errors import MetronomeError, VersionMismatch

UNKNOWN = -1
"""Staleness of a token whose version isn't known; such a token is never interpolated."""


def alpha(
    staleness: torch.Tensor,
    fraction: float = 0.0,
    fresh: Fresh = "behavior",
    *,
    strict: bool = True,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The share of the behaviour policy in each token's proximal policy.

    ``d = staleness + fraction``; ``alpha = min(1, 1/d)`` for d > 0; d = 0: 1 (``fresh="target"``: 0);
    unknown staleness (-1): 1, whatever the fraction.

    From the paper (its staleness-aware interpolation): ``alpha = 1/d`` for whole d >= 1. At d = 0 the paper
    contradicts itself: its formula says alpha = 0, which makes the ratio 1 so that clipping can't act,
    while its prose and its authors' released code make the behaviour policy the anchor (alpha = 1, standard
    PPO). Our default follows prose and code. Ours is the rule for d between 0 and 1 and for fractions in
    general, which occur with several mini-batches a period: without the clamp, alpha > 1 would leave the
    interval between the two policies and the importance weight would explode.

    Args:
        staleness: integer ``[T]``, versions; -1 unknown.
        fraction: j/k in the j-th of k mini-batches of a period, 0 <= fraction < 1.
        fresh: the anchor at d = 0.
        strict: refuse future versions (staleness < -1) rather than treat them as unknown. Costs a device
            synchronisation.
        dtype: of the result.

    Returns ``[T]`` between 0 and 1.

    Raises VersionMismatch for a future version, MetronomeError for a fraction outside its range.
    """
    if not 0 <= fraction < 1:
        raise MetronomeError(
            "step_fraction must be at least 0 and below 1",
            found=fraction,
            where="LossBatch.step_fraction",
            remedy="pass j/k in the j-th (from 0) of k mini-batches",
        )
    if strict:
        future = (staleness < UNKNOWN).nonzero()
        if len(future):
            first = int(future[0])
            raise future_version(len(future), first, int(staleness[first]))
    # max(d, 1) is the clamp, and gives alpha = 1 at d = 0 and for unknown tokens as well.
    share = (staleness.to(dtype) + fraction).clamp(min=1).reciprocal()
    if fresh == "target" and fraction == 0:
        share = share.masked_fill(staleness == 0, 0.0)
    return share


def loglinear(behavior: torch.Tensor, target: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """The proximal log-probs ``alpha * log pi_behav + (1 - alpha) * log pi_theta``, detached.

    The paper's interpolation. ``torch.lerp`` returns either end exactly at alpha 0 and 1, so that alpha = 1
    is plain PPO bit by bit.

    Args:
        behavior, target: log-probs ``[T]`` of the behaviour policy and of the policy in training.
        share: ``alpha``, ``[T]``.
    """
    return torch.lerp(target.detach(), behavior.detach(), share)


def future_version(count: int, first: int, staleness: int) -> VersionMismatch:
    """The error for ``count`` tokens sampled by a version later than the one in training."""
    return VersionMismatch(
        f"{count} trained token(s) carry a version later than the one in training",
        found=staleness,
        where=f"LossBatch.staleness, first at token {first}",
        remedy="stamp versions when the workers acknowledge a publication, or set a3po.strict: false to treat"
        " them as unknown",
    )
