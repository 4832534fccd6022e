"""As many passes on every data-parallel rank: FSDP's collectives wait for each rank's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from areal.api.cli_args import MicroBatchSpec
from areal.utils.data import DEFAULT_MAX_TOKENS_PER_MB, allocate_balanced_mbs

MASKED = "metronome_masked"
"""Key of a group that fills a part up, and of which nothing is trained."""


def levelled(groups: list[dict[str, Any]], spec: MicroBatchSpec, group: Any) -> list[dict[str, Any]]:
    """``groups``, and after them one of masked rows where this rank has fewer rows than micro-batches are needed.

    AReaL cuts a batch into as many micro-batches on every rank, at least a row each. A part that is empty everywhere
    stays so.

    Args:
        groups: of this rank.
        spec: the engine's ``mb_spec``.
        group: the data-parallel ranks; all of them call.
    """
    lengths = [int(length) for one in groups for length in one["attention_mask"].sum(1)]
    found: list[Any] = [(micro_batches(lengths, spec), _shortest(groups))]
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        mine, found = found[0], [None] * dist.get_world_size(group)
        dist.all_gather_object(found, mine, group=group)
    offered = [row for _, row in found if row is not None]
    missing = max(needed for needed, _ in found) - len(lengths)
    if not offered or missing <= 0:
        return groups
    row = min(offered, key=lambda one: one["attention_mask"].shape[1])
    return [*groups, {name: _repeated(value, missing) for name, value in row.items()}]


def micro_batches(lengths: list[int], spec: MicroBatchSpec) -> int:
    """How many micro-batches AReaL needs for rows of these lengths, at least; 0 without rows."""
    least = -(-(spec.n_mbs or 1) // spec.n_mbs_divisor) * spec.n_mbs_divisor
    if len(lengths) <= least:
        return least if lengths else 0
    most = spec.max_tokens_per_mb or DEFAULT_MAX_TOKENS_PER_MB
    plain = MicroBatchSpec.new(spec, n_mbs=least, n_mbs_divisor=1, max_tokens_per_mb=most)  # it raises for few rows
    return -(-len(allocate_balanced_mbs(plain, lengths)) // spec.n_mbs_divisor) * spec.n_mbs_divisor


def masked(group: dict[str, Any]) -> dict[str, Any]:
    """``group`` without a trained token."""
    mask = {"loss_mask": torch.zeros_like(group["loss_mask"])} if "loss_mask" in group else {}
    return {**group, **mask}


def _shortest(groups: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The shortest row of all, as a group of one row with the same keys."""
    if not groups:
        return None
    lengths = [
        (int(length), place, row)
        for place, one in enumerate(groups)
        for row, length in enumerate(one["attention_mask"].sum(1))
    ]
    length, place, row = min(lengths)
    rows = len(groups[place]["attention_mask"])
    return masked({name: _cut(value, row, rows, length) for name, value in groups[place].items()})


def _cut(value: Any, row: int, rows: int, length: int) -> Any:
    if torch.is_tensor(value) and value.ndim and len(value) == rows:
        value = value[row : row + 1].cpu()
        return value[:, :length] if value.ndim > 1 else value
    return value[row : row + 1] if isinstance(value, list) and len(value) == rows else value


def _repeated(value: Any, times: int) -> Any:
    if torch.is_tensor(value) and value.ndim:
        return value.repeat_interleave(times, 0)
    return value * times if isinstance(value, list) else value
