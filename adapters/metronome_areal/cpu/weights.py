"""The trainer's weights in full, as the engine's model names them."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

_PEFT = "base_model.model."
_A = ".lora_A.default.weight"


@torch.no_grad()
def gathered(actor: Any) -> dict[str, torch.Tensor]:
    """Every parameter of AReaL's FSDP engine, whole, in its compute dtype; LoRA's merged. All ranks call."""
    full = {
        name: actor._cast_to_compute_dtype(one.full_tensor() if isinstance(one, DTensor) else one)
        for name, one in actor.model.named_parameters()
    }
    return merged(full, actor.config.lora_alpha / actor.config.lora_rank) if actor.config.use_lora else full


def merged(full: dict[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
    """``W + scale B A`` under the name of ``W``, from peft's names.

    Args:
        full: peft's parameters: ``A`` of (rank, in), ``B`` of (out, rank), ``W`` of (out, in).
        scale: alpha / rank.
    """
    found = {}
    for name, value in full.items():
        if ".lora_" in name:
            continue
        layer = name.removesuffix(".base_layer.weight")
        if layer + _A in full:
            value = value + scale * (full[f"{layer}.lora_B.default.weight"] @ full[layer + _A])
        found[name.removeprefix(_PEFT).replace(".base_layer.", ".")] = value
    return found
