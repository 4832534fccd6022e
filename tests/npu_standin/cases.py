"""What the tests of both NPU backends share: inputs, outcomes against arithmetic, and faulty operators."""

import torch
from npu_standin import semantics
from npu_standin.masks import require
from torch import Tensor

from metronome.shared_prompt.plan import SharedPromptPlan
from metronome.testing.attention import dense_attention

EXACT = ("float64", "float32", "bfloat16")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}
SCALE = 0.2  # scores near one, so that float32 is held to its rounding


def inputs(plan, heads=(4, 2), widths=(8, 8), dtype=torch.float64, seed=0):
    """q, k, v and sinks."""
    draw = torch.Generator().manual_seed(seed)
    shapes = [
        (plan.queries, heads[0], widths[0]),
        (plan.tokens, heads[1], widths[0]),
        (plan.tokens, heads[1], widths[1]),
    ]
    return [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in [*shapes, (heads[0],)]]


def outcome(attend, plan, tensors, window=None, sinks=False) -> list[Tensor]:
    """The output's real tokens, and the gradients of a random linear loss on them."""
    leaves = [x.clone().requires_grad_() for x in (tensors if sinks else tensors[:3])]
    out = attend(*leaves[:3], plan, SCALE, window=window, sinks=leaves[3] if sinks else None)
    out = out[: plan.tokens_shared - plan.first_query]
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return [out.detach(), *torch.autograd.grad(out, leaves, weights.to(out))]


def error(backend, plan, tensors, window=None, sinks=False) -> float:
    """The largest difference from one-row-at-a-time float64 arithmetic, relative to values above 1."""

    def dense(q, k, v, plan, scale, *, window, sinks):
        return dense_attention(q, k, v, plan, scale, window, sinks)

    found = outcome(backend.attend, plan, tensors, window, sinks)
    wanted = outcome(dense, plan, [x.double() for x in tensors], window, sinks)
    return max(
        ((one.double() - other).abs().max() / other.abs().max().clamp_min(1)).item()
        for one, other in zip(found, wanted, strict=True)
        if other.numel()
    )


def plan_of(groups, padding=0, cached=False, device="cpu"):
    used = sum(prompt + sum(lengths) for prompt, lengths in groups)
    return SharedPromptPlan.build(groups, used + padding, device, cached)


def changed(direction, **arguments):
    """The operator of that direction with some arguments replaced, if the call has them."""
    kernel = getattr(semantics, direction)
    return lambda **named: kernel(**{**named, **{k: v for k, v in arguments.items() if k in named}})


def upper_left(direction):
    """A driver that aligns causal masks at the upper left."""
    kernel = getattr(semantics, direction)
    return lambda **named: kernel(**{**named, "sparse_mode": {3: 2}.get(named.get("sparse_mode"), 0)})


def contiguous(direction):
    """The operator of that direction, for contiguous tensors only: the page doesn't say that it takes others."""
    kernel = getattr(semantics, direction)

    def strict(**named):
        for name, value in named.items():
            require(not torch.is_tensor(value) or value.is_contiguous(), f"{name} isn't contiguous")
        return kernel(**named)

    return strict


def views(tensors):
    """q, k and v as a host hands them over, ``[T,H,D]`` views of ``[H,T,D]``, and sinks."""
    return [x.transpose(0, 1).contiguous().transpose(0, 1) for x in tensors[:3]] + tensors[3:]


def kept_bytes(run) -> tuple[int, Tensor]:
    """Bytes saved for the backward pass of what ``run`` returns, each storage once."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run()
    return sum(kept.values()), out
