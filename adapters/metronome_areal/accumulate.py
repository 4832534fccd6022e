"""Gradients that add up over parts of a batch in AReaL's FSDP engine, and one rescaling before the step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from areal.engine.fsdp_engine import FSDPTrainContext

from metronome.errors import MetronomeError
from metronome.periodic.normalizer import Counts, StreamingNormalizer


@dataclass
class Period:
    """What has been accumulated since the last step, over all ranks."""

    counts: Counts = field(default_factory=Counts)
    passes: int = 0


class Accumulation:
    """``train_batch`` of an FSDP engine without its step, and the step.

    AReaL's loss of a micro-batch is a mean over its n trained tokens, weighed by n over the batch's N::

        batch    sum_m (n_m / N) (1 / n_m) sum_t l_t  =  (1 / N) sum_t l_t
        parts    sum_m (n_m / 1) (1 / n_m) sum_t l_t, times 1 / N at the end

    FSDP keeps the sum in ``p.grad``.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.period: Period | None = None

    def begin(self) -> None:
        """Clears gradients; parts are accumulated from here to ``step``."""
        self.engine.optimizer_zero_grad()
        self.period = Period()

    def add(self, input_: Any, loss_fn: Any, loss_weight_fn: Any) -> dict[str, float]:
        """Forward and backward of a part with the denominator 1; the gradient stays."""
        engine, period = self.engine, self._open()
        engine._ensure_ready()
        batched, _ = engine._normalize_batch_input(input_)
        mb_list = engine._prepare_mb_list(batched).to(engine.device)
        tokens = _weight(mb_list, loss_weight_fn, engine.dp_group)
        one = torch.ones((), dtype=torch.float32, device=engine.device)

        def part(logits: torch.Tensor, found: dict[str, Any]) -> torch.Tensor:
            return engine._compute_logprobs_and_loss(
                logits,
                FSDPTrainContext(**found),
                loss_fn,
                loss_weight_fn,
                one,
                loss_multiplier=engine.parallel_helper.dp_size,
            )

        try:
            engine.forward_backward_batch(mb_list, part, forward_only=False)
        except BaseException:
            self.period = None
            engine.optimizer_zero_grad()
            raise
        period.counts += Counts(0, tokens)
        period.passes += len(mb_list.mbs)
        return {}

    def step(self) -> dict[str, float]:
        """Rescales the sum to the gradient of one batch, clips, steps; AReaL's metrics of a step.

        Raises MetronomeError if nothing was accumulated.
        """
        period = self._open()
        self.period = None
        if not period.counts.tokens:
            self.engine.optimizer_zero_grad()
            raise MetronomeError(
                "a period ended without a trained token",
                where="metronome.rollout_source: periodic",
                remedy="look at the workflow's loss_mask and at the filter (dynamic_filter_fn)",
            )
        factor = StreamingNormalizer("token-mean", expected_rows=1, max_tokens=1).final_factor(period.counts)
        with torch.no_grad():
            for parameter in self.engine.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        found: dict[str, float] = self.engine.optimizer_step()
        found["num_micro_batches"] = period.passes
        found["metronome/periodic/tokens"] = float(period.counts.tokens)
        found["metronome/periodic/rescale"] = factor
        return found

    def _open(self) -> Period:
        if self.period is None:
            raise MetronomeError(
                "no period is open",
                where="MetronomeActor",
                remedy="metronome_begin first; an error in a part ends the period",
            )
        return self.period


def _weight(mb_list: Any, loss_weight_fn: Any, group: Any) -> int:
    """Trained tokens over all ranks; AReaL's own sum asserts that there is one."""
    total = torch.stack([loss_weight_fn(mb) for mb in mb_list.mbs]).sum().detach().clone()
    if dist.is_initialized():
        dist.all_reduce(total, group=group)
    return int(total)
