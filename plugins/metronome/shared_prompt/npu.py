"""Attention on Ascend NPUs: one fused TND call over sequences that share gathered keys (``gathered.py``).

Every sequence is what a separate row would hold, so the call is the one that transformers and verl make for
packed rows, ``sparse_mode`` 3, with other key lengths. The gradient comes from ``npu_fusion_attention_grad``.
That one isn't deterministic by default; ``torch.use_deterministic_algorithms(True)`` makes it so, says CANN's list
of operators. Not run on a card.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from metronome.contracts import AttentionNeed
from metronome.errors import ConfigurationError
from metronome.shared_prompt.calls import Call, Limits
from metronome.shared_prompt.gathered import even_heads, gathered_attention
from metronome.shared_prompt.npu_ops import DTYPES, LIMITS, NpuOps, causal, find_ops, refusal
from metronome.shared_prompt.plan import SharedPromptPlan
from metronome.shared_prompt.reference import common_refusal


class NpuBackend:
    """Gathered keys, windows as a band, sinks added to the statistics.

    Args:
        ops: where the operators are; None: ``torch.ops.npu``, looked for at the first question about an NPU.
        device: the device type that the operators run on.
        dtypes: the dtypes that their gradient takes.
        limits: the most that one call may hold.
    """

    name = "npu"
    shares_prompt = True

    def __init__(
        self, ops: Any = None, device: str = "npu", dtypes: tuple[str, ...] = DTYPES, limits: Limits = LIMITS
    ) -> None:
        self._given, self._device, self._dtypes, self._limits = ops, device, dtypes, limits
        self._found: NpuOps | None = None

    def supports(self, need: AttentionNeed) -> str | None:
        """None, or why not: another device or dtype, heads beyond the operators', or no operators.

        Sinks need statistics by token (TorchNPU 7.2.0 with CANN 8.3.RC1).
        """
        reason = common_refusal(need) or refusal(need, self._device, self._dtypes)
        if reason is not None:
            return reason
        ops = self._ops()
        if isinstance(ops, str):
            return ops
        missing = ops.no_statistics(need.device, need.dtype) if need.sinks else None
        return None if missing is None else f"sinks need the log-sum-exp of each token: {missing}"

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

        Heads are widened with zeros to one width: the operator's page asks for ``D >= Dv`` in one place and for
        keys and values of one shape in another.

        Raises ConfigurationError if there are no operators or one sequence exceeds their limits.
        """
        ops = self._ops()
        if isinstance(ops, str):
            raise no_operators(self.name, ops)
        width = v.shape[-1]
        kernel = _Kernel(ops, self._limits, by_token=sinks is not None)
        return gathered_attention(kernel, *even_heads(q, k, v), plan, scale, window, sinks)[..., :width]

    def _ops(self) -> NpuOps | str:
        if self._found is None:
            found = find_ops(self._given)
            if isinstance(found, str):
                return found
            self._found = found
        return self._found


def no_operators(name: str, reason: str) -> ConfigurationError:
    """The error of a backend that was called without its operators."""
    return ConfigurationError(
        f"attention backend {name!r} has no operators: {reason}",
        where="metronome.shared_prompt.backend",
        remedy="install torch_npu with CANN, or backend: reference",
    )


class _Kernel:
    """The operators as ``gathered.py`` asks for them; the statistics are ``peak`` and ``total``."""

    def __init__(self, ops: NpuOps, limits: Limits, by_token: bool) -> None:
        self.limits = limits
        self._ops, self._by_token = ops, by_token

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float, window: int | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        visible = causal(q.device, window)
        out, peak, total = self._ops.forward(q, k, v, call, scale, visible, self._by_token)
        return out, (peak, total)

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
        peak, total = statistics
        visible = causal(q.device, window)
        return self._ops.backward(grad, q, k, v, out, peak, total, call, scale, visible, self._by_token)

    def log_sum_exp(self, statistics: tuple[Tensor, ...]) -> Tensor:
        peak, total = statistics
        return peak + total.log()

    def statistics(self, lse: Tensor) -> tuple[Tensor, ...]:
        return lse, torch.ones_like(lse)
