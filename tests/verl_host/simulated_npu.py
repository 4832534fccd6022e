"""An NPU without a card, for a process of its own: torch's device ``npu``, torch_npu's operators, HCCL.

torch is told of a device ``npu`` whose memory is the host's: what is put there is a CPU tensor. ``hccl`` is a backend
of its own name that gloo carries out. So verl finds its real ``PlatformNPU`` by itself, and everything that it or we
choose by the device's name is chosen as on a card. torch 2.13: the hooks of a Python device are private there.
"""

import sys
import types
from contextlib import nullcontext
from importlib.machinery import ModuleSpec

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree

CALLS: list[str] = []
"""Operators of torch_npu that were called, in order."""


def _on_the_host(operator, *arguments, **named):
    """Any operator on device ``npu``, on the host instead."""

    def moved(value):
        there = isinstance(value, torch.device) and value.type == "npu"
        return torch.device("cpu") if there else value

    arguments, named = pytree.tree_map(moved, (arguments, named))
    return operator(*arguments, **named)


class _Stream:
    """Work is done when it is called, so that there is nothing to wait for."""

    def __init__(self, *_, **__):
        self.wait_stream = self.wait_event = self.record = self.synchronize = self.wait = lambda *_: None
        self.record_event = lambda *_: _Stream()


def _device():
    module = types.ModuleType("torch.npu")
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = module._lazy_init = module.synchronize = module.empty_cache = lambda *_: None
    module.set_per_process_memory_fraction = module.reset_peak_memory_stats = module.ipc_collect = lambda *_: None
    module._is_in_bad_fork = lambda: False
    module.Stream = module.Event = _Stream
    module.current_stream, module.stream = lambda *_: _Stream(), nullcontext
    module.memory_allocated = module.memory_reserved = lambda *_: 0
    module.max_memory_allocated = module.max_memory_reserved = lambda *_: 0
    module.mem_get_info = lambda *_: (1 << 30, 1 << 30)
    module.manual_seed = module.manual_seed_all = lambda seed: torch.default_generator.manual_seed(seed)
    module.get_rng_state = lambda *_: torch.get_rng_state()
    module.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    module.get_device_name = lambda *_: "simulated"
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module


def _rms_norm(x, weight, epsilon=1e-6):
    CALLS.append("npu_rms_norm")
    scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * (x.float() * scale).to(x.dtype), scale


def _swiglu(x, dim=-1):
    CALLS.append("npu_swiglu")
    gate, up = x.chunk(2, dim)
    return torch.nn.functional.silu(gate) * up


def _rotary_mul(x, cos, sin):
    CALLS.append("npu_rotary_mul")
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


def install(operators):
    """Puts the device in place; before verl or transformers is imported. ``operators`` are ``torch.ops.npu``'s."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    device = _device()
    _setup_privateuseone_for_python_backend("npu", backend_module=device)
    kept = torch.library.Library("_", "IMPL")
    kept.fallback(_on_the_host, "PrivateUse1", with_keyset=False)
    fake = types.ModuleType("torch_npu")
    fake.__spec__, fake.__version__, fake.npu, fake.kept = ModuleSpec("torch_npu", None), "2.13.0", device, kept
    fake.npu_fusion_attention = operators.npu_fusion_attention
    fake.npu_rms_norm, fake.npu_swiglu, fake.npu_rotary_mul = _rms_norm, _swiglu, _rotary_mul
    device.mstx = types.ModuleType("torch_npu.npu.mstx")  # profiling ranges, which verl imports
    sys.modules.update({"torch_npu": fake, "torch_npu.npu": device, "torch_npu.npu.mstx": device.mstx})
    dist.Backend.register_backend(
        "hccl", lambda store, rank, size, timeout: dist.ProcessGroupGloo(store, rank, size, timeout), devices=["npu"]
    )
    # FSDP holds parameters to the device that it was told; here that device's memory is the host's.
    from torch.distributed.fsdp import _init_utils
    from torch.distributed.fsdp._fully_shard import _fully_shard

    _fully_shard._get_device_from_mesh = lambda mesh: torch.device("cpu")
    _init_utils._get_compute_device = lambda *_: torch.device("cpu")
