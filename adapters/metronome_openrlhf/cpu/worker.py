"""OpenRLHF's worker extension of vLLM on a CPU: loaded by name in vLLM's own process, before it makes the model."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers import utils as layers

from metronome.errors import ConfigurationError, VersionMismatch

from .transport import StoreGroup


def plain_linear(layer: Any, remove_weight: bool) -> None:
    """Keeps a linear layer's weight as it is; vLLM would pack it for the CPU and free it, and later load nothing."""
    layer.cpu_linear = torch.nn.functional.linear


# A worker extension has no hook before the model is made other than its import; vLLM looks the function up here.
layers.dispatch_cpu_unquantized_gemm = plain_linear


class CpuWorker:
    """What ``openrlhf.trainer.ray.vllm_worker_wrap.WorkerWrap`` adds to a worker, through a TCP store.

    It isn't a subclass: OpenRLHF's package would bring Ray and the trainer's imports into vLLM's process.
    """

    device: Any
    model_config: Any
    model_runner: Any

    def init_process_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str = "gloo",
        use_ray: bool = False,
    ) -> None:
        """Joins the trainer's store.

        Raises ConfigurationError for a model with experts.
        """
        packed = [name for name, _ in self.model_runner.model.named_parameters() if name.endswith("w13_weight")]
        if packed:
            raise ConfigurationError(
                "the CPU room takes no model with experts: on a CPU vLLM packs their weights, and loads new ones"
                " as if they weren't",
                found=packed[0],
                where="--actor.model_name_or_path",
                remedy="a dense model, or CUDA",
            )
        rank = torch.distributed.get_rank() + rank_offset
        self._weights = StoreGroup(master_address, int(master_port), rank, world_size)

    def update_weight(self, name: str, dtype: torch.dtype, shape: Any, empty_cache: bool = False) -> None:
        """Receives one weight and loads it.

        Raises VersionMismatch for another dtype than the model's.
        """
        if dtype != self.model_config.dtype:
            raise VersionMismatch(
                "the trainer sends weights of another type than the engine's",
                found=f"{dtype} for {self.model_config.dtype}",
                where=name,
                remedy="--ds.param_dtype bf16",
            )
        weight = torch.empty(tuple(shape), dtype=dtype)
        self._weights.broadcast(weight, src=0)
        self.model_runner.model.load_weights(weights=[(name, weight)])
