"""Whether the weights to publish are others than those published before: a sum over their bits."""

from __future__ import annotations

from typing import Any

import torch

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def fingerprint(module: Any) -> list[int]:
    """One integer a trained parameter: the sum of its values, their bits read as integers.

    Exact where one value changes, whatever the precision; several changes of one parameter cancel only by chance.
    No copy of the weights is made.
    """
    sums = [
        one.detach().view(_BITS[one.element_size()]).sum(dtype=torch.int64)
        for one in module.parameters()
        if one.requires_grad
    ]
    return torch.stack(sums).tolist() if sums else []


def finite(module: Any) -> bool:
    """Whether every trained weight is a number."""
    return all(bool(torch.isfinite(one.detach()).all()) for one in module.parameters() if one.requires_grad)


class Movement:
    """What happened to the weights since the publication before, and the largest learning rate used since."""

    def __init__(self) -> None:
        self._published: list[int] | None = None
        self._steps = 0
        self._rate = 0.0

    def before_step(self, engine: Any) -> None:
        """Notes the learning rates of a step to come, and the weights if nothing is known of them."""
        if self._published is None:
            self._published, self._steps = fingerprint(engine.module), _steps(engine)
        self._rate = max([self._rate, *(float(group["lr"]) for group in engine.optimizer.param_groups)])

    def publish(self, engine: Any) -> dict[str, float]:
        """``metronome/weights/changed``, ``/finite`` (0 or 1) and ``/lr`` of what is published next.

        The rate is 0 where no optimiser step was taken: OpenRLHF leaves a window half filled at the end of its data.
        """
        now, steps = fingerprint(engine.module), _steps(engine)
        found = {
            "metronome/weights/changed": float(now != self._published),
            "metronome/weights/finite": float(finite(engine.module)),
            "metronome/weights/lr": self._rate if steps > self._steps else 0.0,
        }
        self._published, self._steps, self._rate = now, steps, 0.0
        return found


def _steps(engine: Any) -> int:
    """Optimiser steps that were taken: DeepSpeed counts those that it skips, as in fp16, too."""
    return int(engine.global_steps - engine.skipped_steps)
