"""Our policy losses in the place of AReaL's ``grpo_loss_fn``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from areal.trainer.ppo.stats import infer_token_denominator
from areal.utils import stats_tracker

from metronome.a3po.loss import A3po
from metronome.a3po.metrics import Meter
from metronome.a3po.ppo import Ppo
from metronome.a3po.proximal import UNKNOWN, alpha, loglinear
from metronome.contracts import LossBatch, PolicyLoss, TokenLoss
from metronome.errors import ConfigurationError
from metronome.loss_check import checked_token_loss


class HostLoss:
    """A plug-in's loss, as AReaL's engine calls it: packed rows in, the mean over trained tokens out.

        loss = (1 / n) sum_t l_t,   n = trained tokens of the micro-batch

    The engine weighs a micro-batch by n over the batch's tokens, so that the batch's loss is token-mean.

    Attributes:
        version: the version in training; set before each update.
        step_fraction: j/k in the j-th of k optimiser steps of one version, see ``LossBatch``.
        meter: the plug-in's metrics since ``begin``, exact over any split.
    """

    def __init__(self, loss: PolicyLoss) -> None:
        self.loss = loss
        self.version = 0
        self.begin()

    def begin(self) -> None:
        """Forgets the metrics."""
        self.meter, self.step_fraction, self.calls = Meter(), 0.0, 0

    def __call__(
        self,
        logprobs: torch.Tensor,
        entropy: torch.Tensor,
        input_data: dict[str, Any],
        vocab_min_logits: torch.Tensor | None = None,
        vocab_max_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``logprobs [T]`` of packed rows, at the place of the token before; AReaL's metrics are recorded as there.

        Raises ConfigurationError without versions or, for a loss that needs it, a proximal forward.
        """
        self.calls += 1
        batch, real = self._batch(logprobs, input_data)
        result = checked_token_loss(self.loss, batch)
        anchor = _anchor(self.loss, batch, result)
        _note(self.meter, batch, result, anchor)
        mask = input_data["loss_mask"].bool()
        tokens = torch.zeros_like(logprobs, dtype=result.loss.dtype).masked_scatter(real, result.loss)
        old = None if anchor is None else torch.zeros_like(logprobs).masked_scatter(real, anchor.to(logprobs.dtype))
        _record(logprobs, old, entropy, input_data, mask, tokens.detach(), vocab_min_logits, vocab_max_logits)
        return tokens.sum() / mask.count_nonzero().clamp(min=1)

    def gathered(self, group: Any) -> dict[str, float]:
        """The meter's result over all ranks of ``group``; every rank must call."""
        merged = Meter()
        found: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, (self.meter.sums, self.meter.maxima, self.calls), group=group)
        for sums, maxima, _ in found:
            merged.add(sums, maxima)
        shown = {f"metronome/loss/{name}": value for name, value in merged.result().items()}
        return shown | {"metronome/loss/calls": float(sum(calls for *_, calls in found))}

    def _batch(self, logprobs: torch.Tensor, data: dict[str, Any]) -> tuple[LossBatch, torch.Tensor]:
        if "versions" not in data:
            raise ConfigurationError(
                f"loss {self.loss.name!r} needs the version of every token",
                where="the workflow's result",
                remedy="versions beside logprobs, as RLVRWorkflow returns them",
            )
        mask = data["loss_mask"].bool()
        cu = data["cu_seqlens"].to(torch.long)
        real, lengths = _between(mask, cu)
        proximal = data.get("prox_logp")
        if proximal is None and self.loss.needs_proximal_forward:
            raise ConfigurationError(
                f"loss {self.loss.name!r} needs a forward pass for the proximal policy",
                where="actor.prox_logp_method",
                remedy="recompute",
            )
        behaviour = data["logprobs"][real].to(logprobs.dtype)
        batch = LossBatch(
            log_probs=logprobs[real],
            behavior_log_probs=behaviour,
            old_log_probs=None if proximal is None else proximal[real].to(logprobs.dtype),
            advantages=data["advantages"][real].to(logprobs.dtype),
            mask=mask[real],
            staleness=staleness_of(data["versions"], self.version)[real],
            cu_seqlens=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
            step_fraction=self.step_fraction,
        )
        batch.proximal_log_probs = batch.old_log_probs
        return batch, real


def staleness_of(versions: torch.Tensor, version: int) -> torch.Tensor:
    """Trained minus sampled version; -1 unknown, below that a later version."""
    staleness = version - versions.long()
    # One version ahead would be -1 and pass for unknown: later versions are counted from -2 downwards.
    staleness = torch.where(staleness < 0, staleness - 1, staleness)
    return torch.where(versions < 0, UNKNOWN, staleness)


def _between(mask: torch.Tensor, cu_seqlens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """True from a row's first trained token to its last, tool tokens in between included; and how many, per row."""
    rows = cu_seqlens.diff()
    row = torch.repeat_interleave(torch.arange(len(rows), device=mask.device), rows, output_size=len(mask))
    count = mask.long().cumsum(0)
    before = torch.nn.functional.pad(count, (1, 0))[cu_seqlens]
    seen, total = count - before[:-1][row], before.diff()[row]
    real = (seen > 0) & (seen - mask.long() < total)
    return real, torch.zeros_like(rows).index_add_(0, row, real.long())


@torch.no_grad()
def _anchor(loss: PolicyLoss, batch: LossBatch, result: TokenLoss) -> torch.Tensor | None:
    """The log-probs that the trained policy's ratio is taken to, of our own losses; None of another plug-in's."""
    old = batch.old_log_probs
    if isinstance(loss, Ppo):
        return batch.behavior_log_probs if old is None or loss.options.anchor == "behavior" else old
    if not isinstance(loss, A3po):
        return None
    if loss.options.proximal == "behavior":
        return batch.behavior_log_probs
    if loss.options.proximal == "loglinear":
        share = alpha(batch.staleness, batch.step_fraction, loss.options.fresh, strict=False)
        return loglinear(batch.behavior_log_probs, batch.log_probs, share.to(batch.log_probs.dtype))
    return result.proximal_log_probs if loss.keeps_proximal else batch.proximal_log_probs


@torch.no_grad()
def _record(
    logprobs: torch.Tensor,
    anchor: torch.Tensor | None,
    entropy: torch.Tensor,
    data: dict[str, Any],
    mask: torch.Tensor,
    tokens: torch.Tensor,
    low: torch.Tensor | None,
    high: torch.Tensor | None,
) -> None:
    """What AReaL records of an update, under its names and with its meanings."""
    shown = {
        "new_logp": logprobs.detach(),
        "old_logp": data["logprobs"],
        "entropy": entropy.detach(),
        "actor_loss": tokens,
    }
    if anchor is not None:
        drift = torch.where(mask, logprobs - anchor, 0.0)
        shown |= {"importance_weight": torch.where(mask, drift.exp(), 0.0), "approx_kl": drift}
    stats_tracker.denominator(n_tokens=infer_token_denominator(data, mask), n_valid_tokens=mask)
    stats_tracker.stat(**{name: value.float() for name, value in shown.items()}, denominator="n_valid_tokens")
    if low is not None and high is not None:
        stats_tracker.stat(vocab_min_logits=low, vocab_max_logits=high, denominator="n_tokens")


@torch.no_grad()
def _note(meter: Meter, batch: LossBatch, result: TokenLoss, anchor: torch.Tensor | None) -> None:
    """The plug-in's metrics, the fraction of unknown versions, and that of ``pi_prox != pi_behav``."""
    meter.add(result.metrics, result.maxima)
    found = {"version_unknown": batch.staleness == UNKNOWN}
    if anchor is not None:
        found["off_behavior"] = anchor != batch.behavior_log_probs
    counts = torch.stack([batch.mask, *(batch.mask & where for where in found.values())]).sum(1).tolist()
    meter.add({name: (float(count), float(counts[0])) for name, count in zip(found, counts[1:], strict=True)}, {})
