"""AReaL's configuration in the CPU room: what is set there, and what is refused since it needs something else."""

from __future__ import annotations

import os
from typing import Any

from areal.api.alloc_mode import ModelAllocation
from areal.infra.platforms import current_platform

from metronome_areal.arguments import put, refuse
from metronome_areal.cpu import prepare

ROOM = "in the CPU room"
_KEY = "scheduler.type"


def enter(config: Any) -> list[str]:
    """``prepare()`` and ``arrange(config)``: for a program that imported AReaL before it read its configuration."""
    prepare(by_controller(config))
    return arrange(config)


def by_controller(config: Any) -> bool:
    """Whether AReaL's single controller is asked for, by ``scheduler.type``; without it the room is SPMD.

    Raises ConfigurationError for a scheduler that the room hasn't, and for one under torchrun.
    """
    kind = config.scheduler.type
    remedy = "scheduler.type=local, or null for one process"
    refuse(kind not in (None, "local"), f"only workers of this machine are started {ROOM}", _KEY, kind, remedy)
    refuse(
        kind and "TORCHELASTIC_RUN_ID" in os.environ,
        "torchrun's ranks train without a controller",
        _KEY,
        kind,
        "scheduler.type=null, or no torchrun",
    )
    return kind is not None


def arrange(config: Any) -> list[str]:
    """Sets what a CPU needs in ``config``; returns what was set, as lines to print.

    Raises ConfigurationError, by the key, for what needs CUDA, an NPU or an inference server.
    """
    refuse(
        current_platform.device_type != "cpu",
        f"AReaL chose its platform before it was {ROOM}",
        "metronome.cpu",
        current_platform.device_type,
        "python -m metronome_areal, or hide the devices: CUDA_VISIBLE_DEVICES= ASCEND_RT_VISIBLE_DEVICES=",
    )
    notes: list[str] = []
    workers = by_controller(config)
    for name in ("actor", "ref", "critic"):
        if getattr(config, name) is not None:
            _engine(config, name, notes, workers)
    if config.teacher is not None and config.teacher.engine_type == "train":
        _engine(config, "teacher.train", notes, workers)
    way = "go through files" if workers else "are copied in the process"
    put(config, "actor.weight_update_mode", "disk", notes, f"weights {way} {ROOM}, not over NCCL")
    refuse(
        workers and config.actor.use_lora,
        f"workers take whole models {ROOM}",
        "actor.use_lora",
        True,
        "false, or scheduler.type=null",
    )
    for name in ("actor", "rollout"):
        strategy = getattr(config, name).scheduling_strategy
        refuse(
            strategy.type == "colocation",
            f"colocation moves models in and out of CUDA's memory, which isn't there {ROOM}",
            f"{name}.scheduling_strategy.type",
            "colocation",
            f"{name}.scheduling_strategy.type=separation",
        )
    _rollout(config)
    for key in ("gconfig", "eval_gconfig"):
        _sampling(getattr(config, key), key)
    for key, what in (
        ("enable_offload", "torch_memory_saver moves CUDA's memory"),
        ("memory_profiler", "AReaL's memory profiler reads CUDA's memory"),
    ):
        found = getattr(config, key)
        refuse(found, f"{what}, which isn't there {ROOM}", key, found, f"leave {key} out")
    teacher = config.teacher
    refuse(
        teacher is not None and teacher.engine_type == "rollout",
        f"a teacher that is an inference engine needs its server, which isn't there {ROOM}",
        "teacher.engine_type",
        "rollout",
        "teacher=null",
    )
    return notes


def _engine(config: Any, name: str, notes: list[str], workers: bool) -> None:
    engine = _of(config, name)
    backend = str(engine.backend)
    allocation = ModelAllocation.from_str(backend, name=name)
    refuse(
        allocation.backend != "fsdp",
        f"{allocation.backend}'s kernels need CUDA, which isn't there {ROOM}",
        f"{name}.backend",
        backend,
        "fsdp:d1",
    )
    size = allocation.parallel
    refuse(
        size.tensor_parallel_size * size.context_parallel_size > 1,
        f"one process holds a model {ROOM}",
        f"{name}.backend",
        backend,
        f"fsdp:d{size.dp_size}",
    )
    if not workers:
        put(config, f"{name}.backend", f"fsdp:d{os.environ['WORLD_SIZE']}", notes, f"a process a rank {ROOM}")
    if "flash" in str(engine.attn_impl):
        put(config, f"{name}.attn_impl", "sdpa", notes, f"no flash-attn {ROOM}")
    put(config, f"{name}.dtype", "float32", notes, f"what a CPU computes well {ROOM}")
    for key, what in (
        ("enable_tree_training", "tree training's flex attention has no backward pass on a CPU"),
        ("use_kernels", "kernels from the hub need CUDA"),
        ("offload", "torch_memory_saver moves CUDA's memory"),
        ("fsdp.offload_params", "everything is on the CPU"),
        ("fsdp.per_layer_optim_step", "its streams are CUDA's"),
    ):
        found = _of(engine, key)
        refuse(found, f"{what} {ROOM}", f"{name}.{key}", found, f"leave {name}.{key} out")


def _rollout(config: Any) -> None:
    rollout = config.rollout
    for key, on, what in (
        ("return_routed_experts", rollout.return_routed_experts, "routed experts aren't recorded"),
        (
            "agent.mode",
            rollout.agent is not None and rollout.agent.mode == "online",
            "users' sessions come over AReaL's single controller, and the room is one program",
        ),
    ):
        found = _of(rollout, key) if on else None
        refuse(on, f"{what} {ROOM}", f"rollout.{key}", found, f"leave rollout.{key} out")


def _sampling(gconfig: Any, section: str) -> None:
    for key, found in unread(gconfig).items():
        refuse(True, f"this isn't sampled {ROOM}", f"{section}.{key}", found, f"leave {section}.{key} out")


def unread(gconfig: Any) -> dict[str, Any]:
    """What of AReaL's GenerationHyperparameters is set and isn't honoured in the room."""
    names = ("stop", "frequency_penalty", "use_beam_search")
    return {name: getattr(gconfig, name) for name in names if getattr(gconfig, name)}


def _of(place: Any, key: str) -> Any:
    for part in key.split("."):
        place = getattr(place, part)
    return place
