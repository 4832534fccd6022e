"""As many passes on every data-parallel rank: FSDP's collectives wait for each rank's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


MASKED = "metronome_masked"
"""Key of a group that fills a part up, and of which nothing is trained."""


def levelled(groups: list[dict[str, Any]], group: Any) -> list[dict[str, Any]]:
    """``groups``, or a masked copy of another rank's shortest row on a rank that has none.

    AReaL itself cuts a batch into as many micro-batches on every rank. A part that is empty everywhere stays so.

    Args:
        groups: of this rank.
        group: the data-parallel ranks; all of them call.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return groups
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, _shortest(groups), group=group)
    offered = [one for one in found if one is not None]
    if groups or not offered:
        return groups
    return [min(offered, key=lambda one: one["attention_mask"].shape[1])]


def masked(group: dict[str, Any]) -> dict[str, Any]:
    """``group`` without a trained token."""
    return {**group, "loss_mask": torch.zeros_like(group["loss_mask"])}


def _shortest(groups: list[dict[str, Any]]) -> dict[str, Any] | None:
    if not groups:
        return None
    lengths = [
        (int(one["attention_mask"][row].sum()), place, row)
        for place, one in enumerate(groups)
        for row in range(len(one["attention_mask"]))
    ]
    length, place, row = min(lengths)
    chosen = groups[place]
    rows = len(chosen["attention_mask"])
    cut = {
        key: value[row : row + 1, :length].cpu() if value.ndim > 1 else value[row : row + 1].cpu()
        for key, value in chosen.items()
        if torch.is_tensor(value) and len(value) == rows
    }
    return masked(cut)
