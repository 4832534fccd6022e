"""What every smoke run sets: one process that trains and generates in the CPU room, short rows, a few steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FILES = ("model", "prompts.jsonl", "tiny_reward.py")
"""What a smoke run's folder holds."""

MODULE = "metronome_areal.cpu.assets"
"""``python -m`` of it makes them."""

CPU_ROOM: dict[str, Any] = {
    "actor.path": "{assets}/model",
    "tokenizer_path": "{assets}/model",
    "script.reward": "{assets}/tiny_reward.py:reward",
    "script.keep": None,
    "train_dataset.path": "{assets}/prompts.jsonl",
    "train_dataset.batch_size": 4,
    "train_dataset.max_length": None,
    "valid_dataset.path": "",
    "gconfig.n_samples": 4,
    "gconfig.max_new_tokens": 12,
    "actor.backend": "fsdp:d1",
    "actor.attn_impl": "sdpa",
    "actor.dtype": "float32",
    "actor.weight_update_mode": "disk",
    "actor.gradient_checkpointing": False,
    "actor.mb_spec.max_tokens_per_mb": 256,
    "actor.optimizer.lr": 1e-2,
    "actor.optimizer.warmup_steps_proportion": 0.0,
    "rollout.backend": "vllm:d1",
    "rollout.max_concurrent_rollouts": 16,
    "rollout.request_timeout": 60,
    # With two batches under way, the first token that is two versions old is trained in the third step.
    "total_train_epochs": 1,
    "total_train_steps": 4,
    "cluster.n_gpus_per_node": 1,
    "cluster.n_nodes": 1,
    "scheduler.type": None,
    "recover.freq_steps": 2,
    "saver.freq_epochs": None,
    "saver.freq_steps": None,
    "evaluator.freq_epochs": None,
    "evaluator.freq_steps": None,
}
"""AReaL's keys; ``{assets}`` stands for the folder of the tiny model and its data."""


def keys(_: str) -> dict[str, Any]:
    """AReaL's keys for the room, the same with every rollout source."""
    return CPU_ROOM


def room_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of a smoke run; nothing is fetched from a model hub."""
    return {"HF_HUB_OFFLINE": "1", **variables}
