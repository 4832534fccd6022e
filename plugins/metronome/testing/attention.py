"""Contract test of an attention backend: call ``check_attention_backend`` from your own test suite."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from metronome.contracts import AttentionBackend, AttentionNeed
from metronome.shared_prompt.plan import Group, SharedPromptPlan

PLANS: dict[str, tuple[Sequence[tuple[int, Sequence[int]]], int | None, bool]] = {
    "equal responses": ([(9, [4, 4, 4])], None, False),
    "uneven responses": ([(13, [5, 1, 7, 5, 2])], None, False),
    "one response": ([(6, [8])], None, False),
    "an empty response": ([(5, [3, 0, 3])], None, False),
    "nothing but empty responses": ([(5, [0, 0])], None, False),
    "a prompt of one token": ([(1, [3, 2])], None, False),
    "several groups": ([(7, [3, 3]), (2, [4, 1, 4]), (11, [2])], None, False),
    "several groups and padding": ([(8, [3, 5]), (4, [6, 6])], 41, False),
    "a cached prompt": ([(9, [4, 0, 2, 4])], None, True),
    "a cached prompt and padding": ([(3, [4, 4])], 16, True),
}
"""The layouts that a backend is tried on: ``(groups, pad_to, cached_prompt)``."""

_TOLERANCE = {"float64": 1e-11, "float32": 2e-5, "bfloat16": 5e-2, "float16": 1e-2}


def check_attention_backend(
    backend: AttentionBackend,
    device: str = "cpu",
    dtypes: Sequence[str] = ("float64", "float32", "bfloat16"),
    head_dim: int = 8,
    value_dims: Sequence[int] = (8, 4),
) -> None:
    """Holds a backend against dense float64 arithmetic, outputs and gradients, on every layout of ``PLANS``.

    Query heads share key/value heads (6 over 2); windows and sinks are tried where ``supports`` takes them; a
    need that isn't supported must be refused with a sentence. A repeated call, and a second backward pass through
    the same graph, must give the same bits.

    Args:
        backend: the plug-in's object.
        device: where the tensors live.
        dtypes: the dtypes to try; those that ``supports`` refuses are left out, and one must remain.
        head_dim, value_dims: head widths to try.

    Raises AssertionError with a sentence.
    """
    assert isinstance(backend, AttentionBackend), f"{backend!r} lacks a member of AttentionBackend"
    assert backend.name, "a backend needs a name"
    assert backend.shares_prompt is True, f"{backend.name} says that it doesn't share prompts"
    for softcap, dropout in ((True, 0.0), (False, 0.1)):
        need = AttentionNeed(device, "float32", head_dim, head_dim, 6, 2, softcap=softcap, dropout=dropout)
        reason = backend.supports(need)
        assert isinstance(reason, str), (
            f"{backend.name} takes softcap {softcap} and dropout {dropout}, which attend() can't be told"
        )
        assert reason.strip(), f"{backend.name} refuses softcap {softcap}, dropout {dropout} without a reason"
    tried = 0
    for dtype in dtypes:
        for value_dim in value_dims:
            for window, sinks in ((None, False), (4, False), (64, False), (None, True), (4, True)):
                for title, (groups, pad_to, cached) in PLANS.items():
                    need = AttentionNeed(
                        device, dtype, head_dim, value_dim, 6, 2, window is not None, sinks, cached_prompt=cached
                    )
                    if backend.supports(need) is None:
                        tried += 1
                        plan = SharedPromptPlan.build(groups, pad_to, device, cached)
                        _check_case(backend, plan, need, window, title)
    assert tried, f"{backend.name} supports none of {', '.join(dtypes)} on {device}"


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: SharedPromptPlan,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The oracle: every query row on its own, with the keys that a separate row would hold, no mask at all.

    ``q [Q,Nq,D], k [T,Nkv,D], v [T,Nkv,Dv] -> [Q,Nq,Dv]``; padding rows are zero. Key/value heads are
    repeated.
    """
    repeat = q.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    rows: list[Tensor] = []
    for group in plan.groups:
        for visible in _visible_keys(group):
            visible = visible[-window:] if window is not None else visible
            index = torch.tensor(visible, device=q.device)
            if visible[-1] < plan.first_query:
                continue
            scores = torch.einsum("hd,mhd->hm", q[visible[-1] - plan.first_query], keys[index]) * scale
            if sinks is not None:
                scores = torch.cat([scores, sinks[:, None]], dim=1)
            weights = torch.softmax(scores, dim=1)[:, : len(visible)]
            rows.append(torch.einsum("hm,mhv->hv", weights, values[index]))
    out = torch.stack(rows)
    return torch.cat([out, out.new_zeros(plan.queries - len(rows), *out.shape[1:])])


def _visible_keys(group: Group) -> list[list[int]]:
    """For each token of the group, the packed positions it sees, in a separate row's order, itself last."""
    prompt = list(range(group.prompt.start, group.prompt.end))
    visible = [prompt[: index + 1] for index in range(len(prompt))]
    for response in group.responses:
        own = list(range(response.start, response.end))
        visible += [prompt + own[: index + 1] for index in range(len(own))]
    return visible


def _check_case(
    backend: AttentionBackend, plan: SharedPromptPlan, need: AttentionNeed, window: int | None, title: str
) -> None:
    dtype = getattr(torch, need.dtype)
    case = f"{backend.name}: {title}, {need.dtype}, Dv {need.value_dim}, window {window}, sinks {need.sinks}"
    draw = torch.Generator().manual_seed(plan.tokens)
    shapes: list[tuple[int, ...]] = [
        (plan.queries, need.heads, need.head_dim),
        (plan.tokens, need.kv_heads, need.head_dim),
        (plan.tokens, need.kv_heads, need.value_dim),
    ]
    if need.sinks:
        shapes.append((need.heads,))
    inputs = [torch.randn(shape, generator=draw).to(need.device, dtype) for shape in shapes]
    inputs[:3] = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in inputs[:3]]  # as models hand them over
    weights = torch.randn(plan.queries, need.heads, need.value_dim, generator=draw).to(need.device, dtype)
    real = plan.tokens_shared - plan.first_query  # the rest is padding
    weights[real:] = 0
    scale = 0.4  # nobody's default

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        sinks = leaves[3] if need.sinks else None
        q, k, v = leaves[:3]
        out = backend.attend(q, k, v, plan, scale, window=window, sinks=sinks)
        assert out.shape == weights.shape, f"{case}: the output is {tuple(out.shape)}, not {tuple(weights.shape)}"
        assert out.dtype == dtype, f"{case}: the output is {out.dtype}"
        assert bool(torch.isfinite(out).all()), f"{case}: the output isn't finite"
        gradients = torch.autograd.grad(out, leaves, weights, retain_graph=True, allow_unused=True)
        again = torch.autograd.grad(out, leaves, weights, allow_unused=True)
        for name, gradient, second, leaf in zip("qkvs", gradients, again, leaves, strict=False):
            assert gradient is not None, f"{case}: no gradient reaches {name}"
            assert second is not None, f"{case}: no gradient reaches {name} in a second backward"
            assert torch.equal(gradient, second), f"{case}: a second backward differs in {name}"
            assert gradient.dtype == leaf.dtype, f"{case}: the gradient of {name} is {gradient.dtype}"
            assert bool(torch.isfinite(gradient).all()), f"{case}: the gradient of {name} isn't finite"
        return [out.detach()[:real], *(g for g in gradients if g is not None)]

    exact = [x.double().requires_grad_() for x in inputs]
    out = dense_attention(exact[0], exact[1], exact[2], plan, scale, window, exact[3] if need.sinks else None)
    wanted = [out.detach()[:real], *torch.autograd.grad(out, exact, weights.double())]
    found = run(inputs)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs[:3]] + inputs[3:]
    for view, results in (("", found), (", last dimension strided", run(strided))):
        for name, one, other in zip(("output", "dq", "dk", "dv", "dsinks"), results, wanted, strict=False):
            difference = ((one.double() - other).abs().max() / other.abs().max().clamp_min(1e-6)).item()
            tolerance = _TOLERANCE[need.dtype]
            assert difference <= tolerance, f"{case}{view}: {name} is off by {difference:.1e} of its largest value"
    for one, other in zip(found, run(inputs), strict=True):
        assert torch.equal(one, other), f"{case}: two calls give different bits"
