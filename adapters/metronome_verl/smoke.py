"""What every smoke run sets: one trainer rank and one rollout replica on a CPU, short rows, three steps, Ray's start.

Ray runs in processes that inherit their variables from its head, which need not be ours, so what workers must know
travels in verl's runtime environment too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from metronome.host_process import Room, places

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
    # With two batches in flight, the first sample that is two versions old is trained in the third step.
    "trainer.total_training_steps": 3,
}
"""verl's keys; ``{assets}`` stands for the folder of the tiny model and its data."""

_POOL: dict[str, Any] = {
    f"{_ROLLOUT}.nnodes": 1,
    f"{_ROLLOUT}.n_gpus_per_node": 1,
    f"{_ROLLOUT}.checkpoint_engine.backend": "metronome_ray",
}

BY_SOURCE: dict[str, dict[str, Any]] = {
    # The trainer's device generates too.
    "synchronous": {f"{_ROLLOUT}.nnodes": 0, f"{_ROLLOUT}.checkpoint_engine.backend": "naive"},
    # A group after the other, each half a second long, so that they arrive one by one.
    "periodic": _POOL
    | {
        f"{_ROLLOUT}.max_num_seqs": 4,
        f"+{_ROLLOUT}.engine_kwargs.metronome_hf.seconds_per_token": 0.03,
    },
    # Everything in flight at once, so that it waits for its training and grows stale.
    "bounded": _POOL | {f"{_ROLLOUT}.max_num_seqs": 64},
}
"""What a rollout source needs besides."""

WORKERS = {"VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
"""Variables of verl's driver and of every worker."""

_RAY = {
    # A laptop under load takes longer to start workers and agents than Ray waits by default.
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_AUTH_MODE": "disabled",  # else Ray writes a token into the home folder
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_METRICS_COLLECTION": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
_INIT = "ray_kwargs.ray_init"
FILES = ("model", "train.parquet", "validation.parquet", "reward.py")
"""What a smoke run's folder holds."""

MODULE = "metronome_verl.cpu.assets"
"""``python -m`` of it makes them."""


def machine_keys(source: str) -> dict[str, Any]:
    """verl's keys for the room, by rollout source."""
    return CPU_ROOM | BY_SOURCE.get(source, {})


class VerlRoom(Room):
    """A smoke run's folder, and how its driver reaches Ray."""

    def keys(self, args: Mapping[str, Any], variables: Mapping[str, str]) -> dict[str, Any]:
        """``args`` over where verl writes and how its driver reaches Ray.

        Args:
            args: verl's keys; ``ray_kwargs.ray_init.address`` names a running Ray, else the run starts its own, with
                pretended GPUs.
            variables: the environment, in which ``RAY_ADDRESS`` names one too.
        """
        keys: dict[str, Any] = {
            "trainer.default_local_dir": str(self.work / "checkpoints"),
            "hydra.run.dir": str(self.work / "hydra"),
            **{f"+{_INIT}.runtime_env.env_vars.{name}": value for name, value in WORKERS.items()},
        }
        if not _running(args, variables):
            plain = {key.lstrip("+"): value for key, value in args.items()}
            keys |= {
                f"+{_INIT}.address": "local",  # a head that somebody else left running isn't ours to use
                f"{_INIT}.num_cpus": 32,
                f"+{_INIT}.num_gpus": sum(
                    int(plain.get(f"{pool}.nnodes") or 0) * int(plain.get(f"{pool}.n_gpus_per_node") or 0)
                    for pool in ("trainer", _ROLLOUT)
                ),
                f"+{_INIT}.include_dashboard": False,
            }
        return keys | dict(args)


def room(given: str | None, run_folder: str | None) -> VerlRoom:
    """The room of a run; ``given`` is the user's ``assets``."""
    return VerlRoom(*places(given, run_folder), FILES, MODULE)


def driver_environment(args: Mapping[str, Any], variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of verl's driver; for a Ray of its own, what that needs on a laptop, as far as it isn't set."""
    kept = {name: value for name, value in variables.items() if name != "CUDA_VISIBLE_DEVICES"}
    return ({} if _running(args, variables) else _RAY) | kept | WORKERS


def _running(args: Mapping[str, Any], variables: Mapping[str, str]) -> bool:
    plain = {key.lstrip("+"): value for key, value in args.items()}
    return plain.get(f"{_INIT}.address", variables.get("RAY_ADDRESS")) not in (None, "", "local")
