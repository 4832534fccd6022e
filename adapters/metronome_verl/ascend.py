"""vllm-ascend under verl on NPUs: what a run needs of it, checked in the trainer's process before anything starts.

Read in the wheel of vllm-ascend 0.23.0 and in verl 0.9.1; not run on a card. Servers on other nodes aren't looked
at: what they get of this travels in verl's configuration, their installation must be that of the trainer's node.
"""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from packaging.version import InvalidVersion, Version

from metronome.errors import ConfigurationError

RELEASE = (0, 23, 0)
"""The release that verl's installation page names, beside vLLM 0.23.0, torch 2.10.0 and CANN 9.1.0."""

_INSTALL = "pip install vllm-ascend==0.23.0 (0.23.0.post1 has no wheel: it is built from source)"
_ENGINE = "actor_rollout_ref.rollout.engine_kwargs.vllm"
_TRANSPORT = "actor_rollout_ref.rollout.checkpoint_engine"
_NZ_VARIABLE, _NZ_KEY = "VLLM_ASCEND_ENABLE_NZ", "weight_nz_mode"
_SERVER = "workers/rollout/vllm_rollout/vllm_async_server.py"


def check_ascend(config: DictConfig, mode: str, device: str, notes: list[str]) -> None:
    """Checks a run whose rollouts come from vLLM on an NPU; any other passes unlooked at.

    Sets ``weight_nz_mode: 0`` among vLLM's arguments, so that every server gets it, and says so in ``notes``.

    Raises ConfigurationError for another vllm-ascend, a weight transport that isn't HCCL, weights in FRACTAL_NZ,
    devices shared with training in a mode that needs its own, and a verl that sleeps deeper than level 1.
    """
    rollout = config.actor_rollout_ref.rollout
    if device != "npu" or OmegaConf.select(rollout, "name") != "vllm":
        return
    _version()
    _sleep_level()
    if mode != "synchronous":
        _own_devices(config)
        _transport(rollout.checkpoint_engine, notes)
    else:
        notes.append(
            "vllm-ascend shares the NPUs with training (verl's colocated path): untested, separate devices are those of"
            " metronome.rollout_source=periodic and bounded"
        )
    _nz_off(config, notes)


def _version() -> None:
    try:
        found = version("vllm-ascend")
    except PackageNotFoundError:
        found = "not installed"
    try:
        parsed = Version(found)
        known = parsed.release == RELEASE and not parsed.is_prerelease
    except InvalidVersion:
        known = False
    if not known:
        raise ConfigurationError(
            "vLLM on an NPU needs the release of vllm-ascend that is known to work with this verl",
            found=f"vllm-ascend {found}",
            where="the trainer's environment (actor_rollout_ref.rollout.name=vllm, trainer.device=npu)",
            remedy=_INSTALL,
        )


def _sleep_level() -> None:
    """verl 0.9.1 has no setting: its server takes level 1 wherever torch has an NPU, which is read in its source."""
    if not _source_takes_level_one(_server_source()):
        raise ConfigurationError(
            "vllm-ascend must sleep at level 1, which keeps the weights, and this verl doesn't choose it on NPUs",
            found="_resolve_sleep_level without 'return 1' for NPUs",
            where=f"verl/{_SERVER}",
            remedy="verl==0.9.1",
        )


def _server_source() -> str:
    found = find_spec("verl")
    folders = [] if found is None else list(found.submodule_search_locations or [])
    path = Path(folders[0], _SERVER) if folders else Path(_SERVER)
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _source_takes_level_one(source: str) -> bool:
    """Whether ``_resolve_sleep_level`` returns 1 under a condition that any NPU makes true."""
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef) or function.name != "_resolve_sleep_level":
            continue
        for branch in ast.walk(function):
            if isinstance(branch, ast.If) and _any_npu(branch.test):
                last = branch.body[-1]
                if isinstance(last, ast.Return) and isinstance(last.value, ast.Constant) and last.value.value == 1:
                    return True
    return False


def _any_npu(test: ast.expr) -> bool:
    parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or) else [test]
    return any(
        isinstance(one, ast.Call) and isinstance(one.func, ast.Name) and one.func.id == "is_torch_npu_available"
        for one in parts
    )


def _own_devices(config: DictConfig) -> None:
    """``arrange`` has set it; a configuration that comes another way is held to it."""
    if config.actor_rollout_ref.hybrid_engine:
        raise ConfigurationError(
            "vllm-ascend must have NPUs of its own in this mode",
            found=True,
            where="actor_rollout_ref.hybrid_engine",
            remedy="actor_rollout_ref.hybrid_engine=False, with actor_rollout_ref.rollout.nnodes and n_gpus_per_node",
        )


def _transport(transport: Any, notes: list[str]) -> None:
    """verl registers its HCCL engine under ``nccl`` where torch has an NPU (hccl_checkpoint_engine.py)."""
    if transport.get("custom_backend_module"):
        notes.append(
            f"weights travel by {transport.backend} of {transport.custom_backend_module}: not known to metronome"
        )
    elif transport.backend != "nccl":
        raise ConfigurationError(
            "on NPUs weights travel to vllm-ascend by HCCL, which verl has under the name nccl",
            found=transport.backend,
            where=f"{_TRANSPORT}.backend",
            remedy=f"{_TRANSPORT}.backend=nccl",
        )


def _nz_off(config: DictConfig, notes: list[str]) -> None:
    """Weights that training overwrites must not be kept in FRACTAL_NZ.

    vllm-ascend 0.23.0 takes ``weight_nz_mode`` of its additional configuration, without it the environment variable,
    without that 1 (ascend_config.py). It refuses to wake up with it on, but verl's servers wake up only if they
    sleep (``rollout.free_cache_engine``), and verl's weight update doesn't ask.
    """
    name, additional = _additional(config)
    where = f"{_ENGINE}.{name}.{_NZ_KEY}"
    told = additional.get(_NZ_KEY)
    if told is None:
        ray = OmegaConf.select(config, f"ray_kwargs.ray_init.runtime_env.env_vars.{_NZ_VARIABLE}")
        told, where = (os.environ.get(_NZ_VARIABLE), "environment") if ray is None else (ray, "ray's runtime_env")
        if told is None or str(told).strip() == "0":
            setting = json.dumps({**additional, _NZ_KEY: 0})
            OmegaConf.update(config, f"{_ENGINE}.{name}", setting, force_add=True)
            notes.append(f"{_ENGINE}.{name}={setting}  (no FRACTAL_NZ: training overwrites the weights)")
            return
    if str(told).strip() != "0":
        key = _NZ_KEY if where.startswith(_ENGINE) else _NZ_VARIABLE
        raise ConfigurationError(
            "vllm-ascend would keep weights in FRACTAL_NZ, which training's updates don't survive exactly",
            found=f"{key}={told}",
            where=where,
            remedy=f"{_NZ_VARIABLE}=0, or +{_ENGINE}.{name}.{_NZ_KEY}=0",
        )


def _additional(config: DictConfig) -> tuple[str, dict[str, Any]]:
    """vLLM's ``additional_config`` as the user gave it, a mapping or JSON, and the spelling of its key."""
    given = OmegaConf.select(config, _ENGINE) or {}
    name = "additional-config" if "additional-config" in given else "additional_config"
    found = given.get(name)
    if OmegaConf.is_config(found):
        found = OmegaConf.to_container(found, resolve=True)
    if isinstance(found, str):
        with suppress(ValueError):
            found = json.loads(found)
    if not isinstance(found, (Mapping, type(None))):
        raise ConfigurationError(
            "vLLM's additional_config must be a mapping or JSON of one",
            found=found,
            where=f"{_ENGINE}.{name}",
            remedy=f"+{_ENGINE}.{name}={{{_NZ_KEY}:0}}",
        )
    return name, {str(key): value for key, value in (found or {}).items()}
