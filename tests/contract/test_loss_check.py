"""A stranger's loss, as a host calls it: every breach is one PluginError that names the loss."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from metronome.a3po.loss import A3po
from metronome.a3po.ppo import Ppo
from metronome.contracts import LossBatch, TokenLoss
from metronome.errors import MetronomeError, PluginError, VersionMismatch
from metronome.loss_check import checked_token_loss
from metronome.testing.policy_loss import sample_batch


class Loss:
    name, needs_proximal_forward, keeps_proximal = "strange", False, False

    def __init__(self, answer):
        self.answer = answer

    def __call__(self, batch: LossBatch):
        return self.answer(batch)


def plain(batch):
    return -batch.log_probs * batch.advantages


BREACHES = {
    "None": (lambda batch: None, "returned no TokenLoss; found 'NoneType'"),
    "a tensor": (plain, "returned no TokenLoss; found 'Tensor'"),
    "the class": (lambda batch: TokenLoss, "returned no TokenLoss; found 'type'"),
    "a list": (lambda batch: TokenLoss([0.0] * 17), "is no tensor; found 'list'"),
    "a scalar": (lambda batch: TokenLoss(plain(batch).sum()), r"shape \[17\]; found \[\]"),
    "a column": (lambda batch: TokenLoss(plain(batch)[:, None]), r"shape \[17\]; found \[17, 1\]"),
    "one token short": (lambda batch: TokenLoss(plain(batch)[1:]), r"shape \[17\]; found \[16\]"),
    "whole numbers": (lambda batch: TokenLoss(plain(batch).long()), "floating-point loss; found 'torch.int64'"),
    "detached": (lambda batch: TokenLoss(plain(batch).detach()), "without a gradient"),
    "elsewhere": (lambda batch: TokenLoss(plain(batch).to("meta")), "its loss on cpu; found 'meta'"),
    "an exception": (lambda batch: {}["lost"], "raised: KeyError: 'lost'"),
    "an exit": (lambda batch: exit(0), "raised: SystemExit: 0"),
}


@pytest.mark.parametrize("breach", BREACHES)
def test_a_breach_is_one_line_that_names_the_loss(breach):
    answer, message = BREACHES[breach]
    loss = Loss(answer)
    with pytest.raises(PluginError, match=message) as error:
        checked_token_loss(loss, sample_batch(loss))
    assert "policy loss 'strange'" in str(error.value)
    assert "\n" not in str(error.value)
    assert error.value.exit_code == 2


def test_a_metronome_error_and_ctrl_c_go_through_as_they_are():
    for wrong in (VersionMismatch("from the future"), KeyboardInterrupt()):

        def answer(batch, wrong=wrong):
            raise wrong

        loss = Loss(answer)
        with pytest.raises(type(wrong)) as error:
            checked_token_loss(loss, sample_batch(loss))
        assert error.value is wrong


@pytest.mark.parametrize("loss", [A3po(), Ppo(), Loss(lambda batch: TokenLoss(plain(batch)))], ids=lambda one: one.name)
def test_a_sound_loss_is_handed_on_as_it_is(loss):
    batch = sample_batch(loss)
    assert torch.equal(checked_token_loss(loss, batch).loss, loss(batch).loss)
    with torch.no_grad():
        still = replace(batch, log_probs=batch.log_probs.detach())
        assert not checked_token_loss(loss, still).loss.requires_grad
    for lengths in ((), (0,)):
        empty = sample_batch(loss, lengths=lengths)
        assert checked_token_loss(loss, empty).loss.shape == (0,)


def test_nothing_is_read_from_the_device():
    """Meta tensors have shapes and no values: reading one raises."""
    loss = Loss(lambda batch: TokenLoss(plain(batch)))
    batch = sample_batch(loss)
    batch = replace(
        batch,
        log_probs=batch.log_probs.detach().to("meta").requires_grad_(),
        advantages=batch.advantages.to("meta"),
        mask=batch.mask.to("meta"),
    )
    assert checked_token_loss(loss, batch).loss.device.type == "meta"
    with pytest.raises(MetronomeError, match="raised"):
        checked_token_loss(Loss(lambda batch: TokenLoss(plain(batch)) if plain(batch).any() else None), batch)
