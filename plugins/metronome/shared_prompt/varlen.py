"""CUDA: one flash-attention call over sequences that share gathered keys (``gathered.py``), torch's or flash-attn's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from metronome.contracts import AttentionNeed
from metronome.errors import ConfigurationError
from metronome.shared_prompt.flash_kernels import WIDEST_HEAD, find_kernel
from metronome.shared_prompt.gathered import VarlenKernel, even_heads, gathered_attention
from metronome.shared_prompt.plan import SharedPromptPlan
from metronome.shared_prompt.reference import common_refusal

_OLDEST_CARD = (8, 0)  # "FlashAttention only supports Ampere GPUs or newer", flash_api.cpp


class VarlenBackend:
    """Every response is a sequence whose keys are the prompt's and its own; the copies live for one call only.

    Args:
        device: the kind of device that the kernel runs on.
        dtypes: what the kernel takes.
        kernel: the kernel; None: torch's own, else flash-attn's.
    """

    name = "varlen"
    shares_prompt = True

    def __init__(
        self,
        device: str = "cuda",
        dtypes: Sequence[str] = ("bfloat16", "float16"),
        kernel: VarlenKernel | None = None,
    ) -> None:
        self._device, self._dtypes, self._given = device, tuple(dtypes), kernel

    @cached_property
    def kernel(self) -> VarlenKernel | str:
        """The kernel, or why there is none."""
        return find_kernel() if self._given is None else self._given

    def supports(self, need: AttentionNeed) -> str | None:
        """None, or why not: device and its age, dtype, head width, and what is installed."""
        if need.device != self._device:
            return f"flash attention's kernel is for {self._device}, this is {need.device}"
        if need.dtype not in self._dtypes:
            return f"flash attention takes {' and '.join(self._dtypes)}, this is {need.dtype}"
        widest = max(need.head_dim, need.value_dim)
        if widest > WIDEST_HEAD:
            return f"flash attention's heads are at most {WIDEST_HEAD} wide, this is {widest}"
        common = common_refusal(need)
        if common is not None:
            return common
        if isinstance(self.kernel, str):
            return f"no flash attention for packed sequences ({self.kernel})"
        if need.device == "cuda" and torch.cuda.is_available():
            age = torch.cuda.get_device_capability()
            if age < _OLDEST_CARD:
                return f"flash attention needs compute capability 8.0, this card has {age[0]}.{age[1]}"
        return None

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

        Gradients are bit for bit repeatable under ``torch.use_deterministic_algorithms(True)`` only: the kernel
        and the sum over the prompt's copies add atomically. Raises ConfigurationError if no kernel is installed, or
        if one prompt with its response exceeds the kernel's limits.
        """
        kernel = self.kernel
        if isinstance(kernel, str):
            raise ConfigurationError(
                "no flash attention for packed sequences is installed",
                found=kernel,
                where="metronome.shared_prompt.backend",
                remedy="a CUDA build of torch 2.13, flash-attn 2.7 or 2.8, or backend: flex",
            )
        width = v.shape[-1]
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))  # both packages' kernels ask for it
        wide = even_heads(q, k, v, multiple=8)
        return gathered_attention(kernel, *wide, plan, scale, window, sinks)[..., :width]
