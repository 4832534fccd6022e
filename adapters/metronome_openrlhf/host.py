"""Whether this OpenRLHF is one that we know: by version, and by what we call or stand in for."""

from __future__ import annotations

import importlib
import inspect
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from metronome.errors import ConfigurationError

VERSIONS = ">=0.11.2,<0.12"

_EXPECTED: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("openrlhf.utils.config", "hierarchize", ("args",)),
    ("openrlhf.trainer.ppo_trainer", "BasePPOTrainer.train_step", ("self", "rollout_samples", "global_step")),
    ("openrlhf.trainer.ppo_trainer", "BasePPOTrainer.broadcast_to_vllm", ("self",)),
    (
        "openrlhf.trainer.ppo_trainer",
        "BasePPOTrainer.save_logs_and_checkpoints",
        ("self", "global_step", "logs_dict", "client_states"),
    ),
    (
        "openrlhf.trainer.ppo_utils.samples_generator",
        "SamplesGenerator._dispatch_prompts_to_vllm",
        ("self", "prompts", "labels", "images", "generate_kwargs"),
    ),
    (
        "openrlhf.trainer.ppo_utils.samples_generator",
        "SamplesGenerator._process_response_into_experience",
        ("self", "response", "generate_kwargs"),
    ),
    (
        "openrlhf.trainer.ppo_utils.experience_maker",
        "RemoteExperienceMaker._dispatch_forward",
        ("self", "group", "sync_condition", "kwargs"),
    ),
    (
        "openrlhf.trainer.ppo_utils.experience_maker",
        "RemoteExperienceMaker.make_experience",
        ("self", "samples_list"),
    ),
    (
        "openrlhf.trainer.ray.ppo_actor",
        "ActorPPOTrainer.training_step",
        ("self", "experience", "kl_ctl", "step", "loss_batch_info"),
    ),
    ("openrlhf.trainer.ray.ppo_actor", "ActorPPOTrainer.ppo_train", ("self", "kl_ctl")),
    ("openrlhf.trainer.ray.ppo_actor", "ActorPPOTrainer.broadcast_to_vllm", ("self",)),
    (
        "openrlhf.trainer.ray.vllm_engine",
        "RolloutRayActor.__ray_metadata__.modified_class.generate",
        ("self", "prompt_token_ids", "sampling_params", "multi_modal_data"),
    ),
    (
        "openrlhf.trainer.ray.vllm_engine",
        "RolloutRayActor.__ray_metadata__.modified_class.generate_responses",
        ("self", "prompt", "label", "sampling_params", "max_length", "hf_tokenizer", "num_samples", "images"),
    ),
    (
        "openrlhf.models.actor",
        "Actor.forward",
        (
            "self",
            "sequences",
            "action_mask",
            "attention_mask",
            "return_output",
            "allgather_logits",
            "return_logprobs",
            "ring_attn_group",
            "packed_seq_lens",
            "return_entropy",
            "mm_inputs",
        ),
    ),
    (
        "openrlhf.trainer.ppo_utils.replay_buffer",
        "NaiveReplayBuffer",
        ("sample_batch_size", "limit", "cpu_offload", "packing_samples", "dynamic_batch"),
    ),
    ("openrlhf.trainer.ppo_utils.replay_buffer", "NaiveReplayBuffer.collate_fn", ("self", "batch")),
    (
        "openrlhf.trainer.ppo_utils.samples_generator",
        "SamplesGenerator._generate_vllm",
        ("self", "dataloader_iter", "num_prompts", "dynamic_filtering", "generate_kwargs"),
    ),
    (
        "openrlhf.trainer.ppo_trainer_async",
        "GenerateSamplesActor.__ray_metadata__.modified_class",
        ("pretrain", "strategy", "vllm_engines", "vllm_lock", "rollout_queue", "rollout_slots", "generate_kwargs"),
    ),
    (
        "openrlhf.trainer.ppo_trainer_async",
        "GenerateSamplesActor.__ray_metadata__.modified_class.fit",
        ("self", "episode", "total_consumed_prompts"),
    ),
    (
        "openrlhf.trainer.ppo_trainer_async",
        "GenerateSamplesActor.__ray_metadata__.modified_class._should_eval",
        ("self", "global_step"),
    ),
    ("openrlhf.trainer.ppo_trainer_async", "GenerateSamplesActor.__ray_metadata__.modified_class._run_eval", ("self",)),
    (
        "openrlhf.trainer.ppo_trainer_async",
        "TrainingActor.__ray_metadata__.modified_class.fit",
        ("self", "global_step"),
    ),
    ("openrlhf.trainer.ppo_trainer_async", "PPOTrainerAsync.__ray_metadata__.modified_class.fit", ("self",)),
    (
        "openrlhf.models.loss",
        "aggregate_loss",
        ("loss", "loss_mask", "token_level_loss", "dp_size", "batch_num_tokens", "global_batch_size"),
    ),
    (
        "openrlhf.models.loss",
        "PolicyLoss.forward",
        (
            "self",
            "log_probs",
            "old_log_probs",
            "advantages",
            "action_mask",
            "rollout_log_probs",
            "dp_size",
            "batch_num_tokens",
            "global_batch_size",
        ),
    ),
)


def check_host() -> None:
    """Raises ConfigurationError for an OpenRLHF of another release, or one whose methods have other arguments."""
    from packaging.specifiers import SpecifierSet

    try:
        found = version("openrlhf")
    except PackageNotFoundError:
        found = "not installed"
    if found == "not installed" or not SpecifierSet(VERSIONS).contains(found, prereleases=True):
        raise ConfigurationError(
            "this OpenRLHF isn't tested with metronome",
            found=found,
            where="python -m metronome_openrlhf",
            remedy=f"pip install 'openrlhf{VERSIONS}'",
        )
    for module, name, wanted in _EXPECTED:
        arguments = _arguments(module, name)
        if arguments != wanted:
            raise ConfigurationError(
                f"OpenRLHF's {name} isn't the one that metronome was written for",
                found="missing" if arguments is None else ", ".join(arguments),
                where=f"openrlhf {found}, {module}",
                remedy=f"openrlhf==0.11.2 has {', '.join(wanted)}",
            )


def imported(module: str) -> Any:
    """OpenRLHF's ``module``, or None if it has none of that name.

    Raises ConfigurationError where something that OpenRLHF needs is missing.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if error.name and module.startswith(error.name):
            return None
        raise ConfigurationError(
            f"OpenRLHF can't be imported here: {error}",
            where=module,
            remedy="install what it needs, or --metronome.cpu, which needs neither CUDA nor flash-attn",
        ) from error


def _arguments(module: str, name: str) -> tuple[str, ...] | None:
    target = imported(module)
    for part in name.split("."):
        target = getattr(target, part, None)
    if target is None:
        return None
    # Ray adds the last one to methods of a class that an actor class inherits from.
    return tuple(name for name in inspect.signature(inspect.unwrap(target)).parameters if name != "_ray_trace_ctx")
