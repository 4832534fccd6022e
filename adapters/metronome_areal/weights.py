"""Whether a step moved the weights: a sum over their bits, before and after."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def fingerprint(module: Any) -> list[int]:
    """One integer a trained parameter of this rank's shard: the sum of its values, their bits read as integers."""
    trained = [one for one in module.parameters() if one.requires_grad]
    return bits([one.to_local() if isinstance(one, DTensor) else one for one in trained])


@torch.no_grad()
def bits(tensors: Iterable[torch.Tensor]) -> list[int]:
    """One integer a tensor: the sum of its values, their bits read as integers."""
    sums = [one.detach().contiguous().view(_BITS[one.element_size()]).sum(dtype=torch.int64).cpu() for one in tensors]
    return [int(one) for one in torch.stack(sums)] if sums else []


class Movement:
    """What happened to the weights in an update.

    Attributes:
        norm: the largest gradient norm of a step that was taken; AReaL leaves out one whose norm isn't finite.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """A new update."""
        self._before: list[int] | None = None
        self._rate = self.norm = 0.0

    def before_step(self, engine: Any) -> None:
        """Notes the learning rate of a step to come, and the weights before the first."""
        if self._before is None:
            self._before = fingerprint(engine.model)
        self._rate = max([self._rate, *(float(group["lr"]) for group in engine.optimizer.param_groups)])

    def stepped(self, found: Mapping[str, float]) -> None:
        """Notes AReaL's metrics of a step."""
        if found["update_successful"] and math.isfinite(found["grad_norm"]):
            self.norm = max(self.norm, found["grad_norm"])

    def after_step(self, engine: Any) -> dict[str, float]:
        """``metronome/weights/changed`` (0 or 1, on any rank) and ``/lr``."""
        changed = torch.tensor([int(fingerprint(engine.model) != self._before)])
        if dist.is_initialized():
            dist.all_reduce(changed, op=dist.ReduceOp.MAX, group=engine.cpu_group)
        return {"metronome/weights/changed": float(changed), "metronome/weights/lr": self._rate}
