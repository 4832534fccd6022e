"""The names of flash-attn that OpenRLHF imports, in torch: padding taken out and put back.

OpenRLHF imports them at the top of a module whether it uses them or not, and flash-attn can't be built without CUDA.
There is no version metadata, so transformers doesn't take flash-attn for installed.
"""

from __future__ import annotations

import functools
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from metronome.errors import ConfigurationError


def rearrange(tensor: Tensor, pattern: str, **sizes: int) -> Tensor:
    """einops' own; ``pattern`` as there."""
    einops: Any = import_module("einops")
    found: Tensor = einops.rearrange(tensor, pattern, **sizes)
    return found


def index_first_axis(rows: Tensor, indices: Tensor) -> Tensor:
    """``rows[indices]``: ``(N, ...)`` and ``(T,)`` give ``(T, ...)``."""
    return rows[indices]


def unpad_input(rows: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Rows without padding: ``(B, S, ...)`` and mask ``(B, S)`` give ``(T, ...)``, its T places in ``B S``, the
    running sums ``(B + 1,)`` of the lengths, the longest length, and the lengths ``(B,)``.
    """
    lengths = attention_mask.sum(dim=1, dtype=torch.int32)
    places = attention_mask.flatten().nonzero().flatten()
    sums = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=rows.device)
    sums[1:] = lengths.cumsum(0)
    return rows.flatten(0, 1)[places], places, sums, int(lengths.max()), lengths


def pad_input(rows: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of ``unpad_input``: ``(T, ...)`` gives ``(batch, seqlen, ...)`` with zeros between."""
    padded = rows.new_zeros((batch * seqlen, *rows.shape[1:]))
    padded[indices] = rows
    return padded.unflatten(0, (batch, seqlen))


def all_gather(*_: Any, **__: Any) -> Any:
    """Refuses: it is called by ring attention only."""
    raise ConfigurationError(
        "ring attention needs flash-attn",
        where="the CPU room",
        remedy="--ds.ring_attn_size 1",
    )


@functools.cache
def modules() -> dict[str, ModuleType]:
    """``flash_attn`` and its two modules by name, each with a spec."""
    root, padding, utils, distributed = made = [
        _module(name, package)
        for name, package in (
            ("flash_attn", True),
            ("flash_attn.bert_padding", False),
            ("flash_attn.utils", True),
            ("flash_attn.utils.distributed", False),
        )
    ]
    vars(root).update(bert_padding=padding, utils=utils, __version__="0")
    vars(utils).update(distributed=distributed)
    vars(distributed).update(all_gather=all_gather)
    for function in (rearrange, index_first_axis, unpad_input, pad_input):
        setattr(padding, function.__name__, function)
    return {module.__name__: module for module in made}


def _module(name: str, package: bool) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None, is_package=package)
    if package:
        module.__path__ = []
    return module
