"""The CPU room under AReaL's single controller: rollout workers that generate, and take weights from files."""

from __future__ import annotations

import itertools
from copy import deepcopy
from typing import Any

import torch
from areal.api import LocalInfServerInfo
from areal.api.cli_args import SchedulingStrategy, SchedulingStrategyType
from areal.infra.controller import RolloutController
from areal.utils import name_resolve, names

from metronome_areal.cpu.engine import RoomEngine, _ends
from metronome_areal.cpu.generator import Generator

_LOOK = 0.05
_SECONDS = 120.0
_models: dict[str, Generator] = {}
_numbers = itertools.count(1)


def make(trainer: Any, rollout_config: Any, is_eval: bool) -> Any:
    """AReaL's controller of rollout workers, each with a model of its own; the evaluation's use the same workers.

    Args:
        trainer: AReaL's ``PPOTrainer``, as ``_init_rollout`` sees it.
        rollout_config: AReaL's InferenceEngineConfig.
        is_eval: whether it is the evaluation's.
    """
    config = deepcopy(rollout_config)
    named: dict[str, Any] = {
        "role": "rollout",
        "server_args": {"path": trainer.config.actor.path, "seed": int(trainer.config.seed)},
    }
    if is_eval:  # as AReaL has it, but in the same processes: that's where the models are
        config.max_head_offpolicyness = int(1e12)
        config.scheduling_strategy = SchedulingStrategy(SchedulingStrategyType.colocation, "rollout", fork=False)
        named |= {"role": "eval-rollout", "server_infos": trainer.rollout.server_infos}
    controller = RolloutController(RoomWorker, config, trainer.scheduler)
    controller.initialize(**named)
    return controller


class RoomWorker(RoomEngine):
    """``RoomEngine`` in a worker of AReaL's: what is a server elsewhere is a model in the worker's process.

    Args:
        config: AReaL's InferenceEngineConfig.
    """

    def __init__(self, config: Any) -> None:
        nothing: Any = None
        super().__init__(config, nothing, 0)

    def launch_server(self, server_args: dict[str, Any]) -> LocalInfServerInfo:
        """Loads the model of ``path``; ``seed`` is the run's."""
        found = LocalInfServerInfo("room", next(_numbers), None)
        self.generator, self._seed = _generator(server_args["path"]), int(server_args["seed"])
        _models[f"{found.host}:{found.port}"] = self.generator
        return found

    def initialize(
        self, engine_id: str | None = None, addr: Any = None, train_data_parallel_size: int | None = None
    ) -> None:
        """``RoomEngine``'s; with ``addr``, over the model of another engine of this process: the evaluation's."""
        if addr is not None:
            self.generator, self._evaluation = _models[addr], True
        super().initialize(engine_id, addr, train_data_parallel_size)

    def update_weights_from_disk(self, meta: Any) -> None:
        """AReaL's: waits for the files of the actor, which its rank 0 announces, and takes them."""
        from transformers import AutoModelForCausalLM

        name = names.update_weights_from_disk(self.config.experiment_name, self.config.trial_name, self.get_version())
        name_resolve.wait(name, timeout=_SECONDS, poll_frequency=_LOOK)
        model = AutoModelForCausalLM.from_pretrained(meta.path, dtype=torch.float32)
        self.generator.replace(dict(model.named_parameters()), meta.version)


def _generator(path: str) -> Generator:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").eval()
    context = getattr(model.config, "max_position_embeddings", None) or 1 << 30
    found = Generator(model, _ends(path, model.config), context)
    found.replace(dict(model.named_parameters()), None)
    return found
