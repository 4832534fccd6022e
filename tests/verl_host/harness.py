"""verl's real training workers with a tiny Qwen2 on CPU and gloo, without Ray; import it before verl's workers."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import NonTensorStack, TensorDict

os.environ["VERL_PLATFORM"] = "cpu"

import verl  # noqa: F401

from metronome_verl import cpu

cpu.attach()

VOCABULARY = 97
FP32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


def join(rank: int = 0, world: int = 1, port: int | None = None) -> None:
    """Makes this process one of ``world`` gloo ranks, as verl's workers expect to find it."""
    if dist.is_initialized():
        return
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(port or free_port())
    dist.init_process_group("gloo", rank=rank, world_size=world)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def save_model(folder: Path, layers: int = 2, tie: bool = True) -> Path:
    """A tiny Qwen2 with weights large enough for log-probs that tell tokens apart; no tokenizer."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=tie,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def worker(
    model: Path,
    strategy: str = "fsdp2",
    tinker: bool = False,
    dynamic: int | None = None,
    remove_padding: bool = True,
    checkpointing: bool = False,
    lr: float = 1e-3,
    model_options: dict[str, Any] | None = None,
    engine_options: dict[str, Any] | None = None,
    actor_options: dict[str, Any] | None = None,
) -> Any:
    """verl's TrainingWorker (or TinkerTrainingWorker) with its own ppo_loss, ready to train.

    Args:
        dynamic: the token budget of dynamic batches; None gives ``micro_batch_size_per_gpu`` rows each, by default all.
    """
    join()
    import torch.distributed.fsdp._init_utils as fsdp1

    # FSDP1 broadcasts weights at the start and insists on an accelerator for it; gloo does it on the CPU.
    fsdp1._check_module_states_for_sync_module_states = lambda *_: None
    os.environ.setdefault("RAY_LOCAL_WORLD_SIZE", "1")
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import (
        FSDPActorConfig,
        FSDPEngineConfig,
        FSDPOptimizerConfig,
        HFModelConfig,
        TrainingWorkerConfig,
    )
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.engine_workers_tinker import TinkerTrainingWorker
    from verl.workers.utils.losses import ppo_loss

    options: dict[str, Any] = {"override_config": {"attn_implementation": "sdpa"}, **(model_options or {})}
    engine = FSDPEngineConfig(
        strategy=strategy,
        use_torch_compile=False,
        use_dynamic_bsz=dynamic is not None,
        max_token_len_per_gpu=dynamic,
        infer_max_token_len_per_gpu=dynamic,
        micro_batch_size_per_gpu=1,
        infer_micro_batch_size_per_gpu=1,
        **{"mixed_precision": FP32, "model_dtype": "fp32", **(engine_options or {})},
    )
    made = (TinkerTrainingWorker if tinker else TrainingWorker)(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(
                path=str(model),
                load_tokenizer=False,
                use_remove_padding=remove_padding,
                enable_gradient_checkpointing=checkpointing,
                **options,
            ),
            engine_config=engine,
            optimizer_config=FSDPOptimizerConfig(lr=lr, weight_decay=0.0, clip_grad=1e9, total_training_steps=10),
            checkpoint_config=CheckpointConfig(),
        )
    )
    made.reset()
    actor = FSDPActorConfig(
        strategy=strategy,
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        fsdp_config=engine,
        **(actor_options or {}),
    )
    made.set_loss_fn(partial(ppo_loss, config=actor))
    return made


def nested(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows of different lengths as verl carries them."""
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


class Batch:
    """Random groups in verl's fields: ``sizes`` responses each to prompts of ``prompt_lens``, of uneven lengths.

    Args:
        tool: every second response has this many tokens in its middle that the model didn't write (mask 0).
    """

    def __init__(
        self,
        sizes: Sequence[int] = (3, 1, 4),
        prompt_lens: Sequence[int] = (20, 9, 14),
        longest: int = 11,
        tool: int = 0,
        uids: bool = False,
        seed: int = 1,
    ) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.prompts, self.responses, self.masks, self.advantages = [], [], [], []
        self.uids: list[str] | None = [] if uids else None
        for number, (size, length) in enumerate(zip(sizes, prompt_lens, strict=True)):
            prompt = torch.randint(2, VOCABULARY, (length,), generator=draw)
            for member in range(size):
                response = torch.randint(2, VOCABULARY, (longest - 3 * member % 7,), generator=draw)
                mask = torch.ones(len(response), dtype=torch.int64)
                if tool and member % 2:
                    mask[2 : 2 + tool] = 0
                self.prompts.append(prompt)
                self.responses.append(response)
                self.masks.append(mask)
                self.advantages.append(torch.full((len(response),), (-1.0) ** member * (0.5 + 0.1 * member)))
                if self.uids is not None:
                    self.uids.append(f"uid{number}")

    def rows(self, chosen: Sequence[int]) -> Batch:
        """Some of the rows, in that order."""
        other = object.__new__(Batch)
        for name in ("prompts", "responses", "masks", "advantages", "uids"):
            values = getattr(self, name)
            setattr(other, name, None if values is None else [values[row] for row in chosen])
        return other

    def data(self, **others: Any) -> TensorDict:
        """What a worker is given; ``others`` are tensors of the rows, or settings."""
        from verl.utils import tensordict_utils as tu

        whole = [torch.cat(pair) for pair in zip(self.prompts, self.responses, strict=True)]
        fields = {
            "input_ids": nested(whole),
            "position_ids": nested([torch.arange(len(row)) for row in whole]),
            "prompts": nested(self.prompts),
            "responses": nested(self.responses),
            "response_mask": nested(self.masks),
            "loss_mask": nested(self.masks),
            "advantages": nested(self.advantages),
        }
        data = TensorDict(fields, batch_size=[len(whole)])
        if self.uids is not None:
            data["uid"] = NonTensorStack(*self.uids)
        settings = {
            "temperature": 1.0,
            "calculate_entropy": True,
            "global_batch_size": len(whole),
            "micro_batch_size_per_gpu": len(whole),
            **others,
        }
        for key, value in settings.items():
            if isinstance(value, torch.Tensor):
                data[key] = value
            else:
                tu.assign_non_tensor_data(data, key, value)
        return data

    @property
    def tokens(self) -> int:
        """Tokens of all rows apart."""
        return sum(len(one) for one in (*self.prompts, *self.responses))


def infer(made: Any, batch: Batch, **others: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Log-probs and entropies of the responses, row by row, as verl's trainer takes them."""
    from verl.workers.utils.padding import response_from_nested

    out = made.infer_batch(batch.data(compute_loss=False, **others))
    mask = nested(batch.masks)
    return tuple(list(response_from_nested(out[key], mask).unbind()) for key in ("log_probs", "entropy"))


def train(made: Any, batch: Batch, old: Sequence[torch.Tensor], **others: Any) -> dict[str, Any]:
    """One optimiser step over the batch; returns verl's metrics."""
    from verl.utils import tensordict_utils as tu

    settings = {"mini_batch_size": others.pop("mini_batch_size", len(batch.masks)), "epochs": 1, "seed": 1}
    data = batch.data(old_log_probs=nested(old), dataloader_kwargs={"shuffle": False}, **settings, **others)
    return dict(tu.get(made.train_mini_batch(data), "metrics"))


def gradients(made: Any, batch: Batch, old: Sequence[torch.Tensor], **others: Any) -> dict[str, torch.Tensor]:
    """Every parameter's gradient after one forward and backward pass of a Tinker worker, which takes no step."""
    made.optimizer_zero_grad()
    made.forward_backward(batch.data(old_log_probs=nested(old), **others))
    found = {}
    for name, parameter in made.engine.module.named_parameters():
        if parameter.grad is not None:
            grad = parameter.grad
            found[name] = (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).clone()
    made.optimizer_zero_grad()
    return found


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Environment variables for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def rank_gradients(
    rank: int, world: int, port: int, model: Path, out: Path, batch: Batch, rows: Sequence[Sequence[int]]
) -> None:
    """One data-parallel rank with shared prompts: writes gradients and what went through shared rows to ``out``."""
    torch.set_num_threads(1)
    join(rank, world, port)
    from metronome.shared_prompt.select import SharedPromptAttention
    from metronome_verl.engine import building

    with building(SharedPromptAttention()):
        made = worker(model, tinker=True, dynamic=60)
    old = [torch.full((len(row),), -4.5) for row in batch.responses]
    mine = rows[rank]
    found = gradients(made, batch.rows(mine), [old[row] for row in mine], global_batch_size=len(old))
    torch.save((found, made.engine.drain(), made.engine._checked), out / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
