"""The contract of a policy loss: ``check_policy_loss`` on your own object, in your own tests."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from metronome.contracts import LossBatch, PolicyLoss, TokenLoss

_LENGTHS = (5, 1, 7, 0, 4)
_INPUTS = ("behavior_log_probs", "old_log_probs", "advantages", "proximal_log_probs")


def check_policy_loss(loss: PolicyLoss, *, seed: int = 0) -> None:
    """Raises AssertionError, with a sentence, if ``loss`` breaks the contract of ``PolicyLoss``.

    Checked on seeded batches with several rows, masked tokens, and known and unknown staleness: shape,
    dtype, gradient through ``log_probs`` only, zero loss and zero gradient where the mask is False even if
    the values there are NaN, and where the advantage is zero, the same loss and gradient per token and the
    same sums and maxima however the rows are split, determinism, inputs left as they are, an empty batch, and
    a second visit where ``keeps_proximal`` is set.

    Args:
        loss: the object under test.
        seed: of the batches.
    """
    assert isinstance(loss, PolicyLoss), "the object lacks an attribute of metronome.contracts.PolicyLoss"
    assert isinstance(loss.name, str), "name must be a string"
    assert loss.name, "name must not be empty"
    batch = sample_batch(loss, seed=seed)
    _check_result(loss, batch)
    _check_gradient(loss, batch)
    _check_mask(loss, batch)
    _check_zero_advantage(loss, batch)
    _check_split(loss, batch)
    _check_empty(loss, batch)
    if loss.keeps_proximal:
        _check_second_visit(loss, batch)


def sample_batch(
    loss: PolicyLoss,
    *,
    seed: int = 0,
    lengths: Sequence[int] = _LENGTHS,
    dtype: torch.dtype = torch.float64,
) -> LossBatch:
    """A seeded batch as an adapter would build it for ``loss``: the proximal log-probs only if it needs them.

    Args:
        loss: the loss that the batch is for.
        seed: of the values.
        lengths: tokens of each row.
        dtype: of the floating-point tensors.
    """
    draw = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    behavior = -torch.rand(tokens, generator=draw, dtype=torch.float64) * 3 - 0.1

    def near(scale: float) -> torch.Tensor:
        return (behavior + scale * torch.randn(tokens, generator=draw, dtype=torch.float64)).to(dtype)

    return LossBatch(
        log_probs=near(0.3).requires_grad_(),
        behavior_log_probs=behavior.to(dtype),
        old_log_probs=near(0.05),
        advantages=torch.randn(tokens, generator=draw, dtype=torch.float64).to(dtype),
        mask=torch.rand(tokens, generator=draw) < 0.8,
        staleness=torch.randint(-1, 5, (tokens,), generator=draw),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
        proximal_log_probs=near(0.1) if loss.needs_proximal_forward else None,
    )


def split_rows(batch: LossBatch, rows: Sequence[int]) -> list[LossBatch]:
    """``batch`` cut before each of ``rows``; every part's ``log_probs`` is a new leaf."""
    bounds = batch.cu_seqlens.tolist()
    edges = [0, *rows, len(bounds) - 1]
    parts = []
    for first, last in itertools.pairwise(edges):
        tokens = slice(bounds[first], bounds[last])
        cut: dict[str, Any] = {
            name: None if getattr(batch, name) is None else getattr(batch, name)[tokens]
            for name in (*_INPUTS, "mask", "staleness")
        }
        parts.append(
            replace(
                batch,
                log_probs=batch.log_probs.detach()[tokens].clone().requires_grad_(),
                cu_seqlens=batch.cu_seqlens[first : last + 1] - bounds[first],
                **cut,
            )
        )
    return parts


def _check_result(loss: PolicyLoss, batch: LossBatch) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        typed = sample_batch(loss, dtype=dtype)
        expected = torch.float64 if dtype == torch.float64 else torch.float32
        result = loss(typed)
        assert result.loss.shape == typed.log_probs.shape, "the loss must be per token, [T]"
        assert result.loss.dtype == expected, f"the loss of {dtype} log-probs must be {expected}"
        assert bool(result.loss.isfinite().all()), f"the loss of finite {dtype} inputs must be finite"
    before = {name: getattr(batch, name) for name in ("log_probs", *_INPUTS, "mask", "staleness")}
    before = {name: value for name, value in before.items() if value is not None}
    copies = {name: value.detach().clone() for name, value in before.items()}
    first, second = loss(batch), loss(batch)
    for name, value in before.items():
        same = getattr(batch, name) is value and torch.equal(value.detach(), copies[name])
        assert same, f"the loss must leave its input {name} as it is"
    assert torch.equal(first.loss, second.loss), "the same batch twice must give the same loss, bit by bit"
    assert (first.metrics, first.maxima) == (second.metrics, second.maxima), "metrics must be deterministic"
    for name, (total, count) in first.metrics.items():
        sound = math.isfinite(total) and math.isfinite(count) and count >= 0
        assert sound, f"metric {name!r} must be a finite (sum, count) with count >= 0"


def _check_gradient(loss: PolicyLoss, batch: LossBatch) -> None:
    leaves = {name: getattr(batch, name) for name in _INPUTS if getattr(batch, name) is not None}
    leaves = {name: value.detach().clone().requires_grad_() for name, value in leaves.items()}
    result = loss(replace(batch, **leaves))
    assert result.loss.requires_grad, "the loss must carry a gradient to log_probs"
    gradients = torch.autograd.grad(result.loss.sum(), [batch.log_probs, *leaves.values()], allow_unused=True)
    assert gradients[0] is not None, "the loss must carry a gradient to log_probs"
    assert bool((gradients[0] != 0).any()), "the gradient to log_probs must not vanish on every token"
    for name, gradient in zip(leaves, gradients[1:], strict=True):
        stopped = gradient is None or not bool(gradient.any())
        assert stopped, f"{name} must be detached: gradient may flow through log_probs only"


def _check_mask(loss: PolicyLoss, batch: LossBatch) -> None:
    outside = ~batch.mask

    def poison(value: torch.Tensor | None, fill: float) -> torch.Tensor | None:
        return None if value is None else value.detach().masked_fill(outside, fill)

    clean, clean_gradient = _loss_and_gradient(loss, batch)
    for fill in (float("nan"), float("inf"), float("-inf")):
        poisoned: dict[str, Any] = {name: poison(getattr(batch, name), fill) for name in _INPUTS}
        log_probs = batch.log_probs.detach().masked_fill(outside, fill).requires_grad_()
        result, gradient = _loss_and_gradient(loss, replace(batch, log_probs=log_probs, **poisoned))
        where = f"where the mask is False and the values are {fill}"
        assert bool((result.loss[outside] == 0).all()), f"the loss must be zero {where}"
        assert bool((gradient[outside] == 0).all()), f"the gradient must be zero {where}"
        same = torch.equal(result.loss, clean.loss) and torch.equal(gradient, clean_gradient)
        assert same, "values where the mask is False must not change the other tokens"
        assert result.metrics == clean.metrics, "values where the mask is False must not change the metrics"


def _check_zero_advantage(loss: PolicyLoss, batch: LossBatch) -> None:
    where = torch.arange(len(batch.advantages)) % 2 == 0
    result, gradient = _loss_and_gradient(loss, replace(batch, advantages=batch.advantages.masked_fill(where, 0.0)))
    because = "where the advantage is zero: hosts leave out groups whose advantages are all zero"
    assert not bool(result.loss[where].any()), f"the loss must be zero {because}"
    assert not bool(gradient[where].any()), f"the gradient must be zero {because}"


def _check_split(loss: PolicyLoss, batch: LossBatch) -> None:
    whole, whole_gradient = _loss_and_gradient(loss, batch)
    rows = len(batch.cu_seqlens) - 1
    for cuts in ([1], [2, 3], list(range(1, rows))):
        results = [_loss_and_gradient(loss, part) for part in split_rows(batch, cuts)]
        tokens = torch.cat([result.loss for result, _ in results])
        gradient = torch.cat([one for _, one in results])
        close = torch.allclose(tokens, whole.loss, rtol=1e-12, atol=1e-15)
        assert close, "a token's loss must not depend on how rows fall into micro-batches"
        close = torch.allclose(gradient, whole_gradient, rtol=1e-12, atol=1e-15)
        assert close, "a token's gradient must not depend on how rows fall into micro-batches"
        for name, (total, count) in whole.metrics.items():
            parts = [result.metrics.get(name, (0.0, 0.0)) for result, _ in results]
            sums, counts = math.fsum(part[0] for part in parts), math.fsum(part[1] for part in parts)
            adds = math.isclose(sums, total, rel_tol=1e-9, abs_tol=1e-12) and counts == count
            assert adds, f"metric {name!r} must add: sums and counts of the parts equal the whole's"
        for name, value in whole.maxima.items():
            largest = max((result.maxima[name] for result, _ in results if name in result.maxima), default=None)
            assert largest == value, f"maximum {name!r} must be the largest of the parts' maxima"


def _check_empty(loss: PolicyLoss, batch: LossBatch) -> None:
    empty = sample_batch(loss, lengths=())
    result, _ = _loss_and_gradient(loss, empty)
    assert result.loss.shape == (0,), "an empty batch must give a loss of shape [0] that can be summed"
    nothing = replace(batch, mask=torch.zeros_like(batch.mask))
    result, gradient = _loss_and_gradient(loss, nothing)
    assert not bool(result.loss.any() or gradient.any()), "a batch with nothing to train must give zeros"
    counts = [count for _, count in result.metrics.values()]
    assert not any(counts), "a batch with nothing to train must count nothing in its metrics"


def _check_second_visit(loss: PolicyLoss, batch: LossBatch) -> None:
    kept = loss(replace(batch, proximal_log_probs=None)).proximal_log_probs
    assert kept is not None, "keeps_proximal is set, so the first visit must return proximal_log_probs"
    assert kept.shape == batch.log_probs.shape, "proximal_log_probs must be per token, [T]"
    assert not kept.requires_grad, "proximal_log_probs must be detached"
    again = loss(replace(batch, proximal_log_probs=kept)).proximal_log_probs
    same = again is not None and torch.equal(again, kept)
    assert same, "a later visit must keep the first proximal_log_probs"


def _loss_and_gradient(loss: PolicyLoss, batch: LossBatch) -> tuple[TokenLoss, torch.Tensor]:
    result = loss(batch)
    (gradient,) = torch.autograd.grad(result.loss.sum(), [batch.log_probs])
    return result, gradient
