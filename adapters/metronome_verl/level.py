"""As many passes on every data-parallel rank: shares of a batch are filled up with masked rows.

verl's ranks meet in collectives in every micro-batch; one that had fewer, or none, would leave the others waiting.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu


def everywhere(here: Any, group: Any) -> list[Any]:
    """What each rank of ``group`` has here, in the order of ranks; every rank must call."""
    found: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(found, here, group=group)
    return found


def levelled(data: TensorDict, group: Any) -> TensorDict:
    """``data`` with as many rows as on every other rank, rounded up to what a micro-batch takes; fillers are masked."""
    multiple = int(tu.get_non_tensor_data(data, "force_group_size", 1))
    if not tu.get_non_tensor_data(data, "use_dynamic_bsz", True):
        multiple *= int(tu.get_non_tensor_data(data, "micro_batch_size_per_gpu", 1))
    sizes = everywhere(len(data), group)
    wanted = -(-max(sizes) // multiple) * multiple
    if min(sizes) == 0 < max(sizes):
        offers = everywhere(tu.index_select_tensor_dict(data, _shortest(data)) if len(data) else None, group)
        if not len(data):
            return _filled(next(row for row in offers if row is not None), 0, wanted)
    return _filled(data, len(data), wanted)


def _filled(data: TensorDict, real: int, wanted: int) -> TensorDict:
    """The first ``real`` rows of ``data`` and masked copies of its shortest row up to ``wanted`` rows."""
    if real == wanted:
        return data
    filled = tu.index_select_tensor_dict(data, [*range(real), *_shortest(data) * (wanted - real)])
    for key in ("loss_mask", "response_mask"):
        rows = filled[key].unbind()
        filled[key] = tu.nested_tensor_from_tensor_list(
            [row if place < real else torch.zeros_like(row) for place, row in enumerate(rows)]
        )
    return filled


def _shortest(data: TensorDict) -> list[int]:
    return [int(data["input_ids"].offsets().diff().argmin())]
