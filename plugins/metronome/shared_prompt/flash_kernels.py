"""Flash-attention kernels for packed sequences: torch's own, or those of the ``flash-attn`` package.

Both are told the same: ``cu_seqlens`` (int32, a leading 0), the longest lengths, the factor of the scores, and
``causal`` with a window. Causal is aligned at the lower right (flash-attn >= 2.1, documented in
flash_attn_interface.py; torch's CUDA op is the same kernel, flash_attn/flash_api.cpp ``mha_varlen_fwd``), so that
the n queries of a response see all keys in front of them. A window of w tokens, the query included, is ``left
w - 1`` and ``right 0``. Statistics are the log-sum-exp, float32 ``[Nq,S]``, natural logarithm.

Not run on a card here: schemas and shapes are checked against torch's meta kernels, arithmetic against stand-ins.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from metronome.shared_prompt.calls import Call, Limits
from metronome.shared_prompt.gathered import VarlenKernel

LIMITS = Limits(sequences=65535, keys=2**31 - 1)
"""The grid has one row a sequence, of which CUDA takes 65535; cumulative lengths are int32."""

WIDEST_HEAD = 256
"""Head width: "only supports head dimension at most 256", and a multiple of 8 (flash_api.cpp, both packages)."""


def _names(text: str) -> list[str]:
    return text.split()


_TORCH_FORWARD = _names(
    "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask "
    "scale window_size_left window_size_right"
)
_TORCH_BACKWARD = _names(
    "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal rng_state unused "
    "scale window_size_left window_size_right"
)
_PACKAGE_FORWARD = _names(
    "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal window_size_left "
    "window_size_right softcap alibi_slopes"
)
_PACKAGE_BACKWARD = _names(
    "dout q k v out softmax_lse dq dk dv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p "
    "softmax_scale causal window_size_left window_size_right softcap alibi_slopes deterministic"
)


class _LogSumExp:
    """The statistics of both kernels: one tensor ``[Nq,S]``."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.limits = limits

    def log_sum_exp(self, statistics: tuple[Tensor, ...]) -> Tensor:
        """``[S,Nq]``, a view."""
        return statistics[0].transpose(0, 1)

    def statistics(self, lse: Tensor) -> tuple[Tensor, ...]:
        """The kernel's order of ``lse [S,Nq]``."""
        return (lse.transpose(0, 1).contiguous(),)


class TorchFlash(_LogSumExp):
    """``aten::_flash_attention_forward`` and ``_backward`` (torch 2.13), called as torch.nn.attention.varlen does.

    The op follows ``torch.use_deterministic_algorithms`` itself, and whichever flash version
    ``torch.nn.attention.activate_flash_attention_impl`` has put in its place.
    """

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float, window: int | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """``q [S,Nq,D], k and v [M,Nkv,D] -> [S,Nq,D]`` and the log-sum-exp."""
        ends = call.offsets(q.device)
        longest = call.longest_query, call.longest_key
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *ends, *longest, 0.0, True, return_debug_mask=False, scale=scale, **_window(window)
        )
        return out, (lse,)

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
        """``dq, dk, dv`` of ``grad [S,Nq,D]``."""
        ends = call.offsets(q.device)
        longest = call.longest_query, call.longest_key
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which there is none of
        unused = torch.empty(0, device=q.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            *(grad, q, k, v, out, statistics[0]),
            *(*ends, *longest, 0.0, True, state, unused),
            scale=scale,
            **_window(window),
        )
        return dq, dk, dv


class PackageFlash(_LogSumExp):
    """``flash_attn.flash_attn_interface._flash_attn_varlen_forward`` and ``_backward`` of flash-attn 2.7 and 2.8."""

    def __init__(self, forward: Callable[..., Any], backward: Callable[..., Any], limits: Limits = LIMITS) -> None:
        super().__init__(limits)
        self._forward, self._backward = forward, backward

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float, window: int | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """``q [S,Nq,D], k and v [M,Nkv,D] -> [S,Nq,D]`` and the log-sum-exp."""
        out, lse, *_ = self._forward(q=q, k=k, v=v, **_package_arguments(q, call, scale, window))
        return out, (lse,)

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
        """``dq, dk, dv`` of ``grad [S,Nq,D]``; bit for bit repeatable under ``use_deterministic_algorithms``."""
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        self._backward(
            **{"dout": grad, "q": q, "k": k, "v": v, "out": out, "softmax_lse": statistics[0]},
            **{"dq": dq, "dk": dk, "dv": dv},
            **_package_arguments(q, call, scale, window),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return dq, dk, dv


def find_kernel() -> VarlenKernel | str:
    """The kernel that is installed, or why there is none.

    Torch's own goes first: it needs no package, follows torch's switch for determinism, and its schema is the one
    that torch itself calls.
    """
    own = _torch_refusal()
    if own is None:
        return TorchFlash()
    package = _package()
    return package if isinstance(package, PackageFlash) else f"torch: {own}; flash-attn: {package}"


def _torch_refusal() -> str | None:
    if torch.version.hip is not None:
        return "the ROCm build's kernel has other rules than CUDA's"
    if not torch.backends.cuda.is_flash_attention_available():
        return "this build has no flash attention"
    for op, wanted in (
        (torch.ops.aten._flash_attention_forward, _TORCH_FORWARD),
        (torch.ops.aten._flash_attention_backward, _TORCH_BACKWARD),
    ):
        schema = op.default._schema
        required = [argument.name for argument in schema.arguments if not argument.has_default_value()]
        reason = _mismatch(schema.name, [argument.name for argument in schema.arguments], required, wanted)
        if reason is not None:
            return reason
    return None


def _package() -> PackageFlash | str:
    try:
        interface = import_module("flash_attn.flash_attn_interface")
    except (ImportError, OSError) as error:  # OSError: a shared library built for another torch
        return f"can't be imported ({error})"
    functions: list[Callable[..., Any]] = []
    for name, wanted in (
        ("_flash_attn_varlen_forward", _PACKAGE_FORWARD),
        ("_flash_attn_varlen_backward", _PACKAGE_BACKWARD),
    ):
        function = getattr(interface, name, None)
        if function is None:
            return f"{name} is missing, 2.7 or 2.8 is needed"
        # A custom op's own signature is (*args, **kwargs); the function it was made of stands in _init_fn.
        parameters = inspect.signature(getattr(function, "_init_fn", function)).parameters.values()
        required = [one.name for one in parameters if one.default is one.empty]
        reason = _mismatch(name, [one.name for one in parameters], required, wanted)
        if reason is not None:
            return f"{reason}, 2.7 or 2.8 is needed"
        functions.append(function)
    return PackageFlash(functions[0], functions[1])


def _mismatch(name: str, known: Iterable[str], required: Iterable[str], wanted: list[str]) -> str | None:
    """Whether a kernel takes what we pass, and asks for nothing that we don't."""
    missing = [one for one in wanted if one not in set(known)]
    unknown = [one for one in required if one not in wanted]
    if not missing and not unknown:
        return None
    lacks = f"doesn't take {', '.join(missing)}" if missing else ""
    asks = f"asks for {', '.join(unknown)}" if unknown else ""
    return f"{name} {' and '.join(part for part in (lacks, asks) if part)}"


def _window(window: int | None) -> dict[str, int]:
    # An explicit right side of 0 keeps single-row calls off the decoding path, whose results are laid out otherwise.
    return {"window_size_left": -1 if window is None else window - 1, "window_size_right": 0}


def _package_arguments(q: Tensor, call: Call, scale: float, window: int | None) -> dict[str, Any]:
    query_ends, key_ends = call.offsets(q.device)
    return {
        "cu_seqlens_q": query_ends,
        "cu_seqlens_k": key_ends,
        "max_seqlen_q": call.longest_query,
        "max_seqlen_k": call.longest_key,
        "dropout_p": 0.0,
        "softmax_scale": scale,
        "causal": True,
        "softcap": 0.0,
        "alibi_slopes": None,
        **_window(window),
    }
