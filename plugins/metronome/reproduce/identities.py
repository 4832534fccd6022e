"""What the shipped A-3PO loss does on tokens with a chosen w = pi_theta / pi_behav, seen from outside.

Imported only by rows that need torch.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metronome.a3po import loss, options, ppo, proximal
from metronome.contracts import LossBatch, PolicyLoss

BEHAVIOR = -1.5  # log-prob of every token under the behaviour policy


def batch(log_w: Sequence[float] | Tensor, advantage: float | Tensor, staleness: int | Tensor) -> LossBatch:
    """Tokens with ``log w``; float64."""
    shift = torch.as_tensor(log_w, dtype=torch.float64)
    anchor = torch.full_like(shift, BEHAVIOR)
    return LossBatch(
        log_probs=(anchor + shift).requires_grad_(),
        behavior_log_probs=anchor,
        old_log_probs=None,
        advantages=torch.as_tensor(advantage, dtype=torch.float64).expand_as(shift),
        mask=torch.ones_like(shift, dtype=torch.bool),
        staleness=torch.as_tensor(staleness).expand_as(shift),
        cu_seqlens=torch.tensor([0, len(shift)]),
    )


def a3po(**chosen: Any) -> loss.A3po:
    """The loss, without a cap unless one is chosen."""
    cap = {} if chosen.get("proximal") == "behavior" else {"cap": None}
    return loss.A3po(options.A3poOptions(**{**cap, **chosen}))


def gradient(of: PolicyLoss, tokens: LossBatch) -> Tensor:
    """The gradient with respect to each token's log-prob."""
    (found,) = torch.autograd.grad(of(tokens).loss.sum(), [tokens.log_probs])
    return found


def trained(of: PolicyLoss, log_w: float, advantage: float, staleness: int) -> bool:
    """Whether a token has a gradient."""
    return bool(gradient(of, batch([log_w], advantage, staleness))[0] != 0)


def edge(of: PolicyLoss, advantage: float, staleness: int, far: float) -> float:
    """The w between 1 and ``exp(far)`` at which the gradient vanishes, by bisection."""
    near = 0.0
    for _ in range(60):
        middle = (near + far) / 2
        near, far = (middle, far) if trained(of, middle, advantage, staleness) else (near, middle)
    return math.exp(near)


def seeded(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """``(log w, advantage, staleness)`` of tokens drawn with a fixed seed."""
    chance = np.random.default_rng(0)
    log_w = chance.uniform(-4.0, 4.0, count)
    advantage = chance.uniform(-3.0, 3.0, count)
    staleness = chance.choice([0, 1, 2, 3, 4, 8, -1], count)
    return torch.from_numpy(log_w), torch.from_numpy(advantage), torch.from_numpy(staleness)


def banded(log_w: float, advantage: float, share: float, low: float, high: float) -> float:
    """PPO's gradient on w with the band ``[(1 - low)^(1/share), (1 + high)^(1/share)]``, by hand."""
    lower, upper = math.log(1 - low) / share, math.log(1 + high) / share
    stopped = (advantage > 0 and log_w > upper) or (advantage < 0 and log_w < lower)
    return 0.0 if stopped else -math.exp(log_w) * advantage


def band_difference(low: float, high: float, widened: bool) -> float:
    """The largest difference from PPO on a band, widened by the exponent d or not (control)."""
    log_w, advantage, staleness = seeded(4000)
    found = gradient(a3po(clip_low=low, clip_high=high), batch(log_w, advantage, staleness))
    wanted = torch.tensor(
        [
            banded(w, value, 1.0 / max(1, d) if widened else 1.0, low, high)
            for w, value, d in zip(log_w.tolist(), advantage.tolist(), staleness.tolist(), strict=True)
        ],
        dtype=torch.float64,
    )
    return float(((found - wanted).abs() / wanted.abs().clamp(min=1.0)).max())


def plain_ppo_difference(staleness: Sequence[int]) -> float:
    """The largest difference of loss and gradient from plain PPO."""
    log_w, advantage, _ = seeded(4000)
    worst = 0.0
    for d in staleness:
        tokens = batch(log_w, advantage, d)
        one, other = a3po(), ppo.Ppo(options.PpoOptions())
        worst = max(
            worst,
            float((one(tokens).loss - other(tokens).loss).detach().abs().max()),
            float((gradient(one, tokens) - gradient(other, tokens)).abs().max()),
        )
    return worst


def truncation_difference(cap: float) -> float:
    """Gradients under ``truncate`` against ``min(w, cap * w^alpha)`` inside the band."""
    log_w, _, staleness = seeded(4000)
    log_w = log_w.abs()  # with a negative advantage the band ends below 1 only
    tokens = batch(log_w, -1.0, staleness)
    found = gradient(a3po(cap=cap, cap_mode="truncate"), tokens)
    share = 1.0 / staleness.clamp(min=1).double()
    wanted = torch.minimum(log_w.exp(), cap * (share * log_w).exp())
    return float(((found - wanted).abs() / wanted).max())


def proximal_properties() -> tuple[float, float]:
    """How far log prox leaves the two policies' interval, and the largest error of ``|log r| = alpha |log w|``."""
    log_w, _, staleness = seeded(20_000)
    behavior = torch.full_like(log_w, BEHAVIOR)
    target = behavior + log_w
    share = proximal.alpha(staleness, dtype=torch.float64)
    found = proximal.loglinear(behavior, target, share)
    low, high = torch.minimum(behavior, target), torch.maximum(behavior, target)
    outside = torch.maximum(low - found, found - high).clamp(min=0.0)
    # The paper's share, written out: 1/d from d = 1 on.
    wanted = log_w.abs() / staleness.clamp(min=1).double()
    return float(outside.max()), float(((target - found).abs() - wanted).abs().max())


def policies(sigma: float, count: int) -> Tensor:
    """``log w`` of tokens: normal with deviation ``sigma``, seeded."""
    return torch.from_numpy(sigma * np.random.default_rng(1).standard_normal(count))


def clipped(of: PolicyLoss, tokens: LossBatch) -> float:
    """The fraction that the loss itself reports as clipped."""
    total, count = of(tokens).metrics["clipped"]
    return total / count


def seconds_of(call: Callable[[], object]) -> float:
    """Wall seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def proximal_seconds(model: Any, rows: int, length: int, repeats: int = 7) -> tuple[float, float]:
    """Median seconds of the interpolation and of the forward pass that it replaces, in turns, same tokens."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, model.config.vocab_size, (rows, length), generator=draw)

    def forward() -> Tensor:
        with torch.no_grad():
            logits: Tensor = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
            return (logits.gather(-1, ids[:, 1:, None]).squeeze(-1) - logits.logsumexp(-1)).flatten()

    target = forward()
    behavior = target + 0.05 * torch.randn(target.shape, generator=draw)
    staleness = torch.randint(0, 5, target.shape, generator=draw)

    def interpolate() -> Tensor:
        return proximal.loglinear(behavior, target, proximal.alpha(staleness, strict=False))

    interpolate()
    pairs = [(seconds_of(interpolate), seconds_of(forward)) for _ in range(repeats)]
    return statistics.median(one for one, _ in pairs), statistics.median(other for _, other in pairs)


def pass_shares(model: Any, rows: int, length: int, repeats: int = 5) -> float:
    """Seconds of a forward pass over those of a training part that holds it beside forward and backward."""
    ids = torch.randint(3, model.config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(0))

    def log_probs() -> Tensor:
        return torch.as_tensor(model(input_ids=ids, use_cache=False).logits.log_softmax(-1)[..., 0].sum())

    def extra() -> None:
        with torch.no_grad():
            log_probs()

    def update() -> None:
        torch.autograd.backward(log_probs())
        model.zero_grad()

    update()
    pairs = [(seconds_of(extra), seconds_of(update)) for _ in range(repeats)]
    return statistics.median(one / (one + other) for one, other in pairs)
