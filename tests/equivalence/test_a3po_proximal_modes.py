"""A-3PO's two theorems, the modes recompute and reuse, and A-3PO under periodic asynchrony, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from a3po_batches import (
    CAP,
    HIGH,
    QUICK,
    TOKENS,
    a3po,
    batch_of,
    close,
    gradient,
    make_batch,
    ppo,
    share_of,
)
from hypothesis import given
from hypothesis import strategies as st

from metronome.a3po.loss import A3po
from metronome.a3po.ppo import Ppo
from metronome.a3po.proximal import alpha, loglinear
from metronome.contracts import LossBatch, TokenLoss
from metronome.errors import MetronomeError

# --- the paper's two theorems, and what doesn't change ----------------------------------------------


@QUICK
@given(st.floats(-20, 0), st.floats(-20, 0), st.integers(0, 50), st.sampled_from([0.0, 0.25, 0.75]))
def test_the_proximal_policy_lies_between_the_two(behavior, target, d, fraction):
    behav, theta = (torch.tensor([x], dtype=torch.float64) for x in (behavior, target))
    share = alpha(torch.tensor([d]), fraction, dtype=torch.float64)
    proximal = loglinear(behav, theta, share).item()
    assert min(behavior, target) <= proximal <= max(behavior, target)
    by_hand = share.item() * behavior + (1 - share.item()) * target
    assert proximal == pytest.approx(by_hand, rel=1e-12, abs=1e-12)


def test_an_unclamped_fraction_leaves_the_sandwich():
    behav, theta = (torch.tensor([x], dtype=torch.float64) for x in (-2.0, -1.0))
    unclamped = torch.tensor([1 / 0.25], dtype=torch.float64)
    assert loglinear(behav, theta, unclamped).item() < -2.0 - 1e-3


@QUICK
@given(st.floats(-4, 4), st.integers(0, 16))
def test_the_ratio_contracts_by_alpha(log_w, d):
    result = a3po()(make_batch([log_w], [1.0], d))
    assert math.log(result.maxima["ratio"]) == pytest.approx(share_of(d) * log_w, rel=1e-9, abs=1e-12)
    weight = math.log(result.maxima["importance_weight"])
    assert weight == pytest.approx((1 - share_of(d)) * log_w, rel=1e-9, abs=1e-12)


def test_the_ratio_doesnt_contract_in_plain_ppo():
    result = ppo()(make_batch([1.0], [1.0], 4))
    assert abs(math.log(result.maxima["ratio"]) - 1.0 / 4) > 1e-3


def normal_batch(d: int, scale: float = 0.3, **more) -> LossBatch:
    draw = torch.Generator().manual_seed(0)
    log_w = scale * torch.randn(4000, generator=draw, dtype=torch.float64)
    advantages = torch.randn(4000, generator=draw, dtype=torch.float64).sign()
    return make_batch(log_w, advantages, d, **more)


def effective_weight(loss, d: int) -> torch.Tensor:
    """The factor of each token's advantage in the gradient, inside the band (nothing is clipped)."""
    draw = torch.Generator().manual_seed(1)
    log_w = torch.rand(2000, generator=draw, dtype=torch.float64) * 0.4 - 0.2
    return -gradient(loss, make_batch(log_w, 1.0, d))


@pytest.mark.parametrize("d", [2, 4, 8])
def test_the_variance_of_the_effective_weight_doesnt_change(d):
    plain = effective_weight(ppo(), d).var()
    assert effective_weight(a3po(), d).var().item() == pytest.approx(plain.item(), rel=1e-12)


def test_the_variance_does_fall_without_the_importance_weight():
    plain = effective_weight(ppo(), 4).var()
    assert effective_weight(a3po(importance_weight=False), 4).var() < 0.5 * plain


def fraction_of(name: str, result: TokenLoss) -> float:
    total, count = result.metrics[name]
    return total / count


def test_fewer_tokens_are_clipped_than_by_plain_ppo_and_fewer_the_staler():
    plain = [fraction_of("clipped", ppo()(normal_batch(d))) for d in (1, 2, 4, 8)]
    ours = [fraction_of("clipped", a3po()(normal_batch(d))) for d in (1, 2, 4, 8)]
    assert plain == [plain[0]] * 4
    assert ours[0] == plain[0] > ours[1] > ours[2] >= ours[3]
    assert ours[1] < 0.5 * plain[1]


# --- recompute and reuse ----------------------------------------------------------------------------


@QUICK
@given(TOKENS)
def test_recompute_with_one_mini_batch_never_clips(tokens):
    batch = batch_of(tokens)
    batch.proximal_log_probs = batch.log_probs.detach().clone()
    loss = a3po(proximal="recompute")
    assert loss(batch).metrics["clipped"][0] == 0
    expected = [-math.exp(log_w) * advantage for log_w, advantage, _ in tokens]
    assert close(gradient(loss, batch), expected)


def test_recompute_clips_once_the_policy_has_moved():
    batch = make_batch([0.0, 0.0], [1.0, -1.0], 3)
    batch.proximal_log_probs = batch.log_probs.detach() - torch.tensor([0.5, -0.5])
    assert a3po(proximal="recompute")(batch).metrics["clipped"] == (2, 2)


def test_only_the_capped_fraction_falls_against_recompute():
    batch = normal_batch(2, scale=1.0)
    batch.proximal_log_probs = batch.log_probs.detach().clone()
    recompute, ours = a3po(proximal="recompute", cap=CAP)(batch), a3po(cap=CAP)(batch)
    assert fraction_of("clipped", ours) > fraction_of("clipped", recompute) == 0
    assert fraction_of("capped", ours) < fraction_of("capped", recompute)


def test_recompute_without_the_forward_pass_says_what_to_do():
    loss = a3po(proximal="recompute")
    assert loss.needs_proximal_forward
    with pytest.raises(MetronomeError, match=r"proximal_log_probs is missing.*loglinear"):
        loss(make_batch([0.1], [1.0], 1))


@QUICK
@given(TOKENS)
def test_reuse_equals_recompute_on_the_first_visit_and_keeps_it_for_later_ones(tokens):
    reuse, recompute = a3po(proximal="reuse"), a3po(proximal="recompute")
    first = batch_of(tokens)
    kept = reuse(first).proximal_log_probs
    assert torch.equal(kept, first.log_probs.detach())
    recomputed = batch_of(tokens, proximal_log_probs=first.log_probs.detach().clone())
    assert torch.equal(gradient(reuse, first), gradient(recompute, recomputed))

    moved = [(log_w + 0.5, advantage, d) for log_w, advantage, d in tokens]
    later, reference = (batch_of(moved, proximal_log_probs=kept) for _ in range(2))
    assert torch.equal(gradient(reuse, later), gradient(recompute, reference))


def test_reuse_isnt_loglinear_and_a_forgotten_proximal_is_seen():
    first = make_batch([0.6], [1.0], 2)
    reuse = a3po(proximal="reuse")
    assert abs(reuse(first).loss - a3po()(first).loss).item() > 1e-3
    kept = reuse(first).proximal_log_probs
    moved = make_batch([1.2], [1.0], 2)
    forgotten = gradient(reuse, moved).item()
    assert abs(gradient(reuse, make_batch([1.2], [1.0], 2, proximal_log_probs=kept)).item() - forgotten) > 1e-3


@QUICK
@given(TOKENS)
def test_the_approximations_error_is_measured_where_both_are_there(tokens):
    batch = batch_of(tokens, proximal_log_probs=torch.full((len(tokens),), -1.5, dtype=torch.float64))
    result = a3po()(batch)
    expected = [(1 - share_of(d)) * abs(log_w) for log_w, _, d in tokens]
    total, count = result.metrics["proximal_error"]
    assert total == pytest.approx(sum(expected), rel=1e-9, abs=1e-12)
    assert count == len(tokens)
    assert result.maxima["proximal_error"] == pytest.approx(max(expected), rel=1e-9, abs=1e-12)
    assert "proximal_error" not in a3po()(batch_of(tokens)).metrics


# --- under periodic asynchrony ----------------------------------------------------------------------


@QUICK
@given(st.lists(st.floats(-3, 3), min_size=1, max_size=12), st.floats(-10, 0))
def test_on_policy_a3po_is_ppo_is_reinforce(advantages, behavior):
    batch = make_batch([0.0] * len(advantages), advantages, 0, behavior=behavior)
    expected = -torch.tensor(advantages, dtype=torch.float64)
    for loss in (A3po(), a3po(fresh="target"), a3po(proximal="reuse"), Ppo()):
        assert torch.equal(gradient(loss, batch), expected)
    result = A3po()(batch)
    assert torch.equal(result.loss, Ppo()(batch).loss)
    assert result.maxima["ratio"] == result.maxima["importance_weight"] == 1
    assert result.metrics["clipped"][0] == result.metrics["capped"][0] == 0


def test_off_policy_it_is_not_reinforce():
    batch = make_batch([0.1], [1.0], 2)
    assert abs(gradient(A3po(), batch).item() + 1.0) > 1e-3


@pytest.mark.parametrize("d, k", [(0, 2), (1, 2), (1, 4), (2, 4)])
def test_several_mini_batches_widen_the_band_as_d_grows(d, k):
    log_w = 1.1 * math.log(1 + HIGH)
    for j in range(k):
        exponent = max(1.0, d + j / k)
        got = gradient(a3po(), make_batch([log_w], [1.0], d, fraction=j / k)).item()
        inside = log_w <= exponent * math.log(1 + HIGH)
        assert got == pytest.approx(-math.exp(log_w) if inside else 0.0, rel=1e-12)
