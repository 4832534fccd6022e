"""verl's two ends of the CPU room's rollout: the replica that starts the server, the adapter that sends it weights."""

from __future__ import annotations

import os
from typing import Any

import ray
import torch
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica
from verl.workers.rollout.utils import ensure_async_iterator

from metronome.errors import ConfigurationError

from . import ROLLOUT
from .server import HFServer, check


class ServerActor(HFServer):
    """``HFServer`` as a Ray actor: one thread, so that replicas and trainers share the cores fairly."""

    def __init__(self, config: Any, model_config: Any, replica_rank: int) -> None:
        torch.set_num_threads(1)
        super().__init__(config, model_config, replica_rank)


class HFReplica(RolloutReplica):
    """One server a replica, in the colocated (hybrid) and the standalone placement."""

    async def launch_servers(self) -> None:
        """Starts the server and waits until its model is loaded."""
        check(self.config)
        kind = "reward_" if self.is_reward_model else "teacher_" if self.is_teacher_model else ""
        server = (
            ray.remote(ServerActor)
            .options(
                name=f"{ROLLOUT}_{kind}{self.replica_rank}{self.name_suffix}",
                num_cpus=0,
                max_concurrency=self.max_concurrency,
            )
            .remote(self.config, self.model_config, self.replica_rank)
        )
        await server.ready.remote()
        self.servers = [server]
        self._server_handle = server
        # A name for verl's balancer, not an address: there is no HTTP here.
        self._server_address = f"{ROLLOUT}:{kind}{self.replica_rank}{self.name_suffix}"


class ServerAdapter(BaseRollout):
    """Stands in a trainer or transport worker and hands weights to the server of its replica."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        check(self.config)
        # A server is one process, so ranks and replicas count alike.
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank
        self.is_leader_rank = True
        self._server: Any = None

    async def resume(self, tags: list[str]) -> None:
        """Nothing was released."""

    async def release(self) -> None:
        """Nothing to release."""

    async def update_weights(
        self,
        weights: Any,
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        peft_config: Any = None,
        base_sync_done: bool = True,
        **others: Any,
    ) -> None:
        """Sends a full set of weights and its version to the server.

        Raises:
            ConfigurationError: an unmerged LoRA adapter, or weights as differences.
        """
        if peft_config is not None:
            raise ConfigurationError(
                f"{ROLLOUT} takes merged weights, not a LoRA adapter",
                found=type(peft_config).__name__,
                where="ServerAdapter.update_weights",
                remedy="actor_rollout_ref.model.lora.merge=True",
            )
        if wire_format != "named_tensors":
            raise ConfigurationError(
                f"{ROLLOUT} takes whole weights",
                found=wire_format,
                where="rollout.checkpoint_engine.backend",
                remedy="backend=metronome_ray, or naive where trainer and rollout share their pool",
            )
        named = {}
        async for name, tensor in ensure_async_iterator(weights):
            named[name] = tensor.detach().to("cpu", copy=True)
        if self._server is None:
            # Not before: the server starts after this worker.
            self._server = ray.get_actor(f"{ROLLOUT}_{self.replica_rank}")
        await self._server.load_weights.remote(named, global_steps)
