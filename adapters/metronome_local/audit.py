"""The audit of a period: the gradient once more, in index order with the reference attention, and compared."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from metronome.contracts import AttentionBackend
from metronome.errors import EqualityViolated
from metronome_local.gradient import Gradient, TrainGroup


def audit(
    gradient: Gradient,
    groups: Sequence[TrainGroup],
    version: int,
    attention: AttentionBackend,
    *,
    expected_rows: int,
    tolerance: float,
    where: str,
) -> float:
    """Relative L2 difference of the streamed gradient to the recomputed one, |streamed - recomputed| / |recomputed|.

    Leaves the streamed gradient in place. Raises EqualityViolated beyond ``tolerance``; ``where`` names the period.
    """
    streamed = [parameter.grad for parameter in gradient.parameters]
    with gradient.log_probs.backend(attention):
        gradient.begin(expected_rows)
        for group in sorted(groups, key=lambda one: one.index):
            gradient.add([group], version)
        gradient.finish()
    difference = size = 0.0
    for parameter, ours in zip(gradient.parameters, streamed, strict=True):
        zero = torch.zeros_like(parameter)
        theirs = zero if parameter.grad is None else parameter.grad
        difference += float(((zero if ours is None else ours) - theirs).double().square().sum())
        size += float(theirs.double().square().sum())
        parameter.grad = ours
    relative = float((difference / (size or 1.0)) ** 0.5)
    if not relative <= tolerance:
        raise EqualityViolated(
            f"the audit of {where} found another gradient than the streamed one",
            found=f"relative difference {relative:.2e}, tolerance {tolerance:.0e}",
            where="metronome.periodic.audit_every",
            remedy="attention: host tells whether the attention backend is at fault; please report it",
        )
    return relative
