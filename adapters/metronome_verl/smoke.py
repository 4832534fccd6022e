"""What every smoke run sets in verl: one trainer rank and one rollout replica on a CPU, short rows, two steps."""

from __future__ import annotations

from typing import Any

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

CPU_ROOM: dict[str, Any] = {
    "data.train_files": "{assets}/train.parquet",
    "data.val_files": "{assets}/validation.parquet",
    "data.train_batch_size": 4,
    "data.max_prompt_length": 48,
    "data.max_response_length": 16,
    "data.dataloader_num_workers": 0,
    "data.filter_overlong_prompts": False,
    "actor_rollout_ref.model.path": "{assets}/model",
    "actor_rollout_ref.model.enable_gradient_checkpointing": False,
    "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
    f"{_ACTOR}.strategy": "fsdp2",
    f"{_ACTOR}.fsdp_config.strategy": "fsdp2",
    f"{_ACTOR}.fsdp_config.use_torch_compile": False,
    f"{_ACTOR}.fsdp_config.model_dtype": "fp32",
    f"+{_ACTOR}.fsdp_config.mixed_precision.param_dtype": "fp32",
    f"+{_ACTOR}.fsdp_config.mixed_precision.reduce_dtype": "fp32",
    f"+{_ACTOR}.fsdp_config.mixed_precision.buffer_dtype": "fp32",
    f"{_ACTOR}.use_torch_compile": False,
    f"{_ACTOR}.optim.lr": 1e-3,
    f"{_ACTOR}.ppo_mini_batch_size": 4,
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": 4,
    f"{_ACTOR}.ppo_max_token_len_per_gpu": 4096,
    f"{_ROLLOUT}.name": "metronome_hf",
    f"{_ROLLOUT}.n": 4,
    f"{_ROLLOUT}.tensor_model_parallel_size": 1,
    f"{_ROLLOUT}.max_model_len": None,
    f"{_ROLLOUT}.max_num_seqs": 16,
    f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu": 4,
    f"{_ROLLOUT}.log_prob_max_token_len_per_gpu": 4096,
    f"{_ROLLOUT}.agent.num_workers": 1,
    "reward.num_workers": 1,
    "reward.reward_manager.name": "naive",
    "reward.custom_reward_function.path": "{assets}/reward.py",
    "reward.custom_reward_function.name": "compute_score",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    "trainer.device": "cpu",
    "trainer.n_gpus_per_node": 1,
    "trainer.nnodes": 1,
    "trainer.logger": ["console"],
    "trainer.val_before_train": False,
    "trainer.test_freq": -1,
    "trainer.save_freq": -1,
    "trainer.resume_mode": "disable",
    "trainer.total_epochs": 1,
    "trainer.total_training_steps": 2,
}
"""verl's keys; ``{assets}`` stands for the folder under the recipe's key ``assets``."""

POOL: dict[str, Any] = {
    f"{_ROLLOUT}.nnodes": 1,
    f"{_ROLLOUT}.n_gpus_per_node": 1,
    f"{_ROLLOUT}.checkpoint_engine.backend": "metronome_ray",
}
"""The rollout pool of periodic and bounded mode."""

COLOCATED: dict[str, Any] = {f"{_ROLLOUT}.nnodes": 0, f"{_ROLLOUT}.checkpoint_engine.backend": "naive"}
"""Synchronous mode: the trainer's device generates too."""
