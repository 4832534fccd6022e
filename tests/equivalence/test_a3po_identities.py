"""What A-3PO is, in float64 against formulas written by hand; each identity with a negative control.

w = pi_theta / pi_behav, d = staleness. The oracles are plain Python: they share no code with the loss.
"""

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
    away_from_edges,
    banded_ppo,
    batch_of,
    close,
    gradient,
    make_batch,
    ppo,
    share_of,
)
from hypothesis import assume, given
from hypothesis import strategies as st

from metronome.a3po.proximal import alpha
from metronome.errors import MetronomeError, VersionMismatch

# --- alpha ----------------------------------------------------------------------------------------

TABLE = [(0, 0, 1), (0, 0.25, 1), (1, 0, 1), (2, 0, 1 / 2), (4, 0, 1 / 4), (8, 0, 1 / 8), (1, 0.5, 1 / 1.5)]


@pytest.mark.parametrize("staleness, fraction, expected", TABLE)
def test_alpha_follows_the_table(staleness, fraction, expected):
    got = alpha(torch.tensor([staleness]), fraction, dtype=torch.float64)
    assert got.item() == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("fresh", ["behavior", "target"])
@pytest.mark.parametrize("fraction", [0.0, 0.25, 0.999])
def test_an_unknown_version_is_never_interpolated(fresh, fraction):
    assert alpha(torch.tensor([-1]), fraction, fresh).item() == 1


def test_fresh_decides_the_anchor_at_staleness_zero_only():
    staleness = torch.tensor([0, 1, 2])
    assert alpha(staleness, fresh="behavior").tolist() == [1, 1, 0.5]
    assert alpha(staleness, fresh="target").tolist() == [0, 1, 0.5]
    assert alpha(staleness, 0.5, "target").tolist() == pytest.approx([1, 1 / 1.5, 0.4])


def test_a_future_version_is_refused_and_named():
    with pytest.raises(VersionMismatch, match=r"2 trained token.*found -3; in .*first at token 1"):
        alpha(torch.tensor([0, -3, -2]))
    assert alpha(torch.tensor([0, -3, -1]), strict=False).tolist() == [1, 1, 1]


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_a_fraction_outside_its_range_is_refused(fraction):
    with pytest.raises(MetronomeError, match="step_fraction"):
        alpha(torch.tensor([2]), fraction)


@QUICK
@given(st.integers(0, 3), st.integers(1, 8))
def test_staleness_grows_within_a_period_and_is_clamped(staleness, k):
    shares = [alpha(torch.tensor([staleness]), j / k, dtype=torch.float64).item() for j in range(k)]
    expected = [min(1.0, 1 / d) if (d := staleness + j / k) else 1.0 for j in range(k)]
    assert shares == pytest.approx(expected, rel=1e-15)
    assert shares == sorted(shares, reverse=True)


# --- the band identity ----------------------------------------------------------------------------


@QUICK
@given(TOKENS)
def test_the_gradient_is_ppos_with_a_band_widened_by_the_exponent_d(tokens):
    assume(away_from_edges(tokens))
    expected = [banded_ppo(log_w, advantage, share_of(d)) for log_w, advantage, d in tokens]
    assert close(gradient(a3po(), batch_of(tokens)), expected)


def test_the_band_is_not_the_unwidened_one_at_staleness_two():
    log_w = 1.5 * math.log(1 + HIGH)  # outside PPO's band, inside A-3PO's
    batch = make_batch([log_w], [1.0], 2)
    assert abs(gradient(a3po(), batch).item() - banded_ppo(log_w, 1.0, 1.0)) > 1e-3
    assert gradient(ppo(), batch).item() == banded_ppo(log_w, 1.0, 1.0) == 0


@QUICK
@given(TOKENS, st.sampled_from([-1, 0, 1]))
def test_up_to_staleness_one_it_is_plain_ppo_bit_by_bit(tokens, d):
    batch = batch_of([(log_w, advantage, d) for log_w, advantage, _ in tokens])
    ours, plain = a3po()(batch), ppo()(batch)
    assert torch.equal(ours.loss, plain.loss)
    assert torch.equal(gradient(a3po(), batch), gradient(ppo(), batch))


@QUICK
@given(TOKENS)
def test_proximal_behavior_is_plain_ppo_at_any_staleness(tokens):
    batch = batch_of(tokens)
    assert torch.equal(a3po(proximal="behavior")(batch).loss, ppo()(batch).loss)
    assert torch.equal(a3po(proximal="behavior")(batch).loss, ppo(anchor="behavior")(batch).loss)


def test_at_staleness_two_it_is_not_plain_ppo():
    batch = make_batch([0.4], [1.0], 2)
    assert abs(gradient(a3po(), batch) - gradient(ppo(), batch)).item() > 1e-3


@QUICK
@given(TOKENS)
def test_leaving_out_the_importance_weight_gives_the_tempered_estimator(tokens):
    assume(away_from_edges(tokens))
    expected = [
        banded_ppo(log_w, advantage, share_of(d), weight=math.exp(share_of(d) * log_w))
        for log_w, advantage, d in tokens
    ]
    assert close(gradient(a3po(importance_weight=False), batch_of(tokens)), expected)


def test_the_tempered_estimator_differs_from_the_weighted_one():
    batch = make_batch([0.4], [1.0], 2)
    assert abs(gradient(a3po(), batch) - gradient(a3po(importance_weight=False), batch)).item() > 1e-3


def test_fresh_target_never_clips_at_staleness_zero_while_fresh_behavior_does():
    batch = make_batch([2.0, -2.0], [1.0, -1.0], 0)
    target = a3po(fresh="target")(batch)
    assert target.metrics["clipped"] == (0, 2)
    assert close(gradient(a3po(fresh="target"), batch), [-math.exp(2.0), math.exp(-2.0)])
    assert a3po()(batch).metrics["clipped"] == (2, 2)


@QUICK
@given(TOKENS)
def test_dual_clip_bounds_negative_advantages_only(tokens):
    bound = 2.0
    assume(away_from_edges(tokens))
    assume(all(abs(share_of(d) * log_w - math.log(bound)) > 1e-9 for log_w, _, d in tokens))
    got = gradient(a3po(dual_clip=bound), batch_of(tokens))
    for value, (log_w, advantage, d) in zip(got.tolist(), tokens, strict=True):
        bounded = advantage < 0 and share_of(d) * log_w > math.log(bound)
        expected = 0.0 if bounded else banded_ppo(log_w, advantage, share_of(d))
        assert value == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_dual_clip_acts():
    batch = make_batch([1.0], [-1.0], 1)
    assert gradient(ppo(dual_clip=2.0), batch).item() == 0
    assert ppo(dual_clip=2.0)(batch).loss.item() == pytest.approx(2.0)
    assert ppo(dual_clip=2.0)(batch).metrics["dual_clipped"] == (1, 1)
    assert gradient(ppo(), batch).item() == pytest.approx(math.e)


# --- the cap --------------------------------------------------------------------------------------


@QUICK
@given(TOKENS)
def test_the_mask_drops_exactly_what_lies_above_the_cap(tokens):
    assume(away_from_edges(tokens))
    assume(all(abs((1 - share_of(d)) * log_w - math.log(CAP)) > 1e-9 for log_w, _, d in tokens))
    result = a3po(cap=CAP)(batch_of(tokens))
    got = gradient(a3po(cap=CAP), batch_of(tokens)).tolist()
    capped = 0
    for value, loss, (log_w, advantage, d) in zip(got, result.loss.tolist(), tokens, strict=True):
        share = share_of(d)
        dropped = share < 1 and log_w > math.log(CAP) / (1 - share)
        capped += dropped
        assert not dropped or loss == 0
        expected = 0.0 if dropped else banded_ppo(log_w, advantage, share)
        assert value == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert result.metrics["capped"] == (capped, len(tokens))


def test_the_cap_of_five_drops_above_twenty_five_at_staleness_two_and_never_at_one():
    log_w = [math.log(24.9), math.log(25.1)]
    assert (gradient(a3po(cap=CAP), make_batch(log_w, -1.0, 2)) != 0).tolist() == [True, False]
    assert (gradient(a3po(cap=CAP), make_batch(log_w, -1.0, 1)) != 0).tolist() == [True, True]
    assert (gradient(a3po(), make_batch(log_w, -1.0, 2)) != 0).tolist() == [True, True]


@QUICK
@given(TOKENS)
def test_truncation_gives_min_of_w_and_cap_times_w_to_the_alpha(tokens):
    assume(away_from_edges(tokens))
    expected = [
        banded_ppo(
            log_w,
            advantage,
            share_of(d),
            weight=min(math.exp(log_w), CAP * math.exp(share_of(d) * log_w)),
        )
        for log_w, advantage, d in tokens
    ]
    assert close(gradient(a3po(cap=CAP, cap_mode="truncate"), batch_of(tokens)), expected)


def test_truncation_differs_from_no_cap_and_from_the_mask():
    batch = make_batch([math.log(50.0)], [-1.0], 2)
    truncated, free, masked = (
        gradient(a3po(**options), batch).item() for options in ({"cap": CAP, "cap_mode": "truncate"}, {}, {"cap": CAP})
    )
    assert masked == 0
    assert truncated == pytest.approx(CAP * math.sqrt(50.0))
    assert free == pytest.approx(50.0)
