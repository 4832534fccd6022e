"""The fused attention operators of Ascend NPUs (``torch_npu``): finding them, what they can do, and one call.

The contract, from the documentation of ``torch_npu.npu_fusion_attention`` (Ascend/op-plugin) and CANN's pages on
``aclnnFlashAttentionVarLenScore`` and ``aclnnFlashAttentionUnpaddingScoreGrad``: layout ``TND``, cumulative
lengths as host integers, at most 1024 sequences and 1M rows a call, at most 256 heads of at most 768 elements,
float16 or bfloat16 for training; in the mask 1 hides. Rows behind the last sequence are uninitialised memory.

``torch_npu`` is imported when a backend is first asked about an NPU, never before. Where it is installed without
CANN, ``import torch`` itself fails unless ``TORCH_DEVICE_BACKEND_AUTOLOAD=0``. Nothing here was run on a card:
the tests run on a stand-in that keeps this contract, so the kernels' speed and rounding aren't known to us.

Shape suffixes in words: S query rows, M key rows, Nq and Nkv heads, D head width.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from metronome.contracts import AttentionNeed
from metronome.shared_prompt.calls import Call, Limits

LIMITS = Limits(sequences=1024, keys=1_048_576)
DTYPES = ("bfloat16", "float16")
"""What the gradient of the TND layout takes; float32 is documented for the forward pass alone."""

_HEADS, _WIDTH = 256, 768
_EDGE = 2048  # of the compressed causal mask
_COPIES = 8  # of each statistic, in the last dimension
_FORWARD, _BACKWARD = "npu_fusion_attention", "npu_fusion_attention_grad"

Visible = dict[str, Any]
"""Arguments that say which keys a query row sees; none: all keys of its sequence."""


def everything() -> Visible:
    """Every key of the sequence."""
    return {}


def causal(device: torch.device, window: int | None = None) -> Visible:
    """Row i of n sees key j of m with ``j <= i + m - n``, a window w adding ``j > i + m - n - w``.

    Modes 3 (causal) and 4 (a band), both aligned at the lower right, with the compressed mask.
    """
    if window is None:
        return {"atten_mask": causal_mask(device), "sparse_mode": 3}
    return {"atten_mask": causal_mask(device), "sparse_mode": 4, "pre_tockens": window - 1, "next_tockens": 0}


@cache
def causal_mask(device: torch.device) -> Tensor:
    """Bool ``[2048, 2048]``, 1 above the diagonal, whatever the sequences' lengths; 4 MiB a device, made once."""
    return torch.ones(_EDGE, _EDGE, dtype=torch.bool, device=device).triu(diagonal=1)


def find_ops(given: Any = None) -> NpuOps | str:
    """The operators in ``torch.ops.npu`` or in ``given``, or the sentence why there are none."""
    space = torch.ops.npu if given is None else given
    if given is None and not hasattr(space, _FORWARD):
        try:
            import_module("torch_npu")
        except ModuleNotFoundError as error:
            if error.name != "torch_npu":
                return f"torch_npu can't be imported ({error})"
            return "torch_npu isn't installed"
        except Exception as error:  # its libraries come with CANN, and it examines the machine
            return f"torch_npu can't be imported ({error}); source CANN's set_env.sh first"
    missing = [name for name in (_FORWARD, _BACKWARD) if not hasattr(space, name)]
    if missing:
        return f"this torch_npu lacks {' and '.join(missing)}"
    return NpuOps(getattr(space, _FORWARD), getattr(space, _BACKWARD))


def refusal(need: AttentionNeed, device: str, dtypes: tuple[str, ...]) -> str | None:
    """Why the operators can't compute heads of ``need``, or None; they aren't looked for."""
    if need.device != device:
        return f"the fused attention of torch_npu runs on {device}, this is {need.device}"
    if need.dtype not in dtypes:
        return f"its gradient is documented for {' and '.join(dtypes)}, this is {need.dtype}"
    width = max(need.head_dim, need.value_dim)
    if width > _WIDTH:
        return f"its heads are at most {_WIDTH} wide, these are {width}"
    if need.heads > _HEADS:
        return f"it takes at most {_HEADS} query heads, these are {need.heads}"
    return None


class NpuOps:
    """Both operators; statistics are kept once, not in the operators' eight copies.

    ``peak`` and ``total`` are ``[S,Nq]``: the largest scaled score of a row and the sum of
    ``exp(score - peak)``. Only with ``by_token`` do their rows follow the tokens; otherwise the operator orders
    them sequence by sequence, heads first, whatever the shape says, and they serve to be given back alone.
    """

    def __init__(self, forward: Any, backward: Any) -> None:
        self._forward, self._backward = forward, backward
        self._probed: dict[tuple[str, str], str | None] = {}

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float, visible: Visible, by_token: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``q [S,Nq,D], k [M,Nkv,D], v [M,Nkv,D] -> out [S,Nq,D], peak [S,Nq], total [S,Nq]``."""
        out, peak, total = self._forward(
            q.contiguous(),
            k.contiguous(),
            v.contiguous(),
            q.shape[1],
            "TND",
            scale=scale,
            **_lengths(call, by_token),
            **visible,
        )[:3]
        return out, peak[..., 0].contiguous(), total[..., 0].contiguous()

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        peak: Tensor,
        total: Tensor,
        call: Call,
        scale: float,
        visible: Visible,
        by_token: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``dq, dk, dv`` with ``p = exp(scale q k - peak) / total`` and ``dS = p (dO v - dO o)``."""
        dq, dk, dv = self._backward(
            q.contiguous(),
            k.contiguous(),
            v.contiguous(),
            grad.contiguous(),
            q.shape[1],
            "TND",
            softmax_max=_copies(peak),
            softmax_sum=_copies(total),
            attention_in=out.contiguous(),
            scale_value=scale,
            **_lengths(call, by_token),
            **visible,
        )[:3]
        return dq, dk, dv

    def no_statistics(self, device: str, dtype: str) -> str | None:
        """Why rows of the statistics can't be had by token, or None; tried once a device and dtype.

        The argument must be in the schema, and two sequences of 3 and 5 tokens with 2 heads must come back in
        the tokens' order: the documentation has it from TorchNPU 7.2.0 with CANN 8.3.RC1 on, and an older
        driver could drop it in silence.
        """
        if (device, dtype) not in self._probed:
            self._probed[device, dtype] = self._try_statistics(device, dtype)
        return self._probed[device, dtype]

    def _try_statistics(self, device: str, dtype: str) -> str | None:
        needs = "TorchNPU 7.2.0 with CANN 8.3.RC1"
        schema = self._forward.default._schema
        if not any(argument.name == "softmax_layout" for argument in schema.arguments):
            return f"{_FORWARD} has no softmax_layout, so statistics have no order by token; it needs {needs}"
        heads, width, lengths = 2, 16, (3, 5)
        ends = (lengths[0], sum(lengths))
        rows = slice(0, ends[-1])
        call = Call(rows, rows, ends, ends, max(lengths), max(lengths))
        # Every query has a score of its own, the same for all keys: small integers, exact in bfloat16.
        score = torch.arange(ends[-1] * heads, dtype=torch.float32).reshape(-1, heads)
        q = torch.zeros(ends[-1], heads, width)
        q[..., 0] = score
        k = torch.zeros_like(q)
        k[..., 0] = 1
        place = torch.cat([torch.arange(1, length + 1) for length in lengths])
        wanted = score + place.float().log()[:, None]
        q, k = (x.to(torch.device(device), getattr(torch, dtype)) for x in (q, k))
        try:
            with torch.no_grad():
                _, peak, total = self.forward(q, k, k, call, 1.0, causal(q.device), by_token=True)
            difference = (peak.float() + total.float().log()).cpu() - wanted
        except RuntimeError as error:  # what CANN says of an argument that its operator doesn't know
            return f"{_FORWARD} fails with softmax_layout ({error}); it needs {needs}"
        if not bool(difference.abs().max() < 0.1):  # a NaN is a difference too
            return f"softmax_layout is taken but the statistics aren't each token's; it needs {needs}"
        return None


def _lengths(call: Call, by_token: bool) -> dict[str, Any]:
    """Older versions lack ``softmax_layout``, so that it is passed only where it is needed."""
    ends = {"actual_seq_qlen": call.query_ends, "actual_seq_kvlen": call.key_ends}
    return {**ends, "softmax_layout": "TND"} if by_token else ends


def _copies(statistic: Tensor) -> Tensor:
    return statistic[..., None].expand(*statistic.shape, _COPIES).contiguous()
