"""Whether this verl is one that we know: by version, and by what we call."""

from __future__ import annotations

import inspect
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from metronome.errors import ConfigurationError

VERSIONS = "0.9"
"""The minor release of verl that is tested."""

HOST_VERSIONS = ">=0.9,<0.10"
"""The releases that our patches were written for."""

_EXPECTED: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("verl.trainer.ppo.v1.trainer_base", "PPOTrainer.step", ("self", "metrics", "timing_raw")),
    (
        "verl.trainer.ppo.v1.trainer_base",
        "PPOTrainer._step_once",
        ("self", "metrics", "timing_raw", "sample_batch_size"),
    ),
    ("verl.trainer.ppo.v1.trainer_base", "PPOTrainer._next_train_batch", ("self", "num_prompts")),
    ("verl.trainer.ppo.v1.trainer_base", "PPOTrainer._submit_batch_to_rollout", ("self", "batch")),
    ("verl.trainer.ppo.v1.trainer_base", "PPOTrainer._update_actor", ("self", "batch", "metrics")),
    (
        "verl.trainer.ppo.v1.replay_buffer",
        "ReplayBufferAsync.wait_for_sampleable",
        ("self", "global_steps", "partition_id", "target_count"),
    ),
    ("verl.workers.engine_workers_tinker", "TinkerTrainingWorker.forward_backward", ("self", "data")),
)


def check_host() -> None:
    """Raises ConfigurationError for a verl of another release, or one whose methods have other arguments."""
    try:
        found = version("verl")
    except PackageNotFoundError:
        found = "not installed"
    if not found.startswith(f"{VERSIONS}."):
        raise ConfigurationError(
            "this verl isn't tested with metronome",
            found=found,
            where="trainer.v1.trainer_mode=metronome",
            remedy=f"pip install 'verl>={VERSIONS}.1,<0.10'",
        )
    for module, name, wanted in _EXPECTED:
        arguments = _arguments(module, name)
        if arguments != wanted:
            raise ConfigurationError(
                f"verl's {name} isn't the one that metronome was written for",
                found="missing" if arguments is None else ", ".join(arguments),
                where=f"verl {found}, {module}",
                remedy=f"verl=={VERSIONS}.1 has {', '.join(wanted)}",
            )


def _arguments(module: str, name: str) -> tuple[str, ...] | None:
    import importlib

    try:
        target: Any = importlib.import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError):
        return None
    target = getattr(target, "__wrapped__", target)
    return tuple(inspect.signature(target).parameters)
