"""The CPU room: runs the unmodified ``python -m verl.trainer.main_ppo`` without an accelerator.

Made for debugging a training set-up on a laptop, with models of millions of parameters. ``VERL_PLATFORM=cpu``
switches it on; the run's own command then needs ``trainer.device=cpu``, ``rollout.name=metronome_hf`` and
pretended GPUs for Ray (``+ray_kwargs.ray_init.num_gpus=N``). Trainer and server compute in float32 on one
thread a process.
"""

from __future__ import annotations

import logging
from types import ModuleType

from metronome_patches.imports import on_import
from metronome_patches.ledger import apply, require_host
from metronome_verl.host import HOST_VERSIONS

ROLLOUT = "metronome_hf"
TRANSPORT = "metronome_ray"

_log = logging.getLogger("metronome_verl")
_attached = False


def attach() -> None:
    """Registers platform ``cpu``, its engines, the rollout ``metronome_hf`` and the transport ``metronome_ray``.

    Imports nothing of verl that isn't loaded: what needs a module waits for its import. A second call does nothing.

    Raises:
        PluginError: verl's version isn't one that this was written for, or verl chose another platform before.
    """
    global _attached
    if _attached:
        return
    version = require_host("verl", HOST_VERSIONS, "metronome's CPU room")
    from . import platform
    from .patches import PATCHES

    platform.register()
    for patch in PATCHES:
        apply(patch)
    on_import("verl.workers.engine.fsdp.transformer_impl", _register_engines)
    on_import("verl.workers.rollout.replica", _register_replica)
    on_import("verl.checkpoint_engine.base", _register_transport)
    _attached = True
    _log.info("metronome: verl %s on the CPU; rollout %s, transport %s", version, ROLLOUT, TRANSPORT)


def _register_engines(module: ModuleType) -> None:
    from verl.workers.engine.base import EngineRegistry

    for kind, engine in (
        ("language_model", module.FSDPEngineWithLMHead),
        ("value_model", module.FSDPEngineWithValueHead),
    ):
        for backend in ("fsdp", "fsdp2"):
            # verl asserts that a key is free; an engine of its own for the CPU would be the better one.
            if "cpu" not in EngineRegistry._engines.get(kind, {}).get(backend, {}):
                EngineRegistry.register(model_type=kind, backend=backend, device="cpu")(engine)


def _register_replica(module: ModuleType) -> None:
    def load() -> type:
        from .replica import HFReplica

        return HFReplica

    module.RolloutReplicaRegistry.register(ROLLOUT, load)


def _register_transport(module: ModuleType) -> None:
    from . import transport  # noqa: F401  (registers itself)
