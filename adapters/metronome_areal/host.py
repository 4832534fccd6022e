"""Whether this AReaL is one that we know: by version, and by what we call or stand in for."""

from __future__ import annotations

import importlib
import inspect
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from metronome.errors import ConfigurationError

VERSIONS = ">=1.0.4,<1.1"

_EXPECTED: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("areal.trainer.rl_trainer", "PPOTrainer.__init__", ("self", "config", "train_dataset", "valid_dataset")),
    (
        "areal.trainer.rl_trainer",
        "PPOTrainer.train",
        (
            "self",
            "workflow",
            "eval_workflow",
            "workflow_kwargs",
            "eval_workflow_kwargs",
            "dynamic_filter_fn",
            "total_epochs",
        ),
    ),
    ("areal.trainer.rl_trainer", "PPOTrainer.__exit__", ("self", "exc_type", "exc_value", "traceback")),
    ("areal.trainer.rl_trainer", "PPOTrainer._create_train_engine", ("self", "actor_config", "alloc")),
    ("areal.trainer.rl_trainer", "PPOTrainer._init_rollout", ("self", "rollout_config", "is_eval", "lora_path")),
    ("areal.trainer.ppo.actor", "PPOActor.compute_advantages", ("self", "data")),
    ("areal.trainer.ppo.actor", "PPOActor._compute_advantages", ("self", "data")),
    ("areal.trainer.ppo.actor", "PPOActor.ppo_update", ("args", "kwargs")),  # behind a decorator
    ("areal.engine.fsdp_engine", "FSDPEngine.train_batch", ("self", "input_", "loss_fn", "loss_weight_fn")),
    ("areal.engine.fsdp_engine", "FSDPEngine.optimizer_step", ("self",)),
    (
        "areal.engine.fsdp_engine",
        "FSDPEngine.forward_backward_batch",
        ("self", "mb_list", "process_output_fn", "forward_only"),
    ),
    ("areal.engine.fsdp_engine", "FSDPEngine._prepare_mb_list", ("self", "input_")),
    ("areal.engine.fsdp_engine", "FSDPEngine._prepare_mb_inputs", ("self", "mb_item")),
    (
        "areal.engine.fsdp_engine",
        "FSDPEngine._compute_logprobs_and_loss",
        ("self", "logits", "ctx", "loss_fn", "loss_weight_fn", "total_loss_weight", "loss_multiplier"),
    ),
    (
        "areal.engine.fsdp_engine",
        "FSDPEngine._compute_logprobs_entropy",
        ("self", "logits", "inputs", "ulysses_pad_size"),
    ),
    ("areal.engine.fsdp_engine", "FSDPEngine._compute_logprobs", ("self", "logits", "inputs", "ulysses_pad_size")),
    ("areal.engine.fsdp_engine", "FSDPEngine._get_vocab_min_max_logits", ("self", "logits", "ulysses_pad_size")),
    ("areal.engine.fsdp_engine", "FSDPEngine._create_device_model", ("self",)),
    ("areal.utils.data", "Normalization.__call__", ("self", "x", "loss_mask", "high_precision", "reduce_group")),
    (
        "areal.utils.data",
        "Normalization._compute_mean",
        ("x", "mask", "high_precision", "leave_one_out", "all_reduce", "reduce_group"),
    ),
    (
        "areal.utils.data",
        "Normalization._compute_std",
        ("x", "mask", "mean", "unbiased", "high_precision", "all_reduce", "reduce_group"),
    ),
    ("areal.infra.workflow_executor", "BatchTaskDispatcher._check_thread_exception", ("self",)),
    (
        "areal.infra.workflow_executor",
        "WorkflowExecutor.submit",
        ("self", "data", "workflow", "should_accept_fn", "task_id", "is_eval"),
    ),
    ("areal.infra.staleness_manager", "StalenessManager.get_capacity", ("self",)),
    (
        "areal.infra.controller.train_controller",
        "TrainController._custom_function_call",
        ("self", "method", "args", "rpc_meta", "kwargs"),
    ),
    ("areal.infra.controller.rollout_controller", "RolloutController._resolve_workflow_str", ("self", "workflow")),
    (
        "areal.infra.controller.rollout_controller",
        "RolloutController.submit",
        (
            "self",
            "data",
            "workflow",
            "workflow_kwargs",
            "should_accept_fn",
            "task_id",
            "is_eval",
            "group_size",
            "proxy_addr",
        ),
    ),
    ("areal.infra.rpc.rtensor", "RTensor.localize", ("obj",)),
    ("areal.infra.workflow_executor", "WorkflowExecutor.pause", ("self",)),
    ("areal.utils.recover", "RecoverHandler.recover_info_path", ("experiment_name", "trial_name", "fileroot")),
    ("areal.utils.recover", "RecoverInfo.load", ("load_dir",)),
)


def check_host() -> None:
    """Raises ConfigurationError for an AReaL of another release, or one whose methods have other arguments."""
    from packaging.specifiers import SpecifierSet

    try:
        found = version("areal")
    except PackageNotFoundError:
        found = "not installed"
    if found == "not installed" or not SpecifierSet(VERSIONS).contains(found, prereleases=True):
        raise ConfigurationError(
            "this AReaL isn't tested with metronome",
            found=found,
            where="metronome_areal",
            remedy=f"pip install 'areal{VERSIONS}'",
        )
    for module, name, wanted in _EXPECTED:
        arguments = _arguments(module, name)
        if arguments != wanted:
            raise ConfigurationError(
                f"AReaL's {name} isn't the one that metronome was written for",
                found="missing" if arguments is None else ", ".join(arguments),
                where=f"areal {found}, {module}",
                remedy=f"areal==1.0.4 has {', '.join(wanted)}",
            )


def _arguments(module: str, name: str) -> tuple[str, ...] | None:
    try:
        target: Any = importlib.import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError):
        return None
    return tuple(inspect.signature(inspect.unwrap(target)).parameters)
