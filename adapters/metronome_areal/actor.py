"""AReaL's FSDP actor with our hooks; an import path of it travels to AReaL's workers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from areal.engine import FSDPPPOCritic
from areal.utils import stats_tracker
from areal.utils.data import tensor_container_to

from metronome_areal.accumulate import Accumulation
from metronome_areal.advantages import OwnPPOActor
from metronome_areal.checks import check_life, check_moved
from metronome_areal.config import part_of
from metronome_areal.cpu.engine import RoomEngine
from metronome_areal.levelling import MASKED, levelled, masked
from metronome_areal.loss import HostLoss
from metronome_areal.packing import RowsApart
from metronome_areal.shared import SharedPromptActor
from metronome_areal.weights import Movement


class MetronomeCritic(RowsApart, FSDPPPOCritic):
    """AReaL's ``FSDPPPOCritic``: rows kept apart in packs."""


class MetronomeActor(RowsApart, SharedPromptActor):
    """AReaL's ``FSDPPPOActor``: rows kept apart in packs, advantages over true groups, our loss, parts of a batch."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.part = part_of(config)
        self.actor = OwnPPOActor(config, self)
        self.loss = HostLoss(self.part.selection.loss) if self.part.own_loss else None
        self.movement = Movement()
        self._accumulation = Accumulation(self)
        self.found: dict[str, float] = {}
        self._steps = 0  # optimiser steps of the update under way

    # --- AReaL's own update ---------------------------------------------------------------------------

    def ppo_update(self, data: list[dict[str, Any]]) -> None:
        """AReaL's, with our loss where it is set; our metrics are recorded at its end.

        Raises MetronomeError for a hook that wasn't called, and for a step that moved nothing.
        """
        self._begin()
        super().ppo_update(data)
        self._record()

    def train_batch(self, input_: Any, loss_fn: Any, loss_weight_fn: Any) -> dict[str, float]:
        """AReaL's, or a part's forward and backward while a period is open."""
        own = self.loss
        if own is not None:
            own.version = self.get_version()
            own.step_fraction = self._steps / self.config.ppo_n_minibatches
        self._steps += 1
        loss = loss_fn if own is None else own
        if self._accumulation.period is not None:
            return self._accumulation.add(input_, loss, loss_weight_fn)
        self.movement.before_step(self)
        found: dict[str, float] = super().train_batch(input_, loss, loss_weight_fn)
        self.movement.stepped(found)
        return found

    def compute_logp(self, data: list[dict[str, Any]]) -> list[torch.Tensor]:
        """AReaL's, whatever the rows of each rank: a part may have fewer than ``mb_spec`` asks micro-batches for."""
        level = self.metronome_here if self._sharing is not None else self.metronome_level  # that cuts as it needs
        found: list[torch.Tensor] = super().compute_logp(level(data))
        return found[: len(data)]

    # --- parts of a batch -----------------------------------------------------------------------------

    def metronome_begin(self) -> None:
        """Opens a period."""
        self._begin()
        self.movement.before_step(self)
        self._accumulation.begin()

    def metronome_here(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """``groups`` on this engine's device."""
        return [tensor_container_to(one, self.device) for one in groups]

    def metronome_level(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """A part's groups on this engine's device, filled up with masked rows to as many passes as other ranks make.

        Every rank calls, with or without groups.
        """
        return self.metronome_here(levelled(groups, self.config.mb_spec, self.data_parallel_group))

    def metronome_part(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Advantages, forward and backward of one part; returns the groups with their advantages.

        Args:
            groups: of this rank, one dict a group, as a workflow returned them; levelled.
        """
        if not groups:
            return []
        count = len(groups)
        if MASKED in groups[0]:  # from a controller, which sees no rows
            groups = [masked(one) if one.pop(MASKED) else one for one in groups]
            groups = self.metronome_level(groups)
        if self.config.should_compute_prox_logp():
            for group, found in zip(groups, self.compute_logp(groups), strict=True):
                group["prox_logp"] = found
        ready = self.compute_advantages(groups)
        self._steps = 0
        self.actor.ppo_update(ready)
        return ready[:count]

    def metronome_step(self) -> dict[str, float]:
        """One optimiser step with the gradient of all parts; returns AReaL's metrics of it and ours.

        Raises MetronomeError as ``ppo_update`` does, and without a trained token.
        """
        found = self._accumulation.step()
        self.movement.stepped(found)
        with stats_tracker.scope("ppo_actor"), stats_tracker.scope("update"):
            stats_tracker.scalar(**{name: value for name, value in found.items() if "/" not in name})
        stats_tracker.scalar(**{name: value for name, value in found.items() if "/" in name})
        self._record()
        return found | self.found

    def metronome_found(self) -> dict[str, float]:
        """What the last update recorded."""
        return self.found

    # --- publication ----------------------------------------------------------------------------------

    def _update_weights_from_disk(self, meta: Any) -> None:
        """AReaL's; into an engine of this process weights are copied."""
        if isinstance(self.rollout_engine, RoomEngine):
            self.rollout_engine.take_weights(self, meta.version)
            dist.barrier(group=self.cpu_group)
        else:
            super()._update_weights_from_disk(meta)

    # --- metrics --------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._steps = 0
        self.movement.begin()
        if self.loss is not None:
            self.loss.begin()

    def _record(self) -> None:
        """Ours, the same on every rank."""
        group = self.data_parallel_group if dist.is_initialized() else None
        self.found = self.movement.after_step(self) | self.attention_found(group)
        if self.loss is not None:
            self.found |= self.loss.gathered(group)
        stats_tracker.scalar(**self.found)
        where = f"the actor's update of version {self.get_version()}"
        check_life(self.found, self.part, where)
        check_moved(
            self.movement.norm,
            self.found["metronome/weights/lr"],
            bool(self.found["metronome/weights/changed"]),
            where,
        )
