"""AReaL's controller of training workers, with the parts of a batch; each call goes to every worker.

Groups reach the controller as AReaL's ``RTensor``: handles of tensors that stay where they were generated until a
worker, or ``RTensor.localize``, asks for them.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

from areal.api import RolloutWorkflow
from areal.trainer.ppo.actor import PPOActorController
from areal.utils.dynamic_import import import_from_string

from metronome.errors import ConfigurationError
from metronome_areal.arguments import WHERE, refuse
from metronome_areal.levelling import MASKED


class MetronomeController(PPOActorController):
    """AReaL's ``PPOActorController`` of ``MetronomeActor`` workers (single controller)."""

    @property
    def world_size(self) -> int:
        """Always 1: this process generates for all ranks."""
        return 1

    @property
    def places(self) -> int:
        """Data-parallel ranks that groups are handed to."""
        return int(self.parallel_strategy.dp_size)

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
        missing = -len(groups) % self.places
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


def check_controller(config: Any, part: Any, places: int) -> None:
    """Raises ConfigurationError for a whole batch of ours that AReaL couldn't hand out in equal numbers of groups.

    Args:
        config: AReaL's.
        part: the run's settings.
        places: the actor's data-parallel ranks.
    """
    size = int(config.train_dataset.batch_size)
    refuse(
        part.owns_rollouts and part.mode != "periodic" and size % places,
        f"AReaL's controller hands each of {places} data-parallel ranks as many groups of a batch",
        "train_dataset.batch_size",
        size,
        f"a multiple of {places}, or {WHERE}.rollout_source=periodic",
    )


def workflow_path(rollout: Any, workflow: Any) -> str:
    """The import path under which AReaL's workers find ``workflow``; an instance's state doesn't travel.

    Raises ConfigurationError for an agent, which AReaL runs behind a proxy of its own, and for what workers can't
    import.
    """
    path = str(rollout._resolve_workflow_str(workflow))
    try:
        if path.startswith("__main__."):
            raise ImportError("a worker's __main__ is AReaL's RPC server")
        found = import_from_string(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"AReaL's workers can't import the workflow: {error}",
            found=path,
            where="PPOTrainer.train(workflow=)",
            remedy="a class in a module beside the script",
        ) from None
    refuse(
        not (isinstance(found, type) and issubclass(found, RolloutWorkflow)),
        "groups are ours to make, of a RolloutWorkflow's episodes",
        "PPOTrainer.train(workflow=)",
        path,
        f"a subclass of areal.api.RolloutWorkflow, or neither {WHERE}.rollout_source nor {WHERE}.group_controller",
    )
    return path


def travelling(config: Any) -> Any:
    """``config`` as a worker can read it, which imports its class by name.

    AReaL's scheduler sends a run's whole configuration to its workers, who read its seed. A class that a script
    defines, or that has our block added, isn't there: its fields go as those of the next class that is.
    """
    for kind in type(config).__mro__:
        if _importable(kind):
            names = [one.name for one in dataclasses.fields(kind)]
            return kind(**{name: getattr(config, name) for name in names})
    return config


def _importable(kind: type) -> bool:
    if kind.__module__ == "__main__" or not dataclasses.is_dataclass(kind):
        return False
    return getattr(importlib.import_module(kind.__module__), kind.__name__, None) is kind
