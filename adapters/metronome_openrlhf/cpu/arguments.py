"""OpenRLHF's arguments in the CPU room: what is set there, and what is refused since it needs CUDA."""

from __future__ import annotations

from typing import Any

from metronome_openrlhf.arguments import put, refuse, value_of

ROOM = "in the CPU room"


def arrange(args: Any) -> list[str]:
    """Sets what a CPU needs in ``args``, OpenRLHF's nested arguments; returns what was set, as lines to print.

    Raises ConfigurationError for what needs CUDA.
    """
    notes: list[str] = []
    for flag, what in (
        ("ds.packing_samples", "packed rows need flash-attn"),
        ("train.dynamic_batch_enable", "dynamic batches are packed, which needs flash-attn"),
        ("train.colocate_all", "weights are shared through CUDA's memory"),
        ("vllm.sync_with_ray", "Ray's collectives run in Ray's processes, and vLLM's engine isn't one"),
        ("train.enable_ema", "OpenRLHF moves its average on a CUDA device"),
        ("ds.adam_offload", "DeepSpeed compiles an optimiser for it"),
        ("ds.deepcompile", "DeepSpeed compiles for CUDA"),
        ("ds.load_in_4bit", "bitsandbytes' kernels need CUDA"),
        ("ds.use_liger_kernel", "Liger's kernels need CUDA"),
    ):
        found = value_of(args, flag)
        refuse(found, f"{what}, which isn't there {ROOM}", flag, found, f"leave --{flag} out")
    for flag in ("ds.ring_attn_size", "ds.tensor_parallel_size", "vllm.tensor_parallel_size"):
        found = int(value_of(args, flag) or 1)
        refuse(found > 1, f"one device holds a model {ROOM}", flag, found, f"--{flag} 1")
    for flag in ("actor.optim", "critic.optim"):
        found = value_of(args, flag)
        refuse(found not in (None, "adam"), f"torch's AdamW is the optimiser {ROOM}", flag, found, f"--{flag} adam")
    dtype = value_of(args, "ds.param_dtype")
    refuse(dtype != "bf16", "vLLM computes in bfloat16", "ds.param_dtype", dtype, "--ds.param_dtype bf16")
    attention = str(value_of(args, "ds.attn_implementation"))
    if "flash" in attention:
        put(args, "ds.attn_implementation", "sdpa", notes, f"no flash-attn {ROOM}")
    put(args, "vllm.enforce_eager", True, notes, f"nothing is compiled {ROOM}")
    put(args, "vllm.sync_backend", "gloo", notes, f"no NCCL {ROOM}")
    return notes
