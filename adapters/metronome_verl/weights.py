"""Whether an optimiser step moved the weights: a sum over their bits before and after."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def fingerprint(module: Any) -> list[int]:
    """One integer a trained parameter: the sum of this rank's values, their bits read as integers.

    Exact where one value changes, whatever the precision; several changes of one parameter cancel only by chance.
    ``module`` is a module or, as Megatron keeps them, a list of them. No copy of the weights is made.
    """
    modules = module if isinstance(module, (list, tuple)) else [module]
    sums = []
    for parameter in (one for part in modules for one in part.parameters() if one.requires_grad):
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        sums.append(local.detach().view(_BITS[local.element_size()]).sum(dtype=torch.int64))
    return torch.stack([one.to(sums[0].device) for one in sums]).tolist() if sums else []


class Movement:
    """What happened to the weights since ``begin``: whether they moved, and the largest learning rate used."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forgets what was."""
        self.changed, self.lr = False, 0.0

    @contextmanager
    def watched(self, engine: Any) -> Iterator[None]:
        """Around an optimiser step, with the weights where they are trained; looks until one step moved them."""
        rates = [float(group["lr"]) for group in getattr(engine.optimizer, "param_groups", []) if "lr" in group]
        self.lr = max([self.lr, *rates])
        before = None if self.changed else fingerprint(engine.module)
        yield
        if before is not None:
            self.changed = before != fingerprint(engine.module)
