"""Gradients that add up over parts of a batch, in verl's training worker.

A batch whose groups arrive one after another is trained in parts: ``accumulate`` runs forward and backward of a part
and keeps the gradient, ``step`` rescales the sum once to the gradient of one batch, clips, and steps.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from codetiming import Timer
from tensordict import TensorDict
from verl.single_controller.base.decorator import make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu
from verl.utils.metric import AggregationType, Metric
from verl.utils.py_functional import append_to_dict
from verl.utils.tensordict_utils import maybe_fix_3d_position_ids
from verl.workers.engine_workers_tinker import TinkerTrainingWorker

from metronome.errors import MetronomeError
from metronome.periodic.normalizer import Counts, StreamingNormalizer
from metronome_verl.level import everywhere, levelled
from metronome_verl.loss import PROGRESS, ROW, HostLoss
from metronome_verl.streaming import NORMALISERS
from metronome_verl.weights import Movement

if TYPE_CHECKING:
    from metronome_verl.megatron_accumulate import BufferedGradients


@dataclass
class Period:
    """What has been accumulated since the last step: counts of all ranks, the rest of this rank."""

    expected_rows: int
    counts: Counts = field(default_factory=Counts)
    metrics: dict[str, Any] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    seconds: float = 0.0


class AccumulatingWorker(TinkerTrainingWorker):
    """verl's training worker with ``accumulate`` and ``step``, and with our loss's metrics in ``train_mini_batch``.

    In ``accumulate`` the loss gets constant denominators: E rows and E L tokens instead of the part's own. With the
    factor of ``StreamingNormalizer`` at the end that is the gradient of one batch::

        token-mean        (1/(E L)) sum_parts sum_t l_t, times E L / tokens
        seq-mean-...      (1/E) sum_parts sum_i l_i,     times E / rows

    for the policy loss, entropy and KL alike. E is ``global_batch_size`` of the batch's extra info, the same in every
    part; L is ``longest``. FSDP keeps the sum in ``p.grad``, Megatron in buffers of its own (``BufferedGradients``).
    """

    longest = 1
    """The longest response in tokens; only scales the accumulated gradient."""

    attends = False
    """Whether the engine shares prompts and counts what went through."""

    _period: Period | None = None
    _done, _steps, _part = 0, 0, (0, 1)  # optimiser steps of the update under way; the update among others

    @cached_property
    def _movement(self) -> Movement:
        return Movement()

    @cached_property
    def buffered(self) -> BufferedGradients | None:
        """Megatron's gradient buffers; None where gradients are in ``p.grad``.

        Raises ConfigurationError for a Megatron engine in which parts don't add up.
        """
        if self.engine_config.strategy != "megatron":
            return None
        from metronome_verl.megatron_accumulate import BufferedGradients

        return BufferedGradients(self.engine)

    @property
    def _ours(self) -> HostLoss | None:
        return self.loss_fn if isinstance(self.loss_fn, HostLoss) else None

    # --- parts of a batch, one step -------------------------------------------------------------------

    def accumulate(self, data: TensorDict) -> dict[str, float]:
        """Forward and backward of one part; the gradient stays. Returns the part's rows and trained tokens, all ranks.

        Every rank runs as many passes as the others: a rank with fewer rows repeats its shortest one, masked, and a
        rank without any gets one from another rank. A part that is empty on every rank is left out.

        Raises MetronomeError for another ``global_batch_size`` than in the period's first part.
        """
        engine, group = self.engine, self.engine.get_data_parallel_group()
        maybe_fix_3d_position_ids(data)
        self._defaults(data)
        period = self._begin(data)
        counts = sum((Counts(*part) for part in everywhere(_counts(data), group)), Counts())
        if len(data):
            period.lengths += data["input_ids"].offsets().diff().tolist()
        data = levelled(data, group)
        if len(data):
            try:
                with (
                    engine.train_mode(
                        disable_auto_offload=tu.get(data, "disable_auto_offload", default=False),
                        zero_grad_on_exit=False,
                    ),
                    Timer(name="metronome_accumulate", logger=None) as timer,
                    nullcontext() if self.buffered is None else self.buffered.part(),
                ):
                    output = engine.forward_backward_batch(data, loss_function=self._with_constants(period))
            except BaseException:
                self._period = None  # verl has cleared the gradients
                raise
            if output:  # a pipeline stage before the last has none
                append_to_dict(period.metrics, output["metrics"])
                period.losses += output["loss"]
            period.seconds += timer.last
        period.counts += counts
        return {"metronome/part/rows": float(counts.rows), "metronome/part/tokens": float(counts.tokens)}

    def step(self, rows: int | None = None) -> dict[str, Any]:
        """Rescales the accumulated gradient to that of one batch, clips, steps, advances the learning rate.

        Without a trained token on any rank nothing is stepped, as in verl, which skips a gradient that isn't finite.

        Args:
            rows: rows of the whole batch over all ranks, padding left out; the denominator of the seq-mean modes.
                None counts the rows with a trained token.

        Returns metrics, the same on every rank: ``grad_norm``, ``lr``, verl's and ``metronome/...``.

        Raises MetronomeError if nothing was accumulated or fewer ``rows`` are named than were trained.
        """
        period, engine = self._period, self.engine
        if period is None:
            raise MetronomeError(
                "there is no gradient to step with",
                where="metronome_step",
                remedy="call metronome_accumulate first; an error in it ends the period",
            )
        self._period = None
        total = period.counts
        if rows is not None and rows < total.rows:
            engine.optimizer_zero_grad()
            raise MetronomeError(
                "more rows were trained than the batch has",
                found=f"{total.rows} trained, {rows} named",
                where="metronome_step(rows)",
                remedy="accumulate each part once, and count every row that isn't padding",
            )
        factor = self._factor(period, Counts(total.rows if rows is None else rows, total.tokens))
        grad_norm = 0.0
        self._movement.begin()
        with engine.train_mode(zero_grad_on_exit=True):
            if total.tokens:
                self._rescale(factor)
                with self._movement.watched(engine):
                    grad_norm = engine.optimizer_step()
        period.metrics.update(grad_norm=grad_norm, lr=engine.lr_scheduler_step())
        found = self._metrics(period, factor)
        if self.buffered is not None:
            found = self.buffered.of_last_stage(found)
        return {**found, "metronome/trained/rows": total.rows} | {
            "metronome/trained/tokens": total.tokens,
            "metronome/rescale": factor,
        }

    @torch.no_grad()
    def _rescale(self, factor: float) -> None:
        """Makes the sum of the parts the gradient of one batch."""
        if self.buffered is not None:
            self.buffered.finish(factor)
            return
        for parameter in self.engine.module.parameters():
            if parameter.grad is not None and factor != 1.0:
                parameter.grad.mul_(factor)

    def _defaults(self, data: TensorDict) -> None:
        """As verl's ``train_batch``: engine parameters that the batch doesn't name."""
        values = {
            "use_remove_padding": self.model_config.get("use_remove_padding", False),
            "use_dynamic_bsz": self.engine_config.use_dynamic_bsz,
            "max_token_len_per_gpu": self.engine_config.max_token_len_per_gpu,
            "micro_batch_size_per_gpu": self.engine_config.micro_batch_size_per_gpu,
            "use_fused_kernels": self.engine_config.use_fused_kernels,
        }
        tu.assign_non_tensor(data, **{key: value for key, value in values.items() if key not in data})

    def _begin(self, data: TensorDict) -> Period:
        expected = tu.get_non_tensor_data(data, "global_batch_size", None)
        if expected is None or (self._period is not None and self._period.expected_rows != int(expected)):
            raise MetronomeError(
                "every part of a batch must name the same number of rows",
                found=expected if self._period is None else f"{expected} after {self._period.expected_rows}",
                where="extra_info['global_batch_size']",
                remedy="pass the rows that the whole batch expects",
            )
        if self._period is None:
            self._period = Period(int(expected))
            if self._ours is not None:
                self._ours.begin()
        return self._period

    def _with_constants(self, period: Period) -> Any:
        def loss(model_output: Any, data: TensorDict, dp_group: Any = None) -> Any:
            rows = period.expected_rows
            tu.assign_non_tensor(data, batch_num_tokens=rows * self.longest, global_batch_size=rows)
            return self.loss_fn(model_output=model_output, data=data, dp_group=dp_group)

        return loss

    def _factor(self, period: Period, counts: Counts) -> float:
        mode = _config_of(self.loss_fn).loss_agg_mode
        if mode == "token-sum":
            return 1.0
        normaliser = StreamingNormalizer(NORMALISERS[mode], expected_rows=period.expected_rows, max_tokens=self.longest)
        return normaliser.final_factor(counts)

    def _metrics(self, period: Period, factor: float) -> dict[str, Any]:
        """verl's metrics of the whole period (sums rescaled as the gradient is) and ours."""
        group = self.engine.get_data_parallel_group()
        output = self._postprocess_output(
            {"metrics": period.metrics, "loss": period.losses, "model_output": {}},
            global_token_num=list(chain.from_iterable(everywhere(period.lengths, group))),
            delta_time=max(period.seconds, 1e-9),
            forward_only=False,
            images_seqlens=None,
        )
        found: dict[str, Any] = {}
        for name, value in tu.get(output, "metrics").items():
            if isinstance(value, list) and value and isinstance(value[0], Metric):
                scale = factor if value[0].aggregation is AggregationType.SUM else 1.0
                value = float(Metric.aggregate_dp(value)) * scale
            elif isinstance(value, list):
                value = float(np.mean(list(chain.from_iterable(value))))
            found[name.removeprefix("actor/")] = value
        found["loss"] *= factor
        return found | self._hooks(group)

    def _hooks(self, group: Any) -> dict[str, float]:
        """Metrics of the weights, the loss and shared attention since the last update, over all ranks."""
        found = self._ours.gathered(group) if self._ours is not None else {}
        found["metronome/weights/changed"] = float(any(everywhere(self._movement.changed, group)))
        found["metronome/weights/lr"] = self._movement.lr
        if self.attends:
            for counts in everywhere(vars(self.engine.drain()), group):
                for key, count in counts.items():
                    name = f"metronome/attention/{'calls' if key == 'attention_calls' else key}"
                    found[name] = found.get(name, 0) + count
        return found

    # --- verl's own updates, with our metrics ---------------------------------------------------------

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def train_mini_batch(self, data: TensorDict) -> TensorDict | None:
        """verl's, unchanged; our loss learns which of how many steps it is in, and adds its metrics at the end."""
        ours = self._ours
        self._movement.begin()
        if ours is not None:
            ours.begin()
            if ours.loss.keeps_proximal:
                data[ROW] = torch.arange(len(data))
            self._done, self._steps = 0, self._mini_batches(data)
            self._part = tu.get_non_tensor_data(data, PROGRESS, (0, 1))
        try:
            output = super().train_mini_batch(data)
        finally:
            self._steps = 0
        found = self._hooks(self.engine.get_data_parallel_group())
        if output is None:
            return None
        return tu.get_tensordict({}, {"metrics": {**tu.get(output, "metrics"), **found}})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def train_batch(self, data: TensorDict) -> TensorDict | None:
        """verl's, unchanged; one optimiser step."""
        if self._ours is not None and self._steps:
            part, parts = self._part
            self._ours.step_fraction = (part + self._done / self._steps) / parts
            self._done += 1
        # train_mini_batch has loaded the weights; its first step that moves them ends the looking
        with self._movement.watched(self.engine):
            return super().train_batch(data)

    def _mini_batches(self, data: TensorDict) -> int:
        """Optimiser steps that ``train_mini_batch`` will make, by its own arithmetic."""
        epochs = tu.get_non_tensor_data(data, "epochs", 1)
        size = tu.get_non_tensor_data(data, "mini_batch_size", None)
        if size is None:
            return int(tu.get_non_tensor_data(data, "num_mini_batch", 1)) * int(epochs)
        return len(data) * self.engine.get_data_parallel_size() // int(size) * int(epochs)


def _config_of(loss: Any) -> Any:
    return loss.config if isinstance(loss, HostLoss) else loss.keywords["config"]


def _counts(data: TensorDict) -> tuple[int, int]:
    """Rows with a trained token and trained tokens, by verl's ``loss_mask`` (what its own denominators count)."""
    if not len(data):
        return 0, 0
    trained = data["loss_mask"].to_padded_tensor(0).sum(1)
    return int((trained > 0).sum()), int(trained.sum())
