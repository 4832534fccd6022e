"""AReaL's controller of training workers, with the parts of a batch; each call goes to every worker."""

from __future__ import annotations

from typing import Any

from areal.trainer.ppo.actor import PPOActorController

from metronome_areal.levelling import MASKED


class MetronomeController(PPOActorController):
    """AReaL's ``PPOActorController`` of ``MetronomeActor`` workers (single controller)."""

    @property
    def world_size(self) -> int:
        """Always 1: this process generates for all ranks."""
        return 1

    def metronome_begin(self) -> None:
        """Opens a period on every worker."""
        self._custom_function_call("metronome_begin")

    def metronome_here(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """``groups``: tensors stay where they were generated until a worker asks for them."""
        return groups

    def metronome_level(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """``groups`` and masked ones up to a multiple of the workers, since AReaL hands each as many."""
        if not groups:
            return []
        missing = -len(groups) % int(self.parallel_strategy.dp_size)
        shortest = min(groups, key=lambda one: one["attention_mask"].shape[-1])
        return [{**one, MASKED: False} for one in groups] + [{**shortest, MASKED: True} for _ in range(missing)]

    def metronome_part(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """One part over the workers; ``groups`` are levelled."""
        if not groups:
            return []
        return list(self._custom_function_call("metronome_part", groups, rpc_meta={"broadcast": True}))

    def metronome_step(self) -> dict[str, float]:
        """The one step; the same metrics on every worker."""
        found: dict[str, float] = self._custom_function_call("metronome_step")
        return found
