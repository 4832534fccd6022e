"""The gradient of one optimiser step, accumulated over groups in whatever order they come.

Un-normalised sums with a constant scale, one rescale at the end (``StreamingNormalizer``); KL and entropy terms
are added here, once, with the loss's own denominator; the reference's log-probs come in the same micro-step.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from metronome.a3po.metrics import Meter
from metronome.contracts import LossBatch, PolicyLoss
from metronome.loss_check import checked_token_loss
from metronome.periodic.normalizer import StreamingNormalizer
from metronome.periodic.whitening import BatchMoments, TwoAccumulators
from metronome_local.logprobs import Compute, LogProbs
from metronome_local.recipe import Training
from metronome_local.rollouts import UNKNOWN_VERSION, Row

Refer = Callable[[Sequence[Sequence[Row]]], torch.Tensor]
"""Groups' rows to the reference's log-probs ``[N]``."""


@dataclass
class TrainGroup:
    """A group to train: one advantage a rollout, and log pi_prox of its tokens where a loss keeps it."""

    index: int
    rollouts: list[list[Row]]
    advantages: list[float]
    proximal: torch.Tensor | None = None

    @property
    def rows(self) -> list[Row]:
        """Every row."""
        return [row for rows in self.rollouts for row in rows]

    @property
    def row_advantages(self) -> list[float]:
        """The rollout's advantage, for each of its rows."""
        return [a for a, rows in zip(self.advantages, self.rollouts, strict=True) for _ in rows]


class Reference:
    """Log-probs of the frozen reference: the policy with its adapter off, or a second frozen model."""

    def __init__(self, policy: Any, log_probs: LogProbs, adapter: bool) -> None:
        self._policy, self._log_probs, self._adapter = policy, log_probs, adapter

    @torch.no_grad()
    def __call__(self, groups: Sequence[Sequence[Row]]) -> torch.Tensor:
        """``[N]``, without gradient."""
        with self._frozen():
            return self._log_probs(groups)[0]

    @contextlib.contextmanager
    def reusing(self, group: Sequence[Row]) -> Iterator[Refer]:
        """``__call__`` for parts of one group, as ``LogProbs.reusing``."""
        with contextlib.ExitStack() as stack:
            with torch.no_grad(), self._frozen():
                compute = stack.enter_context(self._log_probs.reusing(group))

            def refer(groups: Sequence[Sequence[Row]]) -> torch.Tensor:
                with torch.no_grad(), self._frozen():
                    return compute(groups)[0]

            yield refer

    def _frozen(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = (
            self._policy.disable_adapter() if self._adapter else contextlib.nullcontext()
        )
        return context


class Gradient:
    """Accumulates ``.grad`` of ``model``; ``begin``, ``add`` any number of times, ``finish``."""

    def __init__(
        self,
        model: Any,
        log_probs: LogProbs,
        loss: PolicyLoss,
        training: Training,
        reference: Reference | None,
        *,
        max_tokens: int,
        on_policy: bool,
    ) -> None:
        self.log_probs, self.loss, self.training, self.reference = log_probs, loss, training, reference
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self._device = next(model.parameters()).device
        self._max_tokens, self.on_policy = max_tokens, on_policy
        self.proximal_seconds = 0.0
        self.loss_calls = 0

    def begin(self, expected_rows: int) -> None:
        """Starts a step; ``expected_rows`` only chooses the constant scale."""
        assert self.training.normaliser is not None
        self.normaliser = StreamingNormalizer(
            self.training.normaliser, expected_rows=expected_rows, max_tokens=self._max_tokens
        )
        self.meter = Meter()
        self._moments = BatchMoments()
        self._accumulators = TwoAccumulators(self.parameters) if self.training.advantage == "batch" else None
        for parameter in self.parameters:
            parameter.grad = None

    def add(self, groups: Sequence[TrainGroup], version: int, step_fraction: float = 0.0) -> None:
        """Forward and backward of some groups, in micro-batches of at most ``micro_batch_tokens``.

        A group whose advantages are all zero has no gradient unless KL, entropy or the batch's mean give it one:
        its rows are counted and its passes are left out, which is exact.
        """
        training = self.training
        everything = training.kl or training.entropy or self._accumulators is not None
        compute, refer = self.log_probs, self.reference
        batch: list[TrainGroup] = []
        for group in groups:
            if not (any(group.advantages) or everything):
                self._count([group])
            elif self._size([group]) > training.micro_batch_tokens and len(group.rollouts) > 1:
                self._in_parts(group, version, step_fraction)
            else:
                if batch and self._size([*batch, group]) > training.micro_batch_tokens:
                    self._micro_batch(batch, version, step_fraction, compute, refer)
                    batch = []
                batch.append(group)
        if batch:
            self._micro_batch(batch, version, step_fraction, compute, refer)

    def finish(self) -> dict[str, float]:
        """Rescales ``.grad`` once; returns the metrics of everything added."""
        factor = self.normaliser.final_factor()
        if self._accumulators is not None:
            self._accumulators.combine(self._moments.mean, self._moments.std(), factor)
        else:
            for parameter in self.parameters:
                if parameter.grad is not None and factor != 1.0:
                    parameter.grad.mul_(factor)
        metrics = self.meter.result()
        if "loss" in self.meter.sums:
            metrics["loss"] = self.meter.sums["loss"][0] * factor
        return metrics

    def _size(self, groups: Sequence[TrainGroup]) -> int:
        if self.log_probs.shares_prompt:
            return sum(self.log_probs.tokens(group.rows) for group in groups)
        rows = [len(row.ids) for group in groups for row in group.rows]
        return max(rows) * len(rows)

    def _in_parts(self, group: TrainGroup, version: int, step_fraction: float) -> None:
        """A group that is larger than a micro-batch: what its rows share is computed once for all parts.

        Two accumulators take two gradients of every part, and a cached prompt holds one: with them, and without
        shared prompts, every part computes its prompt anew.
        """
        parts = self._parts(group)
        with contextlib.ExitStack() as stack:
            compute: Compute = self.log_probs
            refer: Refer | None = self.reference
            if self._accumulators is None:
                if self.reference is not None:
                    refer = stack.enter_context(self.reference.reusing(group.rows))
                compute = stack.enter_context(self.log_probs.reusing(group.rows))
            for part in parts:
                self._micro_batch([part], version, step_fraction, compute, refer)
        kept = [part.proximal for part in parts if part.proximal is not None]
        group.proximal = torch.cat(kept) if len(kept) == len(parts) else None

    def _parts(self, group: TrainGroup) -> list[TrainGroup]:
        """The group, or rollouts of it where it alone is larger than a micro-batch."""
        if len(group.rollouts) == 1 or self._size([group]) <= self.training.micro_batch_tokens:
            return [group]
        half = len(group.rollouts) // 2
        tokens = sum(len(row.response) for rows in group.rollouts[:half] for row in rows)
        kept = group.proximal
        first = TrainGroup(
            group.index,
            group.rollouts[:half],
            group.advantages[:half],
            None if kept is None else kept[:tokens],
        )
        second = TrainGroup(
            group.index,
            group.rollouts[half:],
            group.advantages[half:],
            None if kept is None else kept[tokens:],
        )
        return [*self._parts(first), *self._parts(second)]

    def _count(self, groups: Sequence[TrainGroup]) -> list[float]:
        lengths = [sum(row.trained) for group in groups for row in group.rows]
        if self._accumulators is not None:
            advantages = [a for group in groups for a in group.row_advantages]
            self._moments += BatchMoments.of(advantages, lengths)
        return self.normaliser.row_weights(lengths)

    def _micro_batch(
        self, groups: list[TrainGroup], version: int, step_fraction: float, compute: Compute, refer: Refer | None
    ) -> None:
        training = self.training
        rows = [group.rows for group in groups]
        flat = [row for group in rows for row in group]
        weights = self._per_token(self._count(groups), flat)
        log_probs, entropy = compute(rows, entropy=training.entropy != 0)
        mask = torch.tensor([t for row in flat for t in row.trained], device=self._device)
        weights = torch.where(mask, weights, 0.0).to(log_probs.dtype)
        batch = self._loss_batch(groups, flat, log_probs, mask, version, step_fraction, compute)
        token_loss = checked_token_loss(self.loss, batch)
        self.loss_calls += 1
        self.meter.add(token_loss.metrics, token_loss.maxima)
        if token_loss.proximal_log_probs is not None and self.loss.keeps_proximal:
            lengths = [sum(len(row.response) for row in group) for group in rows]
            for group, kept in zip(groups, token_loss.proximal_log_probs.split(lengths), strict=True):
                group.proximal = kept
        policy = (weights * token_loss.loss).sum()
        other = self._other_terms(rows, log_probs, entropy, weights, mask, refer)
        self.meter.add({"loss": (float(policy.detach()), 1.0)}, {})
        if self._accumulators is None:
            (policy if other is None else policy + other).backward()
            return
        policy.backward(retain_graph=True)
        self._accumulators.take("advantage")
        ones = LossBatch(**{**vars(batch), "advantages": torch.ones_like(batch.advantages)})
        (weights * self.loss(ones).loss).sum().backward(retain_graph=other is not None)
        self._accumulators.take("unit")
        if other is not None:
            other.backward()
            self._accumulators.take("other")

    def _per_token(self, per_row: Sequence[float], rows: Sequence[Row]) -> torch.Tensor:
        lengths = torch.tensor([len(row.response) for row in rows])
        return torch.tensor(list(per_row), dtype=torch.float64).repeat_interleave(lengths).to(self._device)

    def _loss_batch(
        self,
        groups: Sequence[TrainGroup],
        flat: Sequence[Row],
        log_probs: torch.Tensor,
        mask: torch.Tensor,
        version: int,
        step_fraction: float,
        compute: Compute,
    ) -> LossBatch:
        def tokens(values: list[Any], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=self._device)

        sampled = tokens([v for row in flat for v in row.versions], torch.long)
        ends = torch.tensor([0, *(len(row.response) for row in flat)], device=self._device).cumsum(0)
        advantages = self._per_token([a for group in groups for a in group.row_advantages], flat)
        return LossBatch(
            log_probs=log_probs,
            behavior_log_probs=tokens([p for row in flat for p in row.log_probs], log_probs.dtype),
            old_log_probs=log_probs.detach() if self.on_policy else None,
            advantages=advantages.to(log_probs.dtype),
            mask=mask,
            staleness=torch.where(sampled == UNKNOWN_VERSION, UNKNOWN_VERSION, version - sampled),
            cu_seqlens=ends,
            proximal_log_probs=self._proximal(groups, compute),
            step_fraction=step_fraction,
        )

    def _proximal(self, groups: Sequence[TrainGroup], compute: Compute) -> torch.Tensor | None:
        if all(group.proximal is not None for group in groups):
            return torch.cat([group.proximal for group in groups if group.proximal is not None])
        if not self.loss.needs_proximal_forward:
            return None
        return self.forward_only(groups, compute)

    @torch.no_grad()
    def forward_only(self, groups: Sequence[TrainGroup], compute: Compute | None = None) -> torch.Tensor:
        """Log-probs of the groups' response tokens at the current weights: the extra pass of ``recompute``."""
        started = time.perf_counter()
        values: torch.Tensor = (compute or self.log_probs)([group.rows for group in groups])[0]
        self.proximal_seconds += time.perf_counter() - started
        return values

    def _other_terms(
        self,
        rows: Sequence[Sequence[Row]],
        log_probs: torch.Tensor,
        entropy: torch.Tensor | None,
        weights: torch.Tensor,
        mask: torch.Tensor,
        refer: Refer | None,
    ) -> torch.Tensor | None:
        """KL to the reference (k3: exp(ref - theta) - (ref - theta) - 1) and the entropy bonus."""
        total = None
        count = float(mask.sum())
        if refer is not None:
            gap = refer(rows).to(log_probs.dtype) - log_probs
            gap = torch.where(mask, gap, 0.0)
            kl = torch.expm1(gap) - gap
            total = self.training.kl * (weights * kl).sum()
            self.meter.add({"kl": (float(kl.detach().sum()), count)}, {})
        if entropy is not None:
            kept = torch.where(mask, entropy, 0.0)
            bonus = self.training.entropy * (weights * kept).sum()
            total = -bonus if total is None else total - bonus
            self.meter.add({"entropy": (float(kept.detach().sum()), count)}, {})
        return total
