"""Batches with chosen w = pi_theta / pi_behav, and the oracle in plain Python."""

from __future__ import annotations

import math

import torch
from hypothesis import settings
from hypothesis import strategies as st

from metronome.a3po.loss import A3po
from metronome.a3po.options import A3poOptions, PpoOptions
from metronome.a3po.ppo import Ppo
from metronome.contracts import LossBatch, TokenLoss

LOW, HIGH, CAP = 0.2, 0.3, 5.0
QUICK = settings(deadline=None, max_examples=60)
LOG_W = st.floats(-4, 4)
TOKENS = st.lists(st.tuples(LOG_W, st.floats(-3, 3), st.sampled_from([0, 1, 2, 3, 4, 8, -1])), min_size=1, max_size=12)


def make_batch(log_w, advantages, staleness, *, behavior=-1.5, fraction=0.0, **more) -> LossBatch:
    log_w = torch.as_tensor(log_w, dtype=torch.float64)
    anchor = torch.full_like(log_w, behavior)
    return LossBatch(
        log_probs=(anchor + log_w).requires_grad_(),
        behavior_log_probs=anchor,
        old_log_probs=more.pop("old", None),
        advantages=torch.as_tensor(advantages, dtype=torch.float64).expand_as(log_w),
        mask=more.pop("mask", torch.ones_like(log_w, dtype=torch.bool)),
        staleness=torch.as_tensor(staleness).expand_as(log_w),
        cu_seqlens=torch.tensor([0, len(log_w)]),
        step_fraction=fraction,
        **more,
    )


def a3po(**options) -> A3po:
    cap = {} if options.get("proximal") == "behavior" else {"cap": None}  # its weight is 1: a cap is refused
    return A3po(A3poOptions(**{"clip_low": LOW, "clip_high": HIGH, **cap, **options}))


def ppo(**options) -> Ppo:
    return Ppo(PpoOptions(**{"clip_low": LOW, "clip_high": HIGH, **options}))


def gradient(loss, batch: LossBatch) -> torch.Tensor:
    result: TokenLoss = loss(batch)
    (grad,) = torch.autograd.grad(result.loss.sum(), [batch.log_probs])
    return grad


def share_of(d: int) -> float:
    return 1.0 if d <= 1 else 1.0 / d


def banded_ppo(log_w: float, advantage: float, share: float, weight: float | None = None) -> float:
    """The gradient of PPO on w with the band [(1-LOW)^(1/share), (1+HIGH)^(1/share)], by hand."""
    lower, upper = math.log(1 - LOW) / share, math.log(1 + HIGH) / share
    stopped = (advantage > 0 and log_w > upper) or (advantage < 0 and log_w < lower)
    return 0.0 if stopped else -(math.exp(log_w) if weight is None else weight) * advantage


def away_from_edges(tokens) -> bool:
    """Whether rounding can't decide on which side of a band's edge a token falls."""
    return all(
        abs(log_w - edge / share_of(d)) > 1e-9
        for log_w, _, d in tokens
        for edge in (math.log(1 - LOW), math.log(1 + HIGH))
    )


def batch_of(tokens, **more) -> LossBatch:
    log_w, advantages, staleness = zip(*tokens, strict=True)
    return make_batch(log_w, advantages, staleness, **more)


def close(one: torch.Tensor, other, tolerance: float = 1e-12) -> bool:
    other = torch.as_tensor(other, dtype=torch.float64)
    return bool(((one - other).abs() <= tolerance * other.abs().clamp(min=1.0)).all())
