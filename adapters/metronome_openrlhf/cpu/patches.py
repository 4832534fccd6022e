"""What the CPU room changes, in OpenRLHF and in libraries for it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.abc import Loader
from types import FunctionType, ModuleType
from typing import Any

from metronome_openrlhf.host import VERSIONS
from metronome_patches.ledger import Patch


class CpuDevice(str):
    """``cpu``, as a device; 0 in a format string: OpenRLHF writes ``cuda:{device}`` for a device that it never uses."""

    __slots__ = ()

    def __format__(self, _: str) -> str:
        return "0"


def here(_: Callable[[], Any]) -> Callable[[], Any]:
    """Answers ``cpu``."""
    device = CpuDevice("cpu")
    return lambda: device


def nothing(replaced: Callable[..., Any]) -> Callable[..., None]:
    """Does nothing and returns None."""

    @functools.wraps(replaced)
    def wrapped(*_: Any, **__: Any) -> None:
        return None

    return wrapped


def cpu_mesh(init_device_mesh: Callable[..., Any]) -> Callable[..., Any]:
    """The mesh of the asked shape, of CPUs."""

    @functools.wraps(init_device_mesh)
    def wrapped(device_type: str, mesh_shape: tuple[int, ...], **named: Any) -> Any:
        return init_device_mesh("cpu", mesh_shape, **named)

    return wrapped


def torch_adam(get_ds_train_config: Callable[..., Any]) -> Callable[..., Any]:
    """DeepSpeed's configuration with torch's AdamW."""

    @functools.wraps(get_ds_train_config)
    def wrapped(self: Any, optim_dict: dict[str, Any] | None = None, **named: Any) -> Any:
        if optim_dict is not None and optim_dict.get("type") == "AdamW":
            optim_dict = {**optim_dict, "params": {**optim_dict.get("params", {}), "torch_adam": True}}
        return get_ds_train_config(self, optim_dict, **named)

    return wrapped


def through_a_store(_: Callable[..., Any]) -> Callable[..., Any]:
    """Our transport."""
    from .transport import init_process_group

    return init_process_group


def our_worker(init: Callable[..., Any]) -> Callable[..., Any]:
    """The engine's ``__init__`` with our worker extension."""

    @functools.wraps(init)
    async def wrapped(self: Any, *arguments: Any, **named: Any) -> None:
        await init(self, *arguments, **{**named, "worker_extension_cls": "metronome_openrlhf.cpu.worker.CpuWorker"})

    return wrapped


class _FlashAttention:
    """Finds our stand-in for flash-attn; made when it is first asked for, since it imports torch."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] != "flash_attn":
            return None
        from importlib.machinery import ModuleSpec

        from .flash import modules

        made = modules().get(name)
        return made and ModuleSpec(name, _Made(made), is_package=hasattr(made, "__path__"))


class _Made(Loader):
    """A loader of a module that is there."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def create_module(self, _: Any) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        pass


def with_flash_attention(finders: list[Any]) -> list[Any]:
    """The same list, headed by our finder."""
    finders.insert(0, _FlashAttention)
    return finders


def _patch(target: str, expects: tuple[str, ...] | type, replace: Callable[[Any], Any], **reasons: str) -> Patch:
    return Patch("openrlhf", target, VERSIONS, expects, replace=replace, **reasons)


_NO_CUDA = "OpenRLHF asks its accelerator's abstraction for devices"

PATCHES = (
    _patch(
        "sys:meta_path",
        list,
        with_flash_attention,
        why="flash-attn is imported whether it is used or not, and can't be built without CUDA; the padding functions"
        " are ours, in torch, and ring attention is refused",
        upstream="openrlhf/models/ring_attn_utils.py, its first lines",
        remove_when="OpenRLHF imports flash-attn where it calls it",
    ),
    _patch(
        "torch.cuda:current_device",
        FunctionType,
        here,
        why="tensors are moved to torch.cuda.current_device(), which raises without CUDA; it answers the CPU",
        upstream="openrlhf/trainer/ray/ppo_actor.py, launcher.py, openrlhf/utils/deepspeed/deepspeed.py and others",
        remove_when=_NO_CUDA,
    ),
    _patch(
        "torch.cuda:set_device",
        ("device",),
        nothing,
        why="each worker chooses its CUDA device, which raises without CUDA",
        upstream="openrlhf/utils/deepspeed/deepspeed.py, setup_distributed",
        remove_when=_NO_CUDA,
    ),
    _patch(
        "torch.cuda:synchronize",
        ("device",),
        nothing,
        why="workers wait for their CUDA device, which raises without CUDA",
        upstream="openrlhf/utils/distributed_util.py, openrlhf/trainer/ray/launcher.py",
        remove_when=_NO_CUDA,
    ),
    _patch(
        "torch.cuda:current_stream",
        ("device",),
        nothing,
        why="a weight is sent on the current CUDA stream, which raises without CUDA; our transport needs none",
        upstream="openrlhf/trainer/ray/ppo_actor.py, broadcast_to_vllm",
        remove_when=_NO_CUDA,
    ),
    _patch(
        "openrlhf.utils.deepspeed.deepspeed:init_device_mesh",
        ("device_type", "mesh_shape"),
        cpu_mesh,
        why="the mesh is asked of CUDA devices by name",
        upstream="openrlhf/utils/deepspeed/deepspeed.py, setup_distributed",
        remove_when=_NO_CUDA,
    ),
    _patch(
        "openrlhf.utils.deepspeed.deepspeed:DeepspeedStrategy.get_ds_train_config",
        ("self", "optim_dict"),
        torch_adam,
        why="DeepSpeed makes its fused AdamW, which is compiled when it is first used; torch's needs no compiler",
        upstream="openrlhf/utils/deepspeed/deepspeed.py, get_ds_train_config",
        remove_when="OpenRLHF can pass DeepSpeed's torch_adam",
    ),
    _patch(
        "deepspeed.comm.torch:build_shm_op",
        FunctionType,
        nothing,
        why="DeepSpeed compiles an all-reduce through shared memory when it starts on a CPU (g++, ninja, a minute);"
        " gloo's takes its place",
        upstream="deepspeed/comm/torch.py, TorchBackend",
        remove_when="DeepSpeed can be told to leave it out",
    ),
    _patch(
        "openrlhf.utils.distributed_util:stateless_init_process_group",
        ("master_address", "master_port", "rank", "world_size", "device"),
        through_a_store,
        why="weights travel to vLLM through NCCL; here through torch's TCP store",
        upstream="openrlhf/utils/distributed_util.py",
        remove_when="OpenRLHF sends weights through a back end of choice",
    ),
    _patch(
        "openrlhf.trainer.ray.vllm_engine:RolloutRayActor.__ray_metadata__.modified_class.__init__",
        ("self", "args", "bundle_indices"),
        our_worker,
        why="vLLM's worker receives weights on a CUDA device, and on a CPU packs linear weights and frees them, after"
        " which none can be loaded; ours receives them on the CPU and keeps them as they are",
        upstream="openrlhf/trainer/ray/vllm_worker_wrap.py, and vllm/model_executor/layers/utils.py",
        remove_when="OpenRLHF's worker takes the engine's device, and vLLM can load weights into packed layers",
    ),
)
