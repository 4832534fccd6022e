"""Metrics of the losses, their dtypes, and what they refuse."""

from __future__ import annotations

import math

import pytest
import torch
from a3po_batches import (
    CAP,
    a3po,
    gradient,
    make_batch,
    ppo,
)

from metronome.a3po import plugin
from metronome.a3po.loss import A3po
from metronome.a3po.ppo import Ppo
from metronome.errors import MetronomeError, VersionMismatch


def test_metrics_count_the_trained_tokens_before_the_cap():
    batch = make_batch([0.0, math.log(50.0), 9.0, 0.5], 1.0, torch.tensor([0, 2, 7, -1]))
    batch.mask[2] = False
    result = a3po(cap=CAP)(batch)
    assert result.metrics["staleness"] == (2, 2)
    assert result.maxima["staleness"] == 2
    assert result.metrics["capped"] == (1, 3)
    assert result.metrics["clipped"] == (2, 3)
    total, count = result.metrics["importance_weight"]
    assert (total, count) == (pytest.approx(2 + math.sqrt(50.0)), 3)
    assert result.maxima["importance_weight"] == pytest.approx(math.sqrt(50.0))
    kl = sum(math.exp(x) - 1 - x for x in (0.0, math.log(50.0), 0.5))
    assert result.metrics["approx_kl"][0] == pytest.approx(kl)


@pytest.mark.parametrize("loss", [a3po(), ppo()], ids=["a3po", "ppo"])
def test_a_token_outside_the_band_counts_as_clipped_only_where_it_loses_its_gradient(loss):
    batch = make_batch([1.0, -1.0, 1.0, -1.0, 1.0], [1.0, 1.0, -1.0, -1.0, 0.0], 1)
    assert (gradient(loss, batch) == 0).tolist() == [True, False, False, True, True]
    assert loss(batch).metrics["clipped"] == (2, 5)  # with advantage 0 there was no gradient to lose


def test_ppo_clips_against_the_old_policy_unless_told_otherwise():
    old = torch.tensor([-1.3], dtype=torch.float64)
    batch = make_batch([0.2], [1.0], 1, old=old)
    assert ppo()(batch).maxima["ratio"] == pytest.approx(1.0)
    assert ppo(anchor="behavior")(batch).maxima["ratio"] == pytest.approx(math.exp(0.2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_log_probs_are_computed_in_float32(dtype):
    batch = make_batch([0.5, -0.5], [1.0, -1.0], 2)
    low = make_batch([0.5, -0.5], [1.0, -1.0], 2)
    low.log_probs = batch.log_probs.detach().to(dtype).requires_grad_()
    result = a3po()(low)
    assert result.loss.dtype == torch.float32
    assert torch.allclose(result.loss.double(), a3po()(batch).loss, rtol=1e-5)
    assert gradient(a3po(), low).dtype == dtype


@pytest.mark.parametrize("loss", [a3po(), ppo(anchor="behavior")], ids=["a3po", "ppo"])
@pytest.mark.parametrize("name", ["log_probs", "behavior_log_probs", "advantages"])
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_a_value_that_isnt_finite_is_counted_and_located(loss, name, bad):
    batch = make_batch([0.0, 0.1, 0.2, 0.3], 1.0, 1)
    value = getattr(batch, name).detach().clone()
    value[1:3] = bad
    setattr(batch, name, value.requires_grad_(name == "log_probs"))
    with pytest.raises(MetronomeError, match=rf"{name} of 2 trained token.*first at token 1;"):
        loss(batch)
    batch.mask = torch.tensor([True, False, False, True])
    assert loss(batch).metrics["ratio"][1] == 2


def test_a_ratio_that_overflows_is_refused_and_located():
    batch = make_batch([0.0, 800.0], 1.0, 1)
    with pytest.raises(MetronomeError, match=r"1 trained token.*overflows.*first at token 1"):
        a3po()(batch)


def test_a_future_version_stops_every_mode_unless_told_otherwise():
    for proximal in ("loglinear", "reuse", "behavior"):
        batch = make_batch([0.1, 0.1], 1.0, torch.tensor([0, -2]))
        with pytest.raises(VersionMismatch, match=r"found -2; in LossBatch\.staleness, first at token 1"):
            a3po(proximal=proximal)(batch)
        lenient = a3po(proximal=proximal, strict=False)(batch)
        assert lenient.metrics["staleness"] == (0, 1)
    batch = make_batch([0.1, 0.1], 1.0, torch.tensor([0, -2]), mask=torch.tensor([True, False]))
    assert a3po()(batch).metrics["staleness"] == (0, 1)


WRONG = {
    "log_probs": (torch.zeros(2, 2), "packed in one dimension"),
    "behavior_log_probs": (torch.zeros(3), r"shape of log_probs, \[2\]"),
    "advantages": (torch.zeros(2, dtype=torch.long), "floating-point"),
    "mask": (torch.ones(2), "bool"),
    "staleness": (torch.zeros(2), "integer"),
    "proximal_log_probs": (torch.zeros(1), "shape of log_probs"),
    "cu_seqlens": (torch.tensor([0, 3]), "rise from 0 to the 2 tokens"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_shape_or_type_is_named(name):
    batch = make_batch([0.0, 0.1], 1.0, 1)
    value, sentence = WRONG[name]
    setattr(batch, name, value)
    with pytest.raises(MetronomeError, match=sentence) as caught:
        a3po()(batch)
    assert f"LossBatch.{name}" in str(caught.value)


@pytest.mark.parametrize("bounds", [[1, 2], [0, 2, 1, 2], []])
def test_wrong_row_boundaries_are_refused(bounds):
    batch = make_batch([0.0, 0.1], 1.0, 1)
    batch.cu_seqlens = torch.tensor(bounds, dtype=torch.long)
    with pytest.raises(MetronomeError, match="cu_seqlens"):
        a3po()(batch)


def test_the_plugin_builds_both_losses_with_their_options():
    loss = plugin.policy_loss("a3po", {"proximal": "reuse", "cap": 2})
    assert isinstance(loss, A3po)
    assert (loss.options.cap, loss.keeps_proximal, loss.needs_proximal_forward) == (2.0, True, False)
    plain = plugin.policy_loss("ppo", {"clip_high": 0.28})
    assert isinstance(plain, Ppo)
    assert plain.options.clip_high == 0.28
