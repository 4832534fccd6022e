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

    def metronome_part(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """One part over the workers: AReaL hands each as many groups, so the part is filled up with masked ones."""
        if not groups:
            return []
        places = int(self.parallel_strategy.dp_size)
        missing = -len(groups) % places
        shortest = min(groups, key=lambda one: one["attention_mask"].shape[-1])
        filled = groups + [{**shortest, MASKED: True}] * missing
        found = self._custom_function_call("metronome_part", filled, rpc_meta={"broadcast": True})
        return list(found)[: len(groups)]

    def metronome_step(self) -> dict[str, float]:
        """The one step; the same metrics on every worker."""
        found: dict[str, float] = self._custom_function_call("metronome_step")
        self.found = self.metronome_found()
        return found

    def ppo_update(self, *args: Any, **named: Any) -> None:
        """AReaL's; our metrics of it are fetched."""
        super().ppo_update(*args, **named)
        self.found = self.metronome_found()

    def metronome_found(self) -> dict[str, float]:
        """What the workers recorded of the last update."""
        found: dict[str, float] = self._custom_function_call("metronome_found")
        return found
