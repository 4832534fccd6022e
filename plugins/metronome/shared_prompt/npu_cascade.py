"""Cascade attention on Ascend NPUs: two fused TND calls, joined by their statistics, without copies of keys.

The *own* call: every prompt and response to itself, causal. The *far* call: all responses of a group to its
prompt, no mask. With output o_i, peak m_i and total s_i of part i (``npu_ops.NpuOps``):

    m = max(m_1, m_2)    a_i = s_i exp(m_i - m)    s = a_1 + a_2    o = (a_1 o_1 + a_2 o_2) / s

The gradient operator computes ``p = exp(scale q k - m) / s`` and ``dS = p (dO v - dO o)``, so that called part by
part with the *joined* m, s and o it gives the joint softmax's gradient, as MindSpeed's ring attention has it.

The join is plain arithmetic in the statistics' float32. ``npu_ring_attention_update`` does the same for two parts of
the *same* rows; the far part has response rows only, which would have to be taken out and put back around it, and
the operator is one more thing that a driver may lack. Not run on a card.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from metronome.contracts import AttentionNeed
from metronome.errors import ConfigurationError
from metronome.shared_prompt.calls import Call, Limits, far, own
from metronome.shared_prompt.gathered import even_heads
from metronome.shared_prompt.npu import NpuBackend, no_operators
from metronome.shared_prompt.npu_ops import NpuOps, Visible, causal, everything
from metronome.shared_prompt.plan import SharedPromptPlan
from metronome.shared_prompt.sinks import add_sinks, sinks_gradient

_WINDOW = "where a window cuts the prompt differs from row to row, and the far call knows no mask; use backend: npu"


class NpuCascadeBackend(NpuBackend):
    """Prompt once, responses to prompt without copies; ``NpuBackend`` lists the arguments."""

    name = "npu_cascade"

    def supports(self, need: AttentionNeed) -> str | None:
        """None, or why not: as ``NpuBackend``, no windows, and always statistics by token."""
        if need.window:
            return _WINDOW
        reason = super().supports(need)
        ops = self._ops()
        if reason is not None or isinstance(ops, str):
            return reason
        missing = ops.no_statistics(need.device, need.dtype)
        return None if missing is None else f"two calls are joined by each token's statistics: {missing}"

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: SharedPromptPlan,
        scale: float,
        *,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """``q [Q,Nq,D], k [T,Nkv,D], v [T,Nkv,Dv] -> [Q,Nq,Dv]`` in q's dtype; padding attends to itself.

        Raises ConfigurationError for a window, without operators, or if one sequence exceeds their limits.
        """
        if window is not None:
            raise ConfigurationError(
                f"attention backend {self.name!r} takes no window",
                found=window,
                where="metronome.shared_prompt.backend",
                remedy="backend: npu",
            )
        ops = self._ops()
        if isinstance(ops, str):
            raise no_operators(self.name, ops)
        width = v.shape[-1]
        q, k, v = even_heads(q, k, v)
        apply: Callable[..., Tensor] = _NpuCascade.apply
        return apply(q, k, v, sinks, ops, plan, scale, self._limits)[..., :width]


class _NpuCascade(torch.autograd.Function):
    """Saves q, k, v, the output and two statistics a token and head."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        ops: NpuOps,
        plan: SharedPromptPlan,
        scale: float,
        limits: Limits,
    ) -> Tensor:
        exact = _exact(q)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        peak, total = (torch.empty(q.shape[:2], dtype=exact, device=q.device) for _ in range(2))
        for call, visible, is_far in _calls(plan, limits, q.device):
            rows, keys = call.query_rows, call.key_rows
            part = ops.forward(q[rows], k[keys], v[keys], call, scale, visible, by_token=True)
            if is_far:
                part = _join((out[rows], peak[rows], total[rows]), part)
            out[rows], peak[rows], total[rows] = part
        if sinks is not None:
            out, peak = add_sinks(out, peak + total.log(), sinks)
            total = torch.ones_like(peak)
        ctx.save_for_backward(q, k, v, sinks, out, peak, total)
        ctx.arguments = ops, plan, scale, limits
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ops, plan, scale, limits = ctx.arguments
        q, k, v, sinks, out, peak, total = ctx.saved_tensors
        exact = _exact(q)
        sums = [torch.zeros(x.shape, dtype=exact, device=x.device) for x in (q, k, v)]
        for call, visible, _ in _calls(plan, limits, q.device):
            rows, keys = call.query_rows, call.key_rows
            saved = out[rows], peak[rows], total[rows]
            parts = ops.backward(grad[rows], q[rows], k[keys], v[keys], *saved, call, scale, visible, by_token=True)
            for target, part, place in zip(sums, parts, (rows, keys, keys), strict=True):
                target[place] += part  # a row stands in a call at most once, so that none is lost
        dsinks = None if sinks is None else sinks_gradient(grad, out, peak + total.log(), sinks)
        dq, dk, dv = (one.to(x.dtype) for one, x in zip(sums, (q, k, v), strict=True))
        return dq, dk, dv, dsinks, None, None, None, None


def _calls(plan: SharedPromptPlan, limits: Limits, device: torch.device) -> Iterator[tuple[Call, Visible, bool]]:
    """Every own call, which between them cover all rows, then every far call, marked True."""
    for call in own(plan, limits):
        yield call, causal(device), False
    for call in far(plan, limits):
        yield call, everything(), True


def _join(one: tuple[Tensor, Tensor, Tensor], other: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Two softmaxes over different keys as one: ``out [S,N,D], peak [S,N], total [S,N]`` of each."""
    peak = torch.maximum(one[1], other[1])
    a, b = (total * torch.exp(old - peak) for _, old, total in (one, other))
    total = a + b
    out = one[0].to(total.dtype) * (a / total)[..., None] + other[0].to(total.dtype) * (b / total)[..., None]
    return out.to(one[0].dtype), peak, total


def _exact(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
