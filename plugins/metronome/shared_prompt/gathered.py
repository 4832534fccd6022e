"""The gathered way: one causal kernel call over sequences ``[p, p r_1, .. p r_K]`` (``calls.gathered``).

The K copies of the prompt's keys and values live for one call only: the forward saves q, k, v, the output and
the kernel's statistics, the backward gathers again. The copies' partial gradients, each rounded to the kernel's
dtype, are added in float32 (float64 for float64 inputs).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from metronome.shared_prompt.calls import Call, Limits, gathered
from metronome.shared_prompt.plan import SharedPromptPlan
from metronome.shared_prompt.sinks import add_sinks, sinks_gradient


class VarlenKernel(Protocol):
    """A kernel for packed sequences, causal and aligned at the lower right: query i of n sees ``key_length - n + i``.

    Shapes: q ``[S,Nq,D]``, k and v ``[M,Nkv,D]``, grouped heads unexpanded. ``statistics`` are opaque, given back
    to ``backward`` as they came; with sinks they pass through the log-sum-exp.
    """

    limits: Limits

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float, window: int | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The output ``[S,Nq,D]`` and the statistics."""

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        statistics: tuple[Tensor, ...],
        call: Call,
        scale: float,
        window: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``dq, dk, dv`` with ``p = exp(scale q k - lse)`` and ``dS = p (dO v - dO o)``, whatever lse and o are."""

    def log_sum_exp(self, statistics: tuple[Tensor, ...]) -> Tensor:
        """Float ``[S,Nq]``, natural logarithm of the denominator in units of the scaled scores."""

    def statistics(self, lse: Tensor) -> tuple[Tensor, ...]:
        """Statistics that mean this log-sum-exp ``[S,Nq]``."""


def gathered_attention(
    kernel: VarlenKernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: SharedPromptPlan,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """``q [Q,Nq,D], k [T,Nkv,D], v [T,Nkv,Dv] -> [Q,Nq,Dv]``; padding attends to itself.

    A window counts tokens, the query included; every sequence stands as a separate row would, so that position
    and packed distance are the same. Raises ConfigurationError if one sequence exceeds the kernel's limits.
    """
    calls = gathered(plan, kernel.limits)
    apply: Callable[..., Tensor] = _Gathered.apply
    return apply(q, k, v, sinks, kernel, calls, scale, window)


def even_heads(q: Tensor, k: Tensor, v: Tensor, multiple: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Heads of one common width, a multiple of ``multiple``, widened with zeros, which change no score."""
    width = -(-max(q.shape[-1], v.shape[-1]) // multiple) * multiple
    q, k, v = (x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    return q, k, v


class _Gathered(torch.autograd.Function):
    """Saves q, k, v, the output and the statistics of each call."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        kernel: VarlenKernel,
        calls: tuple[Call, ...],
        scale: float,
        window: int | None,
    ) -> Tensor:
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        kept: list[Tensor] = []
        for call in calls:
            part, statistics = kernel.forward(
                q[call.query_rows], k[call.key_rows], v[call.key_rows], call, scale, window
            )
            if sinks is not None:
                part, total = add_sinks(part, kernel.log_sum_exp(statistics), sinks)
                statistics = kernel.statistics(total)
            out[call.query_rows] = part
            kept += statistics
        ctx.save_for_backward(q, k, v, sinks, out, *kept)
        ctx.arguments = kernel, calls, scale, window
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kernel, calls, scale, window = ctx.arguments
        q, k, v, sinks, out, *kept = ctx.saved_tensors
        each = len(kept) // len(calls) if calls else 0
        exact = torch.float64 if k.dtype == torch.float64 else torch.float32
        dq = torch.empty_like(q)
        dk, dv = (torch.zeros(x.shape, dtype=exact, device=x.device) for x in (k, v))
        dsinks = None if sinks is None else torch.zeros_like(sinks)
        for number, call in enumerate(calls):
            statistics = tuple(kept[number * each : (number + 1) * each])
            rows, keys = call.query_rows, call.key_rows
            g_part, o_part = grad[rows].contiguous(), out[rows]
            parts = kernel.backward(g_part, q[rows], k[keys], v[keys], o_part, statistics, call, scale, window)
            dq[rows] = parts[0]
            for target, part in zip((dk, dv), parts[1:], strict=True):
                if isinstance(keys, slice):
                    target[keys] += part
                else:
                    target.index_add_(0, keys, part.to(exact))
            if sinks is not None and dsinks is not None:
                dsinks += sinks_gradient(g_part, o_part, kernel.log_sum_exp(statistics), sinks)
        return dq, dk.to(k.dtype), dv.to(v.dtype), dsinks, None, None, None, None
