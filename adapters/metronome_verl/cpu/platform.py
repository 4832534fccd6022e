"""verl's platform ``cpu``: torch's CPU device behind the names that verl asks of an accelerator."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import psutil
import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry, platform_manager

from metronome.errors import PluginError


def register() -> None:
    """Registers the platform under ``cpu``; raises PluginError when verl chose another one in this process already."""
    chosen = getattr(platform_manager, "_current_platform", None)
    if chosen is not None and not isinstance(chosen, PlatformCPU):
        raise PluginError(
            "the CPU room was attached after verl had chosen its platform",
            found=type(chosen).__name__,
            where="metronome_verl.cpu.attach",
            remedy="set VERL_PLATFORM=cpu before verl is imported",
        )
    if PlatformRegistry.get("cpu") is not PlatformCPU:
        PlatformRegistry.register(platform="cpu")(PlatformCPU)


def _resident() -> int:
    return int(psutil.Process().memory_info().rss)


def _peak() -> int:
    # Linux counts kibibytes here, macOS bytes; and the kernel's peak can lag behind what is resident now.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return max(peak, _resident())


def _free_and_total(device: Any = None) -> tuple[int, int]:
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def _device_module() -> ModuleType:
    """``torch.cpu`` with what verl calls of ``torch.cuda`` besides; any other name is an AttributeError.

    Memory figures (bytes) are those of the process, so verl's ``perf/max_memory_*`` metrics mean something.
    """
    module = ModuleType("metronome_verl.cpu.device", "torch.cpu, with the names of torch.cuda that verl calls.")
    module.__dict__.update({name: value for name, value in vars(torch.cpu).items() if not name.startswith("_")})
    module.__dict__.update(
        get_device_name=lambda device=None: "cpu",
        empty_cache=lambda: None,
        ipc_collect=lambda: None,
        set_per_process_memory_fraction=lambda fraction, device=None: None,
        reset_peak_memory_stats=lambda device=None: None,
        memory_allocated=lambda device=None: _resident(),
        memory_reserved=lambda device=None: _resident(),
        max_memory_allocated=lambda device=None: _peak(),
        max_memory_reserved=lambda device=None: _peak(),
        mem_get_info=_free_and_total,
        manual_seed=torch.manual_seed,
        manual_seed_all=torch.manual_seed,
        get_rng_state=lambda device=None: torch.get_rng_state(),
        set_rng_state=lambda state, device=None: torch.set_rng_state(state),
    )
    return module


DEVICE = _device_module()


class PlatformCPU(PlatformBase):
    """The CPU as one device a process; a worker takes one pretended GPU of Ray.

    verl counts Ray's ``GPU`` and ``NPU`` only, so a run starts Ray with as many pretended GPUs as it has workers.
    """

    device_name = property(lambda self: "cpu")
    vendor_name = property(lambda self: "cpu")
    device_module = property(lambda self: DEVICE)

    def is_available(self) -> bool:
        """Always."""
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Never found by itself: only VERL_PLATFORM=cpu chooses it."""
        return False

    def current_device(self) -> Any:
        """``"cpu"``: verl hands it to ``Tensor.to``, where a number would mean an accelerator."""
        return "cpu"

    def device_count(self) -> int:
        """One."""
        return 1

    def set_device(self, device_index: int) -> None:
        """Nothing to choose."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Nothing to wait for."""

    def manual_seed(self, seed: int) -> None:
        """Seeds torch's CPU generator."""
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seeds torch's CPU generator."""
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """No allocator of ours."""

    def empty_cache(self) -> None:
        """No cache."""

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        """None, None."""
        return None, None

    def communication_backend_name(self) -> str:
        """gloo."""
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """The variable that Ray writes for its pretended GPUs."""
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        """No profiler ranges."""
        yield

    def profiler_start(self) -> None:
        """No profiler."""

    def profiler_stop(self) -> None:
        """No profiler."""

    def ray_resource_name(self) -> str:
        """GPU, pretended."""
        return "GPU"

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        """``num_gpus``, pretended."""
        return {"num_gpus": num_gpus}

    def ray_noset_envvars(self) -> list[str]:
        """None."""
        return []

    def is_ipc_supported(self) -> bool:
        """False."""
        return False

    def cudart(self) -> Any:
        """None."""
        return None
