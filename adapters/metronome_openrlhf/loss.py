"""Our policy losses in the place of OpenRLHF's ``PolicyLoss``.

OpenRLHF's training step calls it with matrices over whole rows, adds its KL and entropy terms to what comes back, and
says nothing of versions; those are read from the experience that the trainer sets before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
import torch
import torch.distributed as dist
from openrlhf.models.loss import aggregate_loss
from openrlhf.models.utils import masked_mean

from metronome.a3po.loss import A3po
from metronome.a3po.metrics import Meter
from metronome.a3po.proximal import UNKNOWN, alpha, loglinear
from metronome.contracts import LossBatch, PolicyLoss, TokenLoss
from metronome.errors import ConfigurationError, MetronomeError
from metronome.loss_check import checked_token_loss

ROW = "metronome_row"
"""Key in a row's ``info``: its number in the buffer, by which a kept proximal policy finds it at a later visit."""


class HostLoss(torch.nn.Module):
    """``PolicyLoss.forward`` around a plug-in; denominators and the way of aggregation are OpenRLHF's.

        sum_t l_t / batch_num_tokens              token-mean
        sum_i mean_t l_t / global_batch_size      seq-mean-token-mean

    times ``dp_size``, over the tokens of ``action_mask``; tool tokens and padding have no loss.

    Args:
        part: whose loss this is.
        token_level: whether the mean is over tokens; else over rows.
        bypassed: whether OpenRLHF's old log-probs are a copy of the engines' (``config.bypasses``).

    Attributes:
        experience: the samples of the next call, with ``versions``; set by the trainer.
        version: the version of the weights in training, the global step; set by the trainer.
        step_fraction: j/k in the j-th of k optimiser steps of one version, see ``LossBatch``; set by the trainer.
        meter: the plug-in's metrics since ``begin``, exact over any split.
    """

    def __init__(self, part: Any, token_level: bool, bypassed: bool) -> None:
        super().__init__()
        self.loss: PolicyLoss = part.selection.loss
        self.token_level, self.bypassed = token_level, bypassed
        self.experience: Any = None
        self.version: int | None = None
        self.begin([])

    def begin(self, rows: Sequence[Any]) -> None:
        """Forgets metrics and kept log-probs, and numbers ``rows``, those of OpenRLHF's buffer, if any are kept."""
        self.meter, self.step_fraction = Meter(), 0.0
        self._kept: dict[int, torch.Tensor] = {}
        if self.loss.keeps_proximal:
            for number, row in enumerate(rows):
                row.info[ROW] = number

    def forward(
        self,
        log_probs: torch.Tensor,
        old_log_probs: torch.Tensor,
        advantages: torch.Tensor,
        action_mask: torch.Tensor | None = None,
        rollout_log_probs: torch.Tensor | None = None,
        dp_size: int = 1,
        batch_num_tokens: Any = None,
        global_batch_size: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """OpenRLHF's ``(loss, clip_ratio, ppo_kl, vllm_kl, is_filter_ratio)``; every matrix is ``(B, A)``.

        ``clip_ratio`` is the share of trained tokens whose minimum is the clipped branch, ``ppo_kl`` the mean of
        ``log pi_old - log pi_theta``, ``vllm_kl`` that of ``log pi_behav - log pi_old``, and ``is_filter_ratio`` the
        share above the importance cap. The last two are None where the old policy is the behaviour policy. Without a
        trained token they are 0.

        Raises MetronomeError if the trainer set no version, ConfigurationError without the engines' log-probs, and
        PluginError for a plug-in that breaks its contract.
        """
        if rollout_log_probs is None or action_mask is None:
            raise ConfigurationError(
                f"loss {self.loss.name!r} needs the log-probs that the rollout engine sampled with",
                where="rollout_log_probs",
                remedy="an agent that returns rollout_log_probs, or leave --metronome.loss out",
            )
        mask = action_mask.bool()
        real = _between(mask)
        lengths = real.sum(1)
        batch = LossBatch(
            log_probs=log_probs[real],
            behavior_log_probs=rollout_log_probs[real].to(log_probs.dtype),
            old_log_probs=None if self.bypassed else old_log_probs[real].to(log_probs.dtype),
            advantages=advantages[real].to(log_probs.dtype),
            mask=mask[real],
            staleness=self._staleness(mask)[real],
            cu_seqlens=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
            step_fraction=self.step_fraction,
        )
        batch.proximal_log_probs = batch.old_log_probs
        rows = self._rows()
        if rows is not None:
            batch.proximal_log_probs = _kept(batch, self._kept, rows)
        result = checked_token_loss(self.loss, batch)
        _note(self.meter, self.loss, batch, result)
        if rows is not None and result.proximal_log_probs is not None:
            self._kept.update(zip(rows, result.proximal_log_probs.split(lengths.tolist()), strict=True))
        tokens = torch.zeros_like(log_probs, dtype=result.loss.dtype).masked_scatter(real, result.loss)
        total = aggregate_loss(
            tokens,
            action_mask,
            token_level_loss=self.token_level,
            dp_size=dp_size,
            batch_num_tokens=batch_num_tokens,
            global_batch_size=global_batch_size,
        )
        drift = _mean(old_log_probs - log_probs.detach(), mask)
        if self.bypassed:
            return total, _share(result, "clipped", log_probs), drift, None, None
        rollout_drift = _mean(rollout_log_probs - old_log_probs, mask)
        return total, _share(result, "clipped", log_probs), drift, rollout_drift, _share(result, "capped", log_probs)

    def gathered(self, group: Any) -> dict[str, float]:
        """The meter's result over all ranks of ``group``, under ``metronome/loss/``; every rank must call."""
        merged = Meter()
        found: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, (self.meter.sums, self.meter.maxima), group=group)
        for sums, maxima in found:
            merged.add(sums, maxima)
        return {f"metronome/loss/{name}": value for name, value in merged.result().items()}

    def _rows(self) -> list[int] | None:
        """The numbers of this call's rows, which OpenRLHF would log as a metric."""
        if not self.loss.keeps_proximal:
            return None
        found = self.experience.info.pop(ROW, None)
        return None if found is None else [int(one) for one in found]

    def _staleness(self, mask: torch.Tensor) -> torch.Tensor:
        """``(B, A)`` trained minus sampled version; -1 unknown, below that a later version."""
        if self.version is None:
            raise MetronomeError(
                "the update doesn't say which version is trained",
                where="HostLoss.version",
                remedy="MetronomePolicy.metronome_version before the update",
            )
        sampled = None if self.experience is None else self.experience.versions
        if sampled is None:
            return torch.full(mask.shape, UNKNOWN, dtype=torch.long, device=mask.device)
        staleness = self.version - sampled
        # One version ahead would be -1 and pass for unknown: later versions are counted from -2 downwards.
        staleness = torch.where(staleness < 0, staleness - 1, staleness)
        return torch.where(sampled < 0, UNKNOWN, staleness)


def announce(actors: Any, part: Any, version: int) -> None:
    """Tells our loss in the actor workers which version of the weights the next update trains."""
    if part.own_loss:
        ray.get(actors.async_run_method(method_name="metronome_version", version=version))


def _between(mask: torch.Tensor) -> torch.Tensor:
    """True from a row's first trained token to its last, tool tokens in between included."""
    count = mask.cumsum(1)
    return (count > 0) & (count - mask.long() < count[:, -1:])


def _kept(batch: LossBatch, store: dict[int, torch.Tensor], rows: list[int]) -> torch.Tensor | None:
    """Proximal log-probs of earlier visits; rows seen for the first time take today's, as a first visit does."""
    if not any(row in store for row in rows):
        return None
    today = batch.log_probs.detach().split(batch.cu_seqlens.diff().tolist())
    return torch.cat([store.get(row, now).to(now.dtype) for row, now in zip(rows, today, strict=True)])


def _mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """OpenRLHF's mean over trained tokens; 0 where there is none, which OpenRLHF's isn't a number for."""
    found: torch.Tensor = masked_mean(values, mask) if bool(mask.any()) else values.new_zeros(())
    return found.detach()


def _share(result: TokenLoss, name: str, like: torch.Tensor) -> torch.Tensor:
    total, count = result.metrics.get(name, (0.0, 0.0))
    return like.new_tensor(total / count if count else 0.0)


@torch.no_grad()
def _note(meter: Meter, loss: PolicyLoss, batch: LossBatch, result: TokenLoss) -> None:
    """The plug-in's metrics, the fraction of unknown versions, and for a3po that of ``pi_prox != pi_behav``."""
    meter.add(result.metrics, result.maxima)
    found = {"version_unknown": batch.staleness == UNKNOWN}
    if isinstance(loss, A3po) and loss.options.proximal != "behavior":
        proximal = result.proximal_log_probs if loss.keeps_proximal else batch.proximal_log_probs
        if loss.options.proximal == "loglinear":
            share = alpha(batch.staleness, batch.step_fraction, loss.options.fresh, strict=False)
            proximal = loglinear(batch.behavior_log_probs, batch.log_probs, share.to(batch.log_probs.dtype))
        assert proximal is not None
        found["off_behavior"] = proximal != batch.behavior_log_probs
    counts = torch.stack([batch.mask, *(batch.mask & where for where in found.values())]).sum(1).tolist()
    meter.add({name: (float(count), float(counts[0])) for name, count in zip(found, counts[1:], strict=True)}, {})
