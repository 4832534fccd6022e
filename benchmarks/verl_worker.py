"""verl's real FSDP2 training worker in this process, on gloo without Ray, and batches of groups in verl's fields."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ["VERL_PLATFORM"] = "cpu"  # before verl asks for its platform

import torch
import torch.distributed as dist
import verl  # noqa: F401
from tensordict import NonTensorData, NonTensorStack, TensorDict

from metronome_verl import cpu

cpu.attach()

FP32 = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")


def worker(kind: type, model: Path, budget: int = 1 << 20) -> Any:
    """A worker of class ``kind`` with verl's own loss: float32, sdpa, no recomputation, ``budget`` tokens a pass."""
    if not dist.is_initialized():
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", RAY_LOCAL_WORLD_SIZE="1")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # verl reads them; the store is what meets
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import (
        FSDPActorConfig,
        FSDPEngineConfig,
        FSDPOptimizerConfig,
        HFModelConfig,
        TrainingWorkerConfig,
    )
    from verl.workers.utils.losses import ppo_loss

    engine = FSDPEngineConfig(
        strategy="fsdp2",
        use_torch_compile=False,
        use_dynamic_bsz=True,
        max_token_len_per_gpu=budget,
        infer_max_token_len_per_gpu=budget,
        model_dtype="fp32",
        mixed_precision=FP32,
    )
    made = kind(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(
                path=str(model),
                load_tokenizer=False,
                use_remove_padding=True,
                enable_gradient_checkpointing=False,
                override_config={"attn_implementation": "sdpa"},
            ),
            engine_config=engine,
            optimizer_config=FSDPOptimizerConfig(lr=1e-6, total_training_steps=1000),
            checkpoint_config=CheckpointConfig(),
        )
    )
    made.reset()
    made.set_loss_fn(partial(ppo_loss, config=actor_config(engine, FSDPActorConfig)))
    return made


def actor_config(engine: Any, kind: Any) -> Any:
    """verl's ``ActorConfig`` with its defaults."""
    return kind(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1, fsdp_config=engine)


class Groups:
    """``groups`` prompts of ``prompt`` tokens with ``size`` responses of ``length`` tokens each, drawn at random."""

    def __init__(self, groups: int, prompt: int, size: int, length: int, vocabulary: int) -> None:
        draw = torch.Generator().manual_seed(1)

        def tokens(count: int) -> torch.Tensor:
            return torch.randint(3, vocabulary, (count,), generator=draw)

        prompts = [tokens(prompt) for _ in range(groups)]
        self.size, self.rows = size, groups * size
        self.prompts = [prompts[row // size] for row in range(self.rows)]
        self.responses = [tokens(length) for _ in range(self.rows)]
        self.behavior = [-9.0 + torch.rand(length, generator=draw) for _ in range(self.rows)]
        self.advantages = [torch.full((length,), (-1.0) ** row) for row in range(self.rows)]

    def batch(self, groups: Sequence[int] | None = None, **settings: Any) -> TensorDict:
        """What a worker is given for all or some of the groups; ``settings`` go into the batch beside the rows."""
        from verl.utils import tensordict_utils as tu

        wanted = range(self.rows // self.size) if groups is None else groups
        chosen = [group * self.size + member for group in wanted for member in range(self.size)]

        def field(values: Sequence[torch.Tensor]) -> torch.Tensor:
            return torch.nested.as_nested_tensor([values[row] for row in chosen], layout=torch.jagged)

        whole = [torch.cat(pair) for pair in zip(self.prompts, self.responses, strict=True)]
        ones = [torch.ones_like(row) for row in self.responses]
        made = TensorDict(
            {
                "input_ids": field(whole),
                "position_ids": field([torch.arange(len(row)) for row in whole]),
                "prompts": field(self.prompts),
                "responses": field(self.responses),
                "response_mask": field(ones),
                "loss_mask": field(ones),
                "advantages": field(self.advantages),
                "old_log_probs": field(self.behavior),
                "rollout_log_probs": field(self.behavior),
            },
            batch_size=[len(chosen)],
        )
        versions = {"min_global_steps": 0, "max_global_steps": 0}
        made["extra_fields"] = NonTensorStack.from_list([NonTensorData(versions) for _ in chosen])
        defaults = {
            "temperature": 1.0,
            "calculate_entropy": False,
            "global_batch_size": self.rows,
            "mini_batch_size": self.rows,
            "epochs": 1,
            "seed": 1,
            "dataloader_kwargs": {"shuffle": False},
        }
        for key, value in {**defaults, **settings}.items():
            tu.assign_non_tensor_data(made, key, value)
        return made
