"""What each of two processes on gloo does: its part of a GPTModel, held against the whole model in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cpu_room
import pytest
import torch
from torch import Tensor

from metronome.shared_prompt.cascade import CascadeBackend
from metronome.shared_prompt.megatron import MegatronSharedPrompt, attach_megatron, packed

LAYERS = 4
ARRANGEMENTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_model_parallel_size": 2},
    "tensor, logits gathered": {"tensor_model_parallel_size": 2, "parallel_output": False},
    "tensor and sequence": {"tensor_model_parallel_size": 2, "sequence_parallel": True} | cpu_room.RECOMPUTE["full"],
    "pipeline": {"pipeline_model_parallel_size": 2},
}


def whole() -> dict[str, Any]:
    """The model in one process: parameters, and log-probs and gradients from separate rows."""
    model = cpu_room.build(num_layers=LAYERS)
    ids, plan, weights = cpu_room.row()
    log_probs = cpu_room.separately(model, ids, plan)
    state = {name: value.detach().clone() for name, value in model.named_parameters()}
    return {
        "state": state,
        "log_probs": log_probs.detach(),
        "gradients": cpu_room.gradients(model, log_probs, weights),
    }


def work(rank: int, folder: str) -> None:
    """Runs every arrangement and leaves what it found in ``folder``."""
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    wanted = torch.load(Path(folder, "whole.pt"))
    found = {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        cpu_room.furnish(monkeypatch)
        for name, changes in ARRANGEMENTS.items():
            parallel_state.initialize_model_parallel(
                changes.get("tensor_model_parallel_size", 1), changes.get("pipeline_model_parallel_size", 1)
            )
            stages = changes.get("pipeline_model_parallel_size", 1)
            for form in ("sbhd", "thd"):
                found[name, form] = _held(rank, stages, changes, form, wanted)
            found[name, "one wrong key"] = _held(rank, stages, changes, "sbhd", wanted, cpu_room.OneWrongKey())
            parallel_state.destroy_model_parallel()
    torch.save(found, Path(folder, f"found{rank}.pt"))
    torch.distributed.destroy_process_group()


def _held(
    rank: int, stages: int, changes: dict[str, Any], form: str, wanted: dict[str, Any], backend: Any = None
) -> dict[str, Any]:
    """Largest differences of log-probs and gradients, and attention calls made."""
    stage = {"pre_process": rank == 0, "post_process": rank == stages - 1} if stages > 1 else None
    model = cpu_room.build(num_layers=LAYERS, stages=stage, **changes)
    first = rank * LAYERS // stages if stages > 1 else 0
    own = {name: _in_whole(name, first) for name, _ in model.named_parameters()}
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(_part(wanted["state"][own[name]], name, parameter, rank))
    options = None if backend is None else cpu_room.UNCHECKED
    handle = attach_megatron(model, backend or CascadeBackend(), options)
    log_probs = _pass(model, handle, rank, stages, form)
    if stages == 1:
        _sum_over_ranks(model)
    gradients = {name: value.grad for name, value in parameters.items()}
    parts = {name: _part(wanted["gradients"][own[name]], name, value, rank) for name, value in parameters.items()}
    apart = 0.0 if log_probs is None else (log_probs - wanted["log_probs"]).abs().max().item()
    return {"apart": (apart, cpu_room.furthest(gradients, parts)), "calls": handle.calls}


def _pass(model: Any, handle: MegatronSharedPrompt, rank: int, stages: int, form: str) -> Tensor | None:
    """Forward and backward, stages handing hidden states and gradients to each other; log-probs if there's a head."""
    ids, plan, weights = cpu_room.row()
    received = None
    if stages > 1 and rank > 0:
        received = torch.empty(plan.tokens, 1, 64)
        torch.distributed.recv(received, rank - 1)
        received.requires_grad_()
        model.set_input_tensor(received)
    out = model(ids, None, None, packed_seq_params=packed(plan, form))
    if stages > 1 and rank < stages - 1:
        torch.distributed.send(out.detach(), rank + 1)
        gradient = torch.empty_like(out)
        torch.distributed.recv(gradient, rank + 1)
        out.backward(gradient)
        return None
    log_probs = handle.response_log_probs(out, ids, plan)
    (log_probs * weights).sum().backward()
    if received is not None:
        assert received.grad is not None
        torch.distributed.send(received.grad, rank - 1)
    return log_probs.detach()


def _in_whole(name: str, first: int) -> str:
    """The name in the whole model of a stage's parameter; its layers are counted from ``first``."""
    head, found, tail = name.partition("decoder.layers.")
    number, _, rest = tail.partition(".")
    return f"{head}{found}{int(number) + first}.{rest}" if found else name


def _part(value: Tensor, name: str, parameter: Tensor, rank: int) -> Tensor:
    """This rank's part of a whole parameter: of both halves, gate and value, of a gated feed-forward."""
    if value.shape == parameter.shape:
        return value
    dimension = parameter.partition_dim
    halves = value.chunk(2, 0) if "linear_fc1" in name else (value,)
    return torch.cat([half.chunk(2, dimension)[rank] for half in halves], dimension)


def _sum_over_ranks(model: Any) -> None:
    """Norms see this rank's heads, or with sequence parallelism its tokens, as Megatron's finalising sums them."""
    for name, parameter in model.named_parameters():
        per_head = "q_layernorm" in name or "k_layernorm" in name
        if per_head or (model.config.sequence_parallel and "norm" in name):
            torch.distributed.all_reduce(parameter.grad)
