"""What every smoke run sets: one trainer rank and one engine in the CPU room, short rows, a few steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FILES = ("model", "prompts.jsonl", "reward.py")
"""What a smoke run's folder holds."""

MODULE = "metronome_openrlhf.cpu.assets"
"""``python -m`` of it makes them."""

SMOKE = "METRONOME_SMOKE"
"""A variable of the launching process in a smoke run, which ends with a line of its own."""

CPU_ROOM: dict[str, Any] = {
    "actor.model_name_or_path": "{assets}/model",
    "data.prompt_dataset": "{assets}/prompts.jsonl",
    "data.prompt_split": "train",
    "data.prompt_probs": None,
    "data.input_key": "input",
    "data.label_key": "label",
    "data.input_template": None,
    "data.apply_chat_template": True,
    "data.max_len": 48,
    # Three steps: with two batches in flight, the first sample that is two versions old is trained in the third.
    "data.max_samples": 12,
    "reward.remote_url": "{assets}/reward.py",
    "eval.dataset": None,
    "eval.steps": None,
    "actor.num_nodes": 1,
    "actor.num_gpus_per_node": 1,
    "ref.num_nodes": 1,
    "ref.num_gpus_per_node": 1,
    "vllm.num_engines": 1,
    "vllm.tensor_parallel_size": 1,
    "vllm.enforce_eager": True,
    "vllm.enable_sleep": False,
    "vllm.sync_backend": "gloo",
    "vllm.gpu_memory_utilization": None,
    "ds.enable_sleep": False,
    "ds.zero_stage": 2,
    "ds.adam_offload": False,
    "ds.attn_implementation": "sdpa",
    "ds.packing_samples": False,
    "train.colocate_all": False,
    "train.colocate_actor_ref": False,
    "train.dynamic_batch_enable": False,
    "train.num_episodes": 1,
    "train.batch_size": 16,
    "train.micro_batch_size": 4,
    "rollout.batch_size": 4,
    "rollout.n_samples_per_prompt": 4,
    "rollout.micro_batch_size": 4,
    "rollout.max_new_tokens": 16,
    "actor.gradient_checkpointing_enable": False,
    "actor.adam.lr": 1e-3,
    # OpenRLHF's first step has a rate of 0 otherwise.
    "actor.lr_scheduler": "constant",
    "actor.lr_warmup_ratio": 0.0,
    "ckpt.save_steps": 2,  # --resume trains the third step again
    "ckpt.save_hf": False,
    "logger.wandb.key": None,
    "logger.tensorboard_dir": None,
}
"""OpenRLHF's flags; ``{assets}`` stands for the folder of the tiny model and its data."""


BY_SOURCE: dict[str, dict[str, Any]] = {
    # Answers that end far apart, so that groups arrive one by one.
    "periodic": {"data.max_len": 320, "rollout.max_new_tokens": 256},
    # A trainer three times slower than the engine, so that batches wait for it and grow stale.
    "bounded": {
        "data.max_samples": 24,
        "rollout.max_new_tokens": 6,
        "rollout.batch_size": 8,
        "rollout.micro_batch_size": 1,
        "train.batch_size": 32,
        "train.micro_batch_size": 1,
    },
}
"""What a rollout source needs besides."""


def keys(source: str) -> dict[str, Any]:
    """OpenRLHF's flags for the room, by rollout source; each has an engine of its own there."""
    return CPU_ROOM | BY_SOURCE.get(source, {})


def driver_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of the launching process: without GPUs of its own, where pretended ones would be refused."""
    kept = {name: value for name, value in variables.items() if name != "CUDA_VISIBLE_DEVICES"}
    return {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", SMOKE: "1", **kept}
