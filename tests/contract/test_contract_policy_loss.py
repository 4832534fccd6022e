"""Our losses through the public contract test, and broken losses that it must refuse."""

from __future__ import annotations

import pytest
import torch

from metronome.a3po.loss import A3po
from metronome.a3po.options import A3poOptions, PpoOptions
from metronome.a3po.ppo import Ppo
from metronome.contracts import LossBatch, TokenLoss
from metronome.testing.policy_loss import check_policy_loss

A3PO = [
    {},
    {"fresh": "target"},
    {"cap": None},
    {"cap": 1.05},
    {"cap": 1.05, "cap_mode": "truncate"},
    {"importance_weight": False},
    {"dual_clip": 1.5, "clip_high": 0.28},
    {"proximal": "recompute"},
    {"proximal": "recompute", "cap": 1.05, "cap_mode": "truncate"},
    {"proximal": "reuse"},
    {"proximal": "behavior"},
]
PPO = [{}, {"anchor": "behavior"}, {"clip_low": 0.1, "clip_high": 0.6, "dual_clip": 3.0}]


@pytest.mark.parametrize("options", A3PO, ids=str)
def test_a3po_keeps_the_contract(options):
    check_policy_loss(A3po(A3poOptions(**options)))


@pytest.mark.parametrize("options", PPO, ids=str)
def test_ppo_keeps_the_contract(options):
    check_policy_loss(Ppo(PpoOptions(**options)))


class Broken:
    """A correct small loss, and one method per way to break it."""

    name, needs_proximal_forward, keeps_proximal = "broken", False, False

    def __init__(self, fault: str) -> None:
        self.fault, self.calls = fault, 0
        self.keeps_proximal = fault == "forgets the proximal"

    def __call__(self, batch: LossBatch) -> TokenLoss:
        self.calls += 1
        high = torch.float64 if batch.log_probs.dtype == torch.float64 else torch.float32
        log_probs, behavior = batch.log_probs.to(high), batch.behavior_log_probs.to(high)
        if self.fault != "leaks through the anchor":
            behavior = behavior.detach()
        advantages = batch.advantages.detach().to(high)
        drift = log_probs - behavior
        if self.fault != "NaN behind the mask":
            drift = torch.where(batch.mask, drift, 0.0)
        advantages = torch.where(batch.mask, advantages, 0.0)
        loss = torch.where(batch.mask, -torch.exp(drift) * advantages, 0.0)
        count = float(batch.mask.sum())
        metrics = {"ratio": (float(torch.where(batch.mask, drift.detach().exp(), 0.0).sum()), count)}
        match self.fault:
            case "normalises":
                loss = loss / max(count, 1)
            case "is a scalar":
                loss = loss.sum()
            case "half precision":
                loss = loss.to(batch.log_probs.dtype)
            case "no gradient":
                loss = loss.detach()
            case "changes between calls":
                loss = loss * self.calls
            case "metrics are means":
                metrics = {"ratio": (metrics["ratio"][0] / max(count, 1), 1.0 if count else 0.0)}
            case "pulls without an advantage":
                pull = 0.1 * torch.where(batch.mask, log_probs, 0.0)
                loss = -torch.where(batch.mask, log_probs * advantages, 0.0) - pull
            case "writes into its input":
                batch.advantages.detach().mul_(0.5)
        return TokenLoss(loss, metrics)


FAULTS = {
    "normalises": "micro-batches",
    "is a scalar": "per token",
    "half precision": r"must be torch\.float32",
    "no gradient": "must carry a gradient",
    "leaks through the anchor": "behavior_log_probs must be detached",
    "NaN behind the mask": "where the mask is False",
    "changes between calls": "same batch twice",
    "metrics are means": "must add",
    "pulls without an advantage": "zero where the advantage is zero: hosts leave out groups",
    "writes into its input": "as it is",
    "forgets the proximal": "keeps_proximal is set",
}


@pytest.mark.parametrize("fault, sentence", FAULTS.items())
def test_a_broken_loss_is_refused_with_a_sentence(fault, sentence):
    with pytest.raises(AssertionError, match=sentence):
        check_policy_loss(Broken(fault))


def test_the_small_loss_without_a_fault_passes():
    check_policy_loss(Broken("none"))


def test_an_object_without_the_attributes_is_refused():
    with pytest.raises(AssertionError, match="PolicyLoss"):
        check_policy_loss(object())
