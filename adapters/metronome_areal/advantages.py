"""Advantages over true groups, and versions that stand where their log-probs stand.

Two traps of AReaL 1.0.4 (docs/areal.md shows both in ten lines): its ``Normalization`` cuts a batch every
``group_size`` rows, so that a group which lost a member shifts all that follow and leaves a remainder divided by eps;
and log-probs and masks are shifted to the token before, versions are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from areal.trainer.ppo.actor import PPOActor
from areal.utils.data import Normalization, batched_call


class TrueGroups(Normalization):
    """AReaL's normalisation with the sizes that groups have.

        x' = (x - mean) / (std + eps)

    with the statistics of the row's own group where a level is ``group``. A row that is alone in its group has no
    baseline but itself, whatever ``mean_leave1out``: a reward becomes 0.

    Attributes:
        sizes: rows of each group, in the order of the batch.
    """

    sizes: Sequence[int] = ()

    @torch.no_grad()
    def __call__(
        self,
        x: torch.Tensor,
        loss_mask: torch.Tensor | None = None,
        high_precision: bool = True,
        reduce_group: Any = None,
    ) -> torch.Tensor:
        """``x`` of ``(rows,)`` or ``(rows, tokens)``, float32; the loss mask tells which tokens count."""
        if "group" not in (self.mean_level, self.std_level):
            return super().__call__(x, loss_mask, high_precision, reduce_group)
        if loss_mask is not None and not bool(loss_mask.any()):
            return x.float()
        if sum(self.sizes) != len(x):
            raise ValueError(f"groups of {list(self.sizes)} rows for {len(x)} rows")
        mean = self._statistic("mean", x, loss_mask, None, high_precision, reduce_group)
        centred = x - mean
        if loss_mask is not None:
            centred = centred * loss_mask
        if self.std_level not in ("batch", "group"):
            return centred.float()
        std = self._statistic("std", x, loss_mask, mean, high_precision, reduce_group)
        return (centred / (std + self.eps)).float()

    def _statistic(
        self,
        kind: str,
        x: torch.Tensor,
        mask: torch.Tensor | None,
        mean: torch.Tensor | None,
        high_precision: bool,
        reduce_group: Any,
    ) -> torch.Tensor:
        level = self.mean_level if kind == "mean" else self.std_level
        if level not in ("batch", "group"):
            return torch.zeros_like(x)
        sizes = self.sizes if level == "group" else [len(x)]
        parts, first = [], 0
        for size in sizes:
            rows = slice(first, first + size)
            first += size
            m = None if mask is None else mask[rows]
            common: dict[str, Any] = {
                "high_precision": high_precision,
                "all_reduce": level == "batch",
                "reduce_group": reduce_group,
            }
            if mean is None:
                alone = level == "group" and size == 1
                found = self._compute_mean(x[rows], m, leave_one_out=self.mean_leave1out and not alone, **common)
            else:
                found = self._compute_std(x[rows], m, mean[rows], unbiased=self.std_unbiased, **common)
            parts.append(found.expand_as(x[rows]))
        return torch.cat(parts)


def _own(norm: Normalization | None, config: Any) -> TrueGroups | None:
    return None if norm is None else TrueGroups(config)


class OwnPPOActor(PPOActor):
    """AReaL's PPOActor over true groups; everything else is AReaL's."""

    adv_norm: Any
    reward_norm: Any

    def __init__(self, config: Any, engine: Any) -> None:
        super().__init__(config, engine)
        self.adv_norm = _own(self.adv_norm, config.adv_norm)
        self.reward_norm = _own(self.reward_norm, config.reward_norm)

    def compute_advantages(self, data: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """AReaL's, one dict a group in and out; ``versions`` come out shifted as ``logprobs`` are."""
        sizes = [len(group["attention_mask"]) for group in data]
        for norm in (self.adv_norm, self.reward_norm):
            if norm is not None:
                norm.sizes = sizes
        found: list[dict[str, Any]] = batched_call(self._compute_advantages, data)
        return found

    def _compute_advantages(self, data: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = super()._compute_advantages(data)
        if "versions" in found:
            found["versions"] = torch.roll(found["versions"], shifts=-1, dims=-1)
        return found
