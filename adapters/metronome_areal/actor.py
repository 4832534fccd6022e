"""AReaL's FSDP actor with our hooks; an import path of it travels to AReaL's workers."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from areal.engine import FSDPPPOActor
from areal.utils import stats_tracker

from metronome_areal.accumulate import Accumulation
from metronome_areal.advantages import OwnPPOActor
from metronome_areal.config import part_of
from metronome_areal.cpu.engine import RoomEngine
from metronome_areal.levelling import MASKED, levelled, masked
from metronome_areal.loss import HostLoss
from metronome_areal.packing import needs_rows, separate_rows
from metronome_areal.weights import Movement


class MetronomeActor(FSDPPPOActor):
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
        """AReaL's, with our loss where it is set; our metrics are recorded at its end."""
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
        return super().train_batch(input_, loss, loss_weight_fn)

    # --- parts of a batch -----------------------------------------------------------------------------

    def metronome_begin(self) -> None:
        """Opens a period."""
        self._begin()
        self.movement.before_step(self)
        self._accumulation.begin()

    def metronome_part(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Advantages, forward and backward of one part: every rank calls, with or without groups.

        Args:
            groups: of this rank, one dict a group, as a workflow returned them.

        Returns the groups with their advantages.
        """
        groups = [masked(one) if one.pop(MASKED, False) else one for one in groups]
        groups = levelled(groups, self.data_parallel_group)
        if not groups:
            return []
        if self.config.should_compute_prox_logp():
            for group, found in zip(groups, self.compute_logp(groups), strict=True):
                group["prox_logp"] = found
        ready = self.compute_advantages(groups)
        self._steps = 0
        self.actor.ppo_update(ready)
        return ready

    def metronome_step(self) -> dict[str, float]:
        """One optimiser step with the gradient of all parts; returns AReaL's metrics of it and ours."""
        found = self._accumulation.step()
        with stats_tracker.scope("ppo_actor"), stats_tracker.scope("update"):
            stats_tracker.scalar(**{name: value for name, value in found.items() if "/" not in name})
        self._record()
        return found

    # --- publication ----------------------------------------------------------------------------------

    def _update_weights_from_disk(self, meta: Any) -> None:
        """AReaL's; into an engine of this process weights are copied."""
        if isinstance(self.rollout_engine, RoomEngine):
            self.rollout_engine.take_weights(self, meta.version)
            dist.barrier(group=self.cpu_group)
        else:
            super()._update_weights_from_disk(meta)

    def metronome_found(self) -> dict[str, float]:
        """What the last update recorded."""
        return self.found

    # --- model inputs ---------------------------------------------------------------------------------

    def _prepare_mb_list(self, input_: dict[str, Any]) -> Any:
        found = super()._prepare_mb_list(input_)
        if needs_rows(self.config.attn_impl, self.enable_tree_training):
            found = separate_rows(found)
        return found

    # --- metrics --------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._steps = 0
        if self.loss is not None:
            self.loss.begin()

    def _record(self) -> None:
        """Ours, the same on every rank."""
        group = self.data_parallel_group if dist.is_initialized() else None
        self.found = self.movement.after_step(self)
        if self.loss is not None:
            self.found |= self.loss.gathered(group)
        stats_tracker.scalar(**self.found)
