"""The update in OpenRLHF's actor worker: our loss in its place, and gradients that add up over parts of a batch.

In ``accumulate`` every part gets constant denominators, E rows and E L tokens, instead of its own; in ``step`` the
ZeRO optimiser's own scale, by which it divides the gradient before it clips, makes the sum that of one batch::

    token-mean           (1/(E L)) sum_parts sum_t l_t, times E L / tokens
    seq-mean-token-mean  (1/E) sum_parts sum_i (1/|o_i|) sum_t l_t, times E / rows

Rows without a trained token aren't counted, as in OpenRLHF. Its KL and entropy terms are means over tokens whatever
``loss_agg_mode`` is, so that the second line has room for neither (``config`` refuses them).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer

from metronome.errors import MetronomeError
from metronome.periodic.normalizer import Counts, StreamingNormalizer
from metronome_openrlhf.config import bypasses, facts_of, part_of
from metronome_openrlhf.lora import merged, merging
from metronome_openrlhf.weights import Movement

NORMALISERS = {"token-mean": "token-mean", "seq-mean-token-mean": "seq-mean"}
"""OpenRLHF's ``loss_agg_mode`` and the core's name for it."""

Sums = dict[str, tuple[float, float]]
"""Metrics that add over parts and ranks: name -> (sum, weight)."""


@dataclass
class Period:
    """What has been accumulated since the last step, on this rank.

    Attributes:
        expected_rows: rows that the whole batch expects over all ranks.
        rows: rows handed in, those without a trained token included.
        counts: rows with trained tokens, and those tokens.
    """

    expected_rows: int
    rows: int = 0
    counts: Counts = field(default_factory=Counts)


class _Accumulating:
    """A strategy whose optimiser steps are left out: ``training_step`` asks for one after every micro-batch."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def optimizer_step(self, *arguments: Any, **named: Any) -> None:
        """Nothing: ``step`` comes once, at the end of the period."""


class MetronomeActorTrainer(ActorPPOTrainer):
    """OpenRLHF's trainer with our loss, ``accumulate`` and ``step``."""

    strategy: Any

    def __init__(self, strategy: Any, *arguments: Any, **named: Any) -> None:
        super().__init__(strategy, *arguments, **named)
        self.part = part_of(strategy.args)
        self._period: Period | None = None
        self._failed = False
        self._movement = Movement()
        self._loss_calls = 0
        self._steps_before = 0
        if self.part.own_loss:
            from metronome_openrlhf.loss import HostLoss

            token_level = self.args.actor.loss_agg_mode == "token-mean"
            self.actor_loss_fn = HostLoss(self.part, token_level, bypasses(self.args, self.part))
            self.actor_loss_fn.register_forward_hook(self._count_loss)
        if self.part.shares_prompt:
            from metronome_openrlhf.batches import GroupBuffer

            self.replay_buffer = GroupBuffer(self.micro_train_batch_size)
        if self.args.ds.lora.rank:
            merged(self.actor.model.module)  # an adapter that can't be published is an error now
        if self.part.mode == "periodic":
            found = replace(facts_of(self.args), dropout=_dropout(self.actor.model.module))
            self.part.selection.rollout_source.check(found)

    # --- OpenRLHF's own path ------------------------------------------------------------------------

    def ppo_train(self, kl_ctl: float) -> dict[str, Any]:
        """OpenRLHF's; its status says besides whether the weights moved and which hooks were called.

        Raises MetronomeError in periodic mode, in which DeepSpeed steps at our word alone.
        """
        if self.part.mode == "periodic":
            raise MetronomeError(
                "periodic mode trains by parts",
                where="ActorPPOTrainer.ppo_train",
                remedy="metronome_accumulate for each part, then metronome_step",
            )
        self._begin()
        found: dict[str, Any] = super().ppo_train(kl_ctl)
        return {**found, **self._movement.publish(self.actor.model), **self._life()}

    def training_step(
        self, experience: Any, kl_ctl: float, step: int, loss_batch_info: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """OpenRLHF's; our loss learns which samples it is given."""
        self._movement.before_step(self.actor.model)
        if self.part.own_loss:
            self.actor_loss_fn.experience = experience
            self.actor_loss_fn.step_fraction = self._fraction()
        found: dict[str, Any] = super().training_step(experience, kl_ctl, step, loss_batch_info)
        return found

    def broadcast_to_vllm(self) -> None:
        """OpenRLHF's; with LoRA the engines get the sums of weights and adapters."""
        if not self.args.ds.lora.rank:
            super().broadcast_to_vllm()
            return
        with merging(self):
            super().broadcast_to_vllm()

    def set_window(self, rows: int) -> None:
        """Sets how many rows an optimiser step takes, over all ranks; a batch of another G may have fewer.

        Raises MetronomeError in the middle of a window.
        """
        engine = self.actor.model
        begun = engine.micro_steps % engine.gradient_accumulation_steps()
        if begun:
            raise MetronomeError(
                "an accumulation window is half filled",
                found=f"{begun} of {engine.gradient_accumulation_steps()} micro-batches",
                where="metronome_window",
                remedy="batches that fill whole windows",
            )
        engine.set_train_batch_size(rows)
        self.strategy.accumulated_gradient = engine.gradient_accumulation_steps()
        engine.micro_steps = 0  # DeepSpeed and OpenRLHF's moving average count from the beginning of the run
        self.strategy.time_steps.clear()

    # --- a period -----------------------------------------------------------------------------------

    def accumulate(self, micro_batches: list[Any], rows: int, kl_ctl: float, filled: int = 0) -> Sums:
        """Forward and backward of this rank's micro-batches; every rank gets as many.

        Args:
            micro_batches: experiences.
            rows: rows that the whole batch expects over all ranks, the same in every part.
            kl_ctl: OpenRLHF's KL coefficient.
            filled: how many of the last micro-batches are masked copies that keep this rank in step with the others.

        Returns sums of metrics over what isn't filled.
        Raises MetronomeError for another ``rows`` than in the period's first part, or after an error.
        """
        if self._failed:
            raise MetronomeError(
                "the gradient of an interrupted part is still there",
                where="metronome_accumulate",
                remedy="resume from the last checkpoint",
            )
        if self._period is None:
            self._period = Period(rows)
            self._begin()
        elif self._period.expected_rows != rows:
            raise MetronomeError(
                "every part of a batch must name the same number of rows",
                found=f"{rows} after {self._period.expected_rows}",
                where="metronome_accumulate(rows)",
                remedy="pass the rows that the whole batch expects",
            )
        strategy, info = self.strategy, self._denominators(rows)
        sums: Sums = {}
        self.strategy = _Accumulating(strategy)
        try:
            for place, micro_batch in enumerate(micro_batches):
                counted = place < len(micro_batches) - filled
                self._train(micro_batch, kl_ctl, info, sums if counted else None)
        except BaseException:
            self._period, self._failed = None, True
            raise
        finally:
            self.strategy = strategy
        return sums

    def _train(self, micro_batch: Any, kl_ctl: float, info: dict[str, Any], sums: Sums | None) -> None:
        period = self._period
        assert period is not None  # accumulate opened it
        micro_batch.to_device(torch.cuda.current_device())
        trained = micro_batch.action_mask.sum(1)
        counts = Counts(int((trained > 0).sum()), int(trained.sum()))
        status = self.training_step(micro_batch, kl_ctl, 0, info)
        if sums is None:
            return
        period.rows += len(trained)
        period.counts += counts
        if counts.tokens:  # OpenRLHF's means over no token aren't numbers
            self._add(sums, status, counts, info)

    def step(self, rows: int) -> dict[str, Any]:
        """Rescales the sum to the gradient of one batch, clips, steps, advances the learning rate.

        Without a trained token in the whole batch nothing is stepped.

        Args:
            rows: rows handed to all ranks since the last step.

        Raises MetronomeError if nothing was accumulated, or other rows were than are named.
        """
        period, self._period = self._period, None
        if period is None or self._failed:
            raise MetronomeError(
                "there is no whole gradient to step with",
                where="metronome_step",
                remedy="call metronome_accumulate first; an error in it ends the run",
            )
        handed, total = self._everywhere(period)
        if rows != handed:
            self._failed = True
            raise MetronomeError(
                "other rows were accumulated than the batch has",
                found=f"{handed} accumulated, {rows} named",
                where="metronome_step(rows)",
                remedy="accumulate each part once, and count every row",
            )
        normaliser = StreamingNormalizer(
            NORMALISERS[self.args.actor.loss_agg_mode], expected_rows=period.expected_rows, max_tokens=self._longest
        )
        factor = normaliser.final_factor(total)
        engine = self.actor.model
        if total.tokens:
            _scaled_step(engine, factor)
        return {
            "actor_grad_norm": self.strategy.get_grad_norm(self.actor) if total.tokens else 0.0,
            "actor_lr": self.actor_scheduler.get_last_lr()[0],
            "metronome/periodic/rows": total.rows,
            "metronome/periodic/tokens": total.tokens,
            "metronome/periodic/rescale": factor,
            **self._movement.publish(engine),
            **self._life(),
        }

    @property
    def _longest(self) -> int:
        return int(self.args.rollout.max_new_tokens or self.args.data.max_len)

    def _denominators(self, rows: int) -> dict[str, Any]:
        """OpenRLHF's ``loss_batch_info`` with constants; DeepSpeed divides every loss by its accumulation steps."""
        passes = self.actor.model.gradient_accumulation_steps()
        device = torch.cuda.current_device()
        return {
            "dp_size": dist.get_world_size(self.strategy.ds_device_mesh["dp"].get_group()),
            "batch_num_tokens": torch.tensor(rows * self._longest / passes, dtype=torch.float32, device=device),
            "global_batch_size": torch.tensor(rows / passes, dtype=torch.float32, device=device),
        }

    def _everywhere(self, period: Period) -> tuple[int, Counts]:
        here = [period.rows, period.counts.rows, period.counts.tokens]
        counts = torch.tensor(here, dtype=torch.int64, device=torch.cuda.current_device())
        dist.all_reduce(counts, group=self.strategy.ds_device_mesh["dp"].get_group())
        handed, rows, tokens = counts.tolist()
        return handed, Counts(rows, tokens)

    def _add(self, sums: Sums, status: dict[str, Any], counts: Counts, info: dict[str, Any]) -> None:
        """Adds OpenRLHF's metrics of a micro-batch, each by its own weight: trained tokens or rows.

        Losses were divided by our constants, and multiplied by the ranks; both are undone.
        """
        by_token = float(info["batch_num_tokens"]) / info["dp_size"], counts.tokens
        by_row = float(info["global_batch_size"]) / info["dp_size"], counts.rows
        losses = {"policy_loss": by_token, "entropy_loss": by_token}
        if self.args.actor.loss_agg_mode != "token-mean":
            losses["policy_loss"] = by_row
        if self.args.algo.kl.use_loss:
            losses["kl"] = by_token
        sizes = {"token": status["num_action_tokens"], "sample": status["num_samples"]}
        for name, value in status["metrics"].items():
            kind = status["weights"][name]
            if kind is None:
                continue
            mean = float(value.float().mean()) if isinstance(value, torch.Tensor) else float(value)
            scale, weight = losses.get(name, (sizes[kind], sizes[kind]))
            done, before = sums.get(name, (0.0, 0.0))
            sums[name] = (done + mean * scale, before + weight)

    def _begin(self) -> None:
        """Before the first micro-batch of a version of the weights."""
        self._steps_before = self.actor.model.global_steps
        if self.part.own_loss:
            self.actor_loss_fn.begin(self.replay_buffer.items)

    def _fraction(self) -> float:
        """j/k in the j-th of the k optimiser steps that are taken of this version's samples."""
        if self.part.mode == "periodic":
            return 0.0
        buffer = self.replay_buffer
        if self.args.train.dynamic_batch_enable:
            steps = self.max_epochs * sum(buffer.dynamic_optimizer_step)
        else:
            passes = self.max_epochs * (len(buffer) // buffer.sample_batch_size)
            steps = passes // max(1, int(self.strategy.accumulated_gradient))
        done = self.actor.model.global_steps - self._steps_before
        return min(done, steps - 1) / steps if steps > 1 else 0.0

    def _count_loss(self, *_: Any) -> None:
        self._loss_calls += 1

    def _life(self) -> dict[str, float]:
        """What the hooks did since the last call, on all ranks together; every rank must call."""
        group = self.strategy.ds_device_mesh["dp"].get_group()
        told: dict[str, float] = {}
        if self.part.own_loss:
            told["metronome/loss/calls"], self._loss_calls = self._loss_calls, 0
        if self.part.shares_prompt:
            told |= self.actor.drain()
        if told:
            here = [int(count) for count in told.values()]
            counts = torch.tensor(here, dtype=torch.int64, device=torch.cuda.current_device())
            dist.all_reduce(counts, group=group)
            told = dict(zip(told, map(float, counts.tolist()), strict=True))
        return told | (self.actor_loss_fn.gathered(group) if self.part.own_loss else {})


def _scaled_step(engine: Any, factor: float) -> None:
    """DeepSpeed's step with the gradient times ``factor``, before its norm is taken and clipped."""
    optimizer = engine.optimizer
    scale = optimizer.loss_scale
    optimizer.loss_scale = scale / factor
    try:
        engine.step()
    finally:
        optimizer.loss_scale = scale


def _dropout(model: Any) -> float:
    """The largest dropout probability in a model: of its modules, and of its attention."""
    rates = [float(one.p) for one in model.modules() if isinstance(one, torch.nn.Dropout)]
    rates += [float(getattr(one, "attention_dropout", 0.0) or 0.0) for one in model.modules()]
    return max([0.0, *rates])
