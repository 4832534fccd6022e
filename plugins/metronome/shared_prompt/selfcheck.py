"""The first-use check at real lengths: a backend against arithmetic, the model against separate rows."""

from __future__ import annotations

import torch
from torch import Tensor

from metronome.contracts import AttentionBackend
from metronome.errors import EqualityViolated
from metronome.shared_prompt.interface import Signature
from metronome.shared_prompt.plan import SharedPromptPlan
from metronome.shared_prompt.reference import allowed, masked_attention

_SCORE_BYTES = 256 * 2**20  # float64 scores held by the arithmetic at once
_ATTENTION_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
_ATTENTION_TOLERANCE_HALF = 3e-2
_LOG_PROB_TOLERANCE = {torch.float64: 3e-6, torch.float32: 1e-3}
_LOG_PROB_TOLERANCE_HALF = 0.5


@torch.inference_mode(False)  # gradients are compared even if the caller wants none
def check_attention(
    backend: AttentionBackend, plan: SharedPromptPlan, layer: Signature, device: torch.device, seed: int = 0
) -> None:
    """Holds ``backend`` against float64 arithmetic on random inputs of this layer's shapes and row's layout.

    Outputs and gradients of q, k, v and sinks are compared for a sample of query rows: the first and last of
    every segment, and others at random. The loss reads only those rows, so the arithmetic needs no ``[T,T]``
    scores and the comparison of gradients is complete.

    Raises EqualityViolated naming the tensor that differs and by how much.
    """
    draw = torch.Generator().manual_seed(seed)
    shapes: list[tuple[int, ...]] = [
        (plan.queries, layer.heads, layer.head_dim),
        (plan.tokens, layer.kv_heads, layer.head_dim),
        (plan.tokens, layer.kv_heads, layer.value_dim),
    ]
    if layer.sinks:
        shapes.append((layer.heads,))
    inputs = [torch.randn(shape, generator=draw).to(device, layer.dtype) for shape in shapes]
    rows = _sample(plan, layer.heads, draw).to(device)
    weights = torch.randn(len(rows), layer.heads, layer.value_dim, generator=draw).to(device, layer.dtype)
    mask = allowed(plan, layer.window, rows)

    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        ours = [x.clone().requires_grad_() for x in inputs]
        q, k, v = ours[:3]
        sinks = ours[3] if layer.sinks else None
        out = backend.attend(q, k, v, plan, layer.scale, window=layer.window, sinks=sinks)[rows]
        found = [out, *torch.autograd.grad(out, ours, weights, allow_unused=True)]
        exact = [x.double().requires_grad_() for x in inputs]
        sinks = exact[3] if layer.sinks else None
        out = masked_attention(exact[0][rows], exact[1], exact[2], mask, layer.scale, sinks)
        wanted = [out, *torch.autograd.grad(out, exact, weights.double())]
    tolerance = _ATTENTION_TOLERANCE.get(layer.dtype, _ATTENTION_TOLERANCE_HALF)
    names = (
        "the output",
        "the gradient of q",
        "the gradient of k",
        "the gradient of v",
        "the gradient of sinks",
    )
    for name, one, other in zip(names, found, wanted, strict=False):
        if one is None:
            raise _violated(backend, f"{name} is missing", None, plan, layer)
        difference = ((one.double() - other).abs().max() / other.abs().max().clamp_min(1e-30)).item()
        if not difference <= tolerance:  # a NaN is a difference too
            raise _violated(backend, f"{name} differs, relative to its largest value", difference, plan, layer)


def check_log_probs(shared: Tensor, separate: Tensor, dtype: torch.dtype, tolerance: float | None) -> None:
    """Holds the model's log-probs from the shared row against those from separate rows.

    Compared is ``|a - b| / (1 + |b|)``: the rounding of logits grows with their size, and an unlikely token's
    log-prob in half precision is uncertain by tenths.

    Args:
        shared, separate: ``[N]``, nats.
        dtype: the model's, which sets the default tolerance.
        tolerance: largest relative difference that passes, and ten times the mean that passes; None: by dtype.

    Raises EqualityViolated with both figures and the first token that is off.
    """
    if tolerance is None:
        tolerance = _LOG_PROB_TOLERANCE.get(dtype, _LOG_PROB_TOLERANCE_HALF)
    difference = (shared.double() - separate.double()).abs() / (1 + separate.double().abs())
    largest, mean = difference.max().item(), difference.mean().item()
    if not (largest <= tolerance and mean <= tolerance / 10):
        place = int((~(difference <= tolerance)).nonzero()[0]) if not largest <= tolerance else 0
        raise EqualityViolated(
            "log-probs from the shared row differ from those of separate rows, relative to 1 + |log p|",
            found=f"largest {largest:.2e}, mean {mean:.2e}, tolerance {tolerance:.0e}, token {place} first",
            where="first use of attention: shared_prompt",
            remedy="attention: host; for mere rounding, raise metronome.shared_prompt.self_check_tolerance",
        )


def _sample(plan: SharedPromptPlan, heads: int, draw: torch.Generator) -> Tensor:
    ends = []
    for group in plan.groups:
        for segment in group.responses if plan.first_query else (group.prompt, *group.responses):
            if segment.length:
                ends += [segment.start - plan.first_query, segment.end - 1 - plan.first_query]
    budget = max(16, _SCORE_BYTES // (8 * heads * plan.tokens))
    others = torch.randperm(plan.tokens_shared - plan.first_query, generator=draw)
    fixed = torch.tensor(ends)
    if len(fixed) > budget:  # hundreds of responses: some of their ends
        fixed = fixed[torch.randperm(len(fixed), generator=draw)[:budget]]
    rows: Tensor = torch.unique(torch.cat([fixed, others[: budget - len(fixed)]]))
    return rows


def _violated(
    backend: AttentionBackend, what: str, difference: float | None, plan: SharedPromptPlan, layer: Signature
) -> EqualityViolated:
    window = "" if layer.window is None else f", window {layer.window}"
    return EqualityViolated(
        f"attention backend {backend.name!r} isn't shared-prompt attention: {what}",
        found=None if difference is None else f"{difference:.2e}",
        where=f"first use, {plan.tokens} tokens, {layer.heads}/{layer.kv_heads} heads{window}, {layer.dtype}",
        remedy="metronome.shared_prompt.backend: reference, or attention: host",
    )
