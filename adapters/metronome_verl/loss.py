"""Our policy losses in verl's loss signature.

verl hands a registered policy loss no versions and no rollout log-probs, but the whole loss function of a worker sees
every field of the samples. So the whole function is replaced; what it adds around the policy loss (``agg_loss``,
entropy, KL) are verl's own functions, called as verl's ``ppo_loss`` calls them.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import agg_loss, kl_penalty
from verl.utils import tensordict_utils as tu
from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.padding import no_padding_2_padding

from metronome.a3po.loss import A3po
from metronome.a3po.metrics import Meter
from metronome.a3po.proximal import alpha, loglinear
from metronome.contracts import LossBatch, PolicyLoss, TokenLoss
from metronome.errors import ConfigurationError, MetronomeError
from metronome.loss_check import checked_token_loss
from metronome_verl.level import everywhere
from metronome_verl.versions import UNKNOWN, token_versions

VERSION = "metronome_version"
"""Key of a batch's extra info: the version of the weights in training, ``global_steps - 1`` in verl's numbering."""

OLD_LOG_PROBS = "metronome_old_log_probs"
"""Key of a batch's extra info: ``behavior`` (verl's bypass mode, the default) or ``trainer`` (a forward pass ran)."""

PROGRESS = "metronome_progress"
"""Key of a batch's extra info: ``(i, n)``, the i-th (from 0) of n updates between two publications; (0, 1)."""

ROW = "metronome_row"
"""Field of a batch: each row's number, by which a kept proximal policy finds its row again."""

PREFIX = "metronome/loss/"

_NEEDED = ("response_mask", "loss_mask", "advantages", "rollout_log_probs")
_OPTIONAL = ("old_log_probs", "ref_log_prob", "rollout_is_weights")


class HostLoss:
    """``fn(model_output, data, dp_group) -> (loss, metrics)`` around a plug-in, as verl's workers call it.

    Attributes:
        meter: the plug-in's metrics since ``begin``, exact over any split; ``calls`` counts its calls.
        step_fraction: j/k in the j-th of k optimiser steps of one version, see ``LossBatch``.
    """

    def __init__(self, config: Any, loss: PolicyLoss) -> None:
        self.config, self.loss = config, loss
        self.begin()

    def begin(self) -> None:
        """Forgets metrics and kept proximal log-probs."""
        self.meter, self.calls, self.step_fraction = Meter(), 0, 0.0
        self._kept: dict[int, torch.Tensor] = {}

    def __call__(
        self, model_output: Any, data: TensorDict, dp_group: Any = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Calls ``policy_loss`` with what ``data`` says about versions and old log-probs.

        Raises MetronomeError if the trainer left no version.
        """
        version = tu.get_non_tensor_data(data, VERSION, None)
        if version is None:
            raise MetronomeError(
                "the batch doesn't say which version is trained",
                where=f"extra_info[{VERSION!r}]",
                remedy="trainer.v1.trainer_mode=metronome, which sets it",
            )
        rows = data[ROW].tolist() if self.loss.keeps_proximal and ROW in data else None
        self.calls += 1
        return policy_loss(
            self.config,
            model_output,
            data,
            dp_group,
            loss=self.loss,
            training_version=int(version),
            meter=self.meter,
            bypassed=tu.get_non_tensor_data(data, OLD_LOG_PROBS, "behavior") == "behavior",
            step_fraction=self.step_fraction,
            kept=None if rows is None else (self._kept, rows),
        )

    def gathered(self, group: Any) -> dict[str, float]:
        """The meter's result over all ranks of ``group``, under ``metronome/loss/``; every rank must call."""
        merged, calls = Meter(), 0
        for sums, maxima, called in everywhere((self.meter.sums, self.meter.maxima, self.calls), group):
            merged.add(sums, maxima)
            calls += called
        return {f"{PREFIX}{name}": value for name, value in merged.result().items()} | {f"{PREFIX}calls": calls}


def policy_loss(
    config: Any,
    model_output: Any,
    data: TensorDict,
    dp_group: Any = None,
    *,
    loss: PolicyLoss,
    training_version: int,
    meter: Meter,
    bypassed: bool = True,
    step_fraction: float = 0.0,
    kept: tuple[dict[int, torch.Tensor], list[int]] | None = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """verl's ``ppo_loss`` with ``loss`` in the place of verl's policy loss; entropy and KL are added once.

        agg(l) - entropy_coeff agg(entropy) + kl_loss_coef agg(kl)

    ``agg`` is verl's ``agg_loss`` in ``config.loss_agg_mode`` with the denominators in ``data``.

    Args:
        config: verl's ``ActorConfig``.
        model_output: nested ``log_probs`` and, if computed, ``entropy``, one per token of prompt and response.
        data: nested ``responses``, ``response_mask``, ``loss_mask``, ``advantages``, ``rollout_log_probs`` and, where
            they are, ``old_log_probs``, ``ref_log_prob``, ``rollout_is_weights``; ``extra_fields`` of each row.
        dp_group: not needed; verl's signature.
        loss: the plug-in.
        training_version: version of the weights in training, verl's numbering.
        meter: takes the plug-in's metrics and ``off_behavior``, ``version_unknown`` (fractions of trained tokens).
        bypassed: ``old_log_probs`` are the rollout's, not the trainer's.
        step_fraction: see ``LossBatch``.
        kept: proximal log-probs by row, and the rows of ``data``; filled at the first visit, used at later ones.

    Returns the scalar loss and verl's metrics (``Metric``) of its parts.

    Raises ConfigurationError for ``rollout_is_weights`` with a3po, for a loss that needs a forward pass which verl
    leaves out, and for missing rollout log-probs; PluginError for a plug-in that breaks its contract.
    """
    _refuse(loss, data, bypassed)
    log_probs = no_padding_2_padding(model_output["log_probs"], data)
    entropy = model_output.get("entropy", None)
    if entropy is not None:
        entropy = no_padding_2_padding(entropy, data)
    padded = data.select(*_NEEDED, *(key for key in _OPTIONAL if key in data)).to_padded_tensor()
    lengths = data["responses"].offsets().diff()
    real = torch.arange(log_probs.shape[1], device=lengths.device) < lengths[:, None]
    mask = padded["response_mask"].bool()

    def packed(key: str) -> torch.Tensor:
        values: torch.Tensor = padded[key][real]
        return values.to(log_probs.dtype)

    old = None if bypassed else packed("old_log_probs")
    batch = LossBatch(
        log_probs=log_probs[real],
        behavior_log_probs=packed("rollout_log_probs"),
        old_log_probs=old,
        advantages=packed("advantages"),
        mask=mask[real],
        staleness=_staleness(data, padded["loss_mask"], lengths, training_version).to(log_probs.device),
        cu_seqlens=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
        proximal_log_probs=old,
        step_fraction=step_fraction,
    )
    if kept is not None:
        batch.proximal_log_probs = _kept(batch, *kept)
    result = checked_token_loss(loss, batch)
    _note(meter, loss, batch, result)
    if kept is not None and result.proximal_log_probs is not None:
        kept[0].update(zip(kept[1], result.proximal_log_probs.split(lengths.tolist()), strict=True))

    tokens = torch.zeros_like(log_probs, dtype=result.loss.dtype).masked_scatter(real, result.loss)
    if "rollout_is_weights" in padded:
        tokens = tokens * padded["rollout_is_weights"]
    return _aggregated(config, data, padded, mask, log_probs, tokens, entropy)


def _aggregated(
    config: Any,
    data: TensorDict,
    padded: TensorDict,
    mask: torch.Tensor,
    log_probs: torch.Tensor,
    tokens: torch.Tensor,
    entropy: torch.Tensor | None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    info = {
        "dp_size": data["dp_size"],
        "batch_num_tokens": data["batch_num_tokens"],
        "global_batch_size": data["global_batch_size"],
        "loss_scale_factor": config.loss_scale_factor,
    }
    whole = info["dp_size"] > 1 or any(info[key] is not None for key in info if key != "dp_size")
    how = AggregationType.SUM if whole else AggregationType.MEAN

    def aggregate(values: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = agg_loss(loss_mat=values, loss_mask=mask, loss_agg_mode=config.loss_agg_mode, **info)
        return found

    total = aggregate(tokens)
    metrics: dict[str, Any] = {"actor/pg_loss": Metric(how, total)}
    if entropy is not None:
        bonus = aggregate(entropy)
        total = total - config.entropy_coeff * bonus
        metrics["actor/entropy_loss"] = Metric(how, bonus)
    if config.use_kl_loss:
        divergence = aggregate(
            kl_penalty(logprob=log_probs, ref_logprob=padded["ref_log_prob"], kl_penalty=config.kl_loss_type)
        )
        total = total + divergence * config.kl_loss_coef
        metrics["kl_loss"] = Metric(how, divergence)
        metrics["kl_coef"] = config.kl_loss_coef
    return total, metrics


def _refuse(loss: PolicyLoss, data: TensorDict, bypassed: bool) -> None:
    if loss.name == "a3po" and "rollout_is_weights" in data:
        raise ConfigurationError(
            "a3po has its own importance weight, and verl's rollout correction would weigh its tokens a second time",
            found="rollout_is_weights",
            where="algorithm.rollout_correction.rollout_is",
            remedy="algorithm.rollout_correction.rollout_is=null",
        )
    if loss.needs_proximal_forward and bypassed:
        raise ConfigurationError(
            f"loss {loss.name!r} needs the trainer's own log-probs, and verl copies the rollout's in bypass mode",
            where="algorithm.rollout_correction.bypass_mode",
            remedy="algorithm.rollout_correction.bypass_mode=False, or metronome.a3po.proximal=loglinear",
        )
    if "rollout_log_probs" not in data:
        raise ConfigurationError(
            f"loss {loss.name!r} needs the log-probs that the rollout engine sampled with",
            where="rollout_log_probs",
            remedy="actor_rollout_ref.rollout.calculate_log_probs=True",
        )


def _staleness(data: TensorDict, generated: torch.Tensor, lengths: torch.Tensor, trained: int) -> torch.Tensor:
    """``[T]`` trained minus sampled version, on the CPU; -1 unknown, below that a later version."""
    masks, versions = generated.cpu(), []
    for fields, mask, length in zip(data["extra_fields"], masks, lengths.tolist(), strict=True):
        versions += token_versions(getattr(fields, "data", fields) or {}, length, mask[:length])
    sampled = torch.tensor(versions, dtype=torch.long)
    staleness = trained - sampled
    # One version ahead would be -1 and pass for unknown: later versions are counted from -2 downwards.
    staleness = torch.where(staleness < 0, staleness - 1, staleness)
    return torch.where(sampled == UNKNOWN, -1, staleness)


def _kept(batch: LossBatch, store: dict[int, torch.Tensor], rows: list[int]) -> torch.Tensor | None:
    """Proximal log-probs of earlier visits; rows seen for the first time take today's, as a first visit does."""
    if not any(row in store for row in rows):
        return None
    today = batch.log_probs.detach().split(batch.cu_seqlens.diff().tolist())
    return torch.cat([store.get(row, now).to(now.dtype) for row, now in zip(rows, today, strict=True)])


@torch.no_grad()
def _note(meter: Meter, loss: PolicyLoss, batch: LossBatch, result: TokenLoss) -> None:
    """The plug-in's metrics, the fraction of unknown versions, and for a3po that of ``pi_prox != pi_behav``."""
    meter.add(result.metrics, result.maxima)
    found = {"version_unknown": batch.staleness == -1}
    if isinstance(loss, A3po) and loss.options.proximal != "behavior":
        proximal = result.proximal_log_probs if loss.keeps_proximal else batch.proximal_log_probs
        if loss.options.proximal == "loglinear":
            share = alpha(batch.staleness, batch.step_fraction, loss.options.fresh, strict=False)
            proximal = loglinear(batch.behavior_log_probs, batch.log_probs, share.to(batch.log_probs.dtype))
        assert proximal is not None
        found["off_behavior"] = proximal != batch.behavior_log_probs
    counts = torch.stack([batch.mask, *(batch.mask & where for where in found.values())]).sum(1).tolist()
    meter.add({name: (float(count), float(counts[0])) for name, count in zip(found, counts[1:], strict=True)}, {})
