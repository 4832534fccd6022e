"""Stand-ins for flash-attention's kernels: their pinned signatures and checks, plain arithmetic inside.

Semantics by flash-attn's documentation of ``flash_attn_varlen_func`` (2.7) and torch 2.13's schemas: causal aligned
at the lower right of each sequence, a window ``[i + Lk - Lq - left, i + Lk - Lq + right]``, grouped heads, the
log-sum-exp ``[Nq,S]``. ``strict_dtypes=False`` lets float32 and float64 through, for equalities only.
"""

import sys
import types
from contextlib import contextmanager

import torch
from torch import Tensor


class FlashStandIn:
    """The arithmetic, with the mistakes that a kernel or a caller could make as switches."""

    def __init__(self, strict_dtypes=True, upper_left=False, window_dropped=False):
        self.strict_dtypes, self.upper_left, self.window_dropped = strict_dtypes, upper_left, window_dropped
        self.forwards = self.backwards = 0
        self.deterministic = []

    def forward(self, q, k, v, ends_q, ends_k, longest_q, longest_k, scale, causal, left, right):
        self.forwards += 1
        self._check((q, k, v), ends_q, ends_k, longest_q, longest_k)
        decoding = longest_q == 1 and q.shape[1] > k.shape[1] and left < 0 and right < 0
        assert not decoding, "flash_api.cpp swaps heads and rows here, and lays the statistics out otherwise"
        out, lse = torch.empty_like(q), torch.empty(q.shape[1], q.shape[0], dtype=_exact(q))
        for rows, keys in _sequences(ends_q, ends_k):
            scores = self._scores(q[rows], k[keys], scale, causal, left, right)
            lse[:, rows] = scores.logsumexp(-1)
            weights = torch.exp(scores - lse[:, rows, None])
            out[rows] = torch.einsum("hrm,mhv->rhv", weights, _repeated(v[keys], q)).to(q.dtype)
        return out, lse

    def backward(self, grad, q, k, v, out, lse, ends_q, ends_k, longest_q, longest_k, scale, causal, left, right):
        self.backwards += 1
        self._check((q, k, v, out, grad), ends_q, ends_k, longest_q, longest_k)
        assert lse.shape == (q.shape[1], q.shape[0]), "the log-sum-exp is [Nq,S]"
        assert lse.is_contiguous()
        assert lse.dtype == _exact(q)
        dq, dk, dv = (torch.zeros(x.shape, dtype=_exact(x)) for x in (q, k, v))
        for rows, keys in _sequences(ends_q, ends_k):
            scores = self._scores(q[rows], k[keys], scale, causal, left, right)
            weights = torch.exp(scores - lse[:, rows, None])
            g, o = grad[rows].to(_exact(q)), out[rows].to(_exact(q))
            inner = torch.einsum("rhv,mhv->hrm", g, _repeated(v[keys], q)) - (g * o).sum(-1).T[..., None]
            inner = weights * inner * scale
            dq[rows] = torch.einsum("hrm,mhd->rhd", inner, _repeated(k[keys], q))
            far = torch.einsum("hrm,rhd->mhd", inner, q[rows].to(_exact(q)))
            dk[keys] = far.unflatten(1, (k.shape[1], -1)).sum(2)
            far = torch.einsum("hrm,rhv->mhv", weights, g)
            dv[keys] = far.unflatten(1, (k.shape[1], -1)).sum(2)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def _scores(self, q, k, scale, causal, left, right):
        scores = torch.einsum("rhd,mhd->hrm", q.to(_exact(q)), _repeated(k, q)) * scale
        shift = 0 if self.upper_left else len(k) - len(q)
        distance = torch.arange(len(q))[:, None] + shift - torch.arange(len(k))
        if causal:
            right = 0
        seen = torch.ones_like(distance, dtype=torch.bool)
        if right >= 0:
            seen &= distance >= -right
        if left >= 0 and not self.window_dropped:
            seen &= distance <= left
        return scores.masked_fill(~seen, -torch.inf)

    def _check(self, tensors, ends_q, ends_k, longest_q, longest_k):
        q, k, v = tensors[:3]
        allowed = (torch.bfloat16, torch.float16) if self.strict_dtypes else (torch.float32, torch.float64)
        for x in tensors:
            assert x.dtype == q.dtype, "one dtype for all"
            assert x.dtype in allowed, f"FlashAttention only support fp16 and bf16 data type, this is {x.dtype}"
            assert x.dim() == 3
            assert x.shape[-1] == q.shape[-1], "heads of one width"
            assert x.stride(-1) == 1, "Input tensor must have contiguous last dimension"
            assert x.device == q.device
        assert q.shape[-1] % 8 == 0
        assert q.shape[-1] <= 256
        assert k.shape == v.shape
        assert q.shape[1] % k.shape[1] == 0
        assert ends_q.shape == ends_k.shape
        for ends, rows, longest in ((ends_q, len(q), longest_q), (ends_k, len(k), longest_k)):
            assert ends.dtype == torch.int32, "cu_seqlens must have dtype int32"
            assert ends.device == q.device
            assert ends.is_contiguous()
            assert ends[0] == 0
            assert ends[-1] == rows
            assert type(longest) is int
            lengths = ends.diff()
            assert lengths.min() > 0
            assert lengths.max() == longest


@contextmanager
def torch_flash(standin):
    """Torch's own op, with the stand-in behind it on CPU, for the length of the block."""

    def forward(
        q, k, v, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask,
        *, scale=None, window_size_left=None, window_size_right=None, **others,
    ):  # fmt: skip
        assert dropout_p == 0
        assert return_debug_mask is False
        assert not any(value is not None for value in others.values())
        left, right = (-1 if side is None else side for side in (window_size_left, window_size_right))
        out, lse = standin.forward(q, k, v, cum_seq_q, cum_seq_k, max_q, max_k, scale, is_causal, left, right)
        state = torch.empty(2, dtype=torch.uint64)
        return out, lse, state, torch.empty((), dtype=torch.uint64), torch.empty(0, dtype=q.dtype)

    def backward(
        grad, q, k, v, out, lse, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state, unused,
        *, scale=None, window_size_left=None, window_size_right=None,
    ):  # fmt: skip
        assert dropout_p == 0
        assert rng_state.dtype == torch.uint64
        assert rng_state.shape == (2,)
        standin.deterministic.append(torch.are_deterministic_algorithms_enabled())
        left, right = (-1 if side is None else side for side in (window_size_left, window_size_right))
        return standin.backward(
            grad, q, k, v, out, lse, cum_seq_q, cum_seq_k, max_q, max_k, scale, is_causal, left, right
        )

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", forward, "CPU")
        library.impl("_flash_attention_backward", backward, "CPU")
        yield standin


@contextmanager
def package_flash(standin):
    """An importable ``flash_attn`` with the signatures of 2.8, custom ops as there, for the length of the block."""

    @torch.library.custom_op("flash_standin::_flash_attn_varlen_forward", mutates_args=())
    def _flash_attn_varlen_forward(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
        max_seqlen_q: int, max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool,
        window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
        alibi_slopes: Tensor | None = None, return_softmax: bool = False, block_table: Tensor | None = None,
        leftpad_k: Tensor | None = None, seqused_k: Tensor | None = None, zero_tensors: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        assert (dropout_p, softcap, alibi_slopes) == (0.0, 0.0, None)
        out, lse = standin.forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
            softmax_scale, causal, window_size_left, window_size_right,
        )  # fmt: skip
        return out, lse, torch.empty(0), torch.empty(2, dtype=torch.int64)

    @torch.library.custom_op("flash_standin::_flash_attn_varlen_backward", mutates_args=("dq", "dk", "dv"))
    def _flash_attn_varlen_backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
        dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
        max_seqlen_q: int, max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool,
        window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: Tensor | None,
        deterministic: bool, rng_state: Tensor | None = None, zero_tensors: bool = False,
    ) -> Tensor:  # fmt: skip
        assert (dropout_p, softcap, alibi_slopes) == (0.0, 0.0, None)
        standin.deterministic.append(deterministic)
        found = standin.backward(
            dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
            softmax_scale, causal, window_size_left, window_size_right,
        )  # fmt: skip
        for target, part in zip((dq, dk, dv), found, strict=True):
            assert target.is_contiguous()
            target.copy_(part)
        return torch.empty(0)

    package, interface = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.flash_attn_interface")
    package.__path__ = []
    interface._flash_attn_varlen_forward = _flash_attn_varlen_forward
    interface._flash_attn_varlen_backward = _flash_attn_varlen_backward
    package.flash_attn_interface = interface
    names = {"flash_attn": package, "flash_attn.flash_attn_interface": interface}
    before = {name: sys.modules.get(name) for name in names}
    sys.modules.update(names)
    try:
        yield interface
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def _exact(x):
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _repeated(x, q):
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1).to(_exact(x))


def _sequences(ends_q, ends_k):
    starts_q, starts_k = ends_q.tolist(), ends_k.tolist()
    for number in range(len(starts_q) - 1):
        yield slice(starts_q[number], starts_q[number + 1]), slice(starts_k[number], starts_k[number + 1])
