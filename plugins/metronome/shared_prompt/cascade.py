"""Cascade attention on CPU: each part through the flash kernel, joined by log-sum-exp; the backward is exact.

A response token's softmax runs over two parts, the prompt and its own response. With ``(o_i, l_i)`` the
output and log-sum-exp of part i and s an optional sink of the head:

    l = log(exp l_1 + exp l_2 + exp s)        o = o_1 exp(l_1 - l) + o_2 exp(l_2 - l)

The kernel's backward computes ``p = exp(scale q k - l)`` and ``dS = p (dO v - dO o)``. Called part by part
with the *joined* o and l it therefore gives the joint softmax's gradient; the parts' own statistics aren't
kept (cascade inference is Ye et al. 2024, FlashInfer; the joined backward is ours). With a cached prompt there
are no prompt queries: a group's queries are its last S rows.

Shape suffixes: L tokens of a group, S response tokens, B responses of one length n, H query heads, N
key/value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from metronome.contracts import AttentionNeed
from metronome.shared_prompt.flash_cpu import causal, causal_backward, flash, flash_backward, join
from metronome.shared_prompt.plan import Bucket, Group, SharedPromptPlan
from metronome.shared_prompt.reference import common_refusal
from metronome.shared_prompt.sinks import add_sinks, sinks_gradient
from metronome.shared_prompt.windowed import windowed_group

_DTYPES = ("float64", "float32", "bfloat16", "float16")


class CascadeBackend:
    """Prompt once, responses to prompt without copies, responses to themselves batched by length."""

    name = "cascade"
    shares_prompt = True

    def supports(self, need: AttentionNeed) -> str | None:
        """None, or why not: CPU only, no softcapping, no dropout.

        A window shorter than the sequence is served by banded arithmetic (``windowed.py``) instead of the
        kernel: exact, slower per query-key pair, and linear in memory.
        """
        if need.device != "cpu":
            return f"the cascade backend calls a CPU kernel, this is {need.device}"
        if need.dtype not in _DTYPES:
            return f"the CPU kernel takes {', '.join(_DTYPES)}, this is {need.dtype}"
        return common_refusal(need)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: SharedPromptPlan,
        scale: float,
        *,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """``q [Q,Nq,D], k [T,Nkv,D], v [T,Nkv,Dv] -> [Q,Nq,Dv]`` in q's dtype; zeros at padding."""
        if window is None or all(group.reach <= window for group in plan.groups):
            return _joined(q, k, v, plan.groups, scale, sinks)
        padding = [] if plan.padding is None else [plan.padding.length]
        lengths = [group.end - group.prompt.start for group in plan.groups] + padding
        queries = [lengths[0] - plan.first_query, *lengths[1:]]
        parts = []
        for group, q_part, k_part, v_part in zip(
            plan.groups,
            torch.split(q, queries),
            torch.split(k, lengths),
            torch.split(v, lengths),
            strict=False,
        ):
            if group.reach <= window:
                parts.append(_joined(q_part, k_part, v_part, (group,), scale, sinks))
            else:
                parts.append(windowed_group(q_part, k_part, v_part, group, scale, window, sinks))
        if plan.padding is not None:
            parts.append(q.new_zeros(plan.padding.length, q.shape[1], v.shape[2]))
        return torch.cat(parts)


def _joined(q: Tensor, k: Tensor, v: Tensor, groups: tuple[Group, ...], scale: float, sinks: Tensor | None) -> Tensor:
    """The cascade over tokens that begin with ``groups[0]``; zeros widen heads where D and Dv differ."""
    width, value_width = q.shape[-1], v.shape[-1]
    if width < value_width:
        q, k = pad(q, (0, value_width - width)), pad(k, (0, value_width - width))
    elif value_width < width:
        v = pad(v, (0, width - value_width))
    # The kernel takes a dense last dimension for granted and reads other memory where it isn't.
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    apply: Callable[..., Tensor] = _Cascade.apply
    return apply(q, k, v, sinks, groups, scale)[..., :value_width]


class _Cascade(torch.autograd.Function):
    """Saves q, k, v, the output and one log-sum-exp a token and head."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        groups: tuple[Group, ...],
        scale: float,
    ) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        statistics = torch.float64 if q.dtype == torch.float64 else torch.float32
        lse = torch.zeros(q.shape[:2], dtype=statistics, device=q.device)
        for group, own, keys in _slices(groups, len(k) - len(q)):
            _group_forward(q[own], k[keys], v[keys], out[own], lse[own], group, scale)
        out[own.stop :] = 0  # padding
        if sinks is not None:
            out, lse = add_sinks(out, lse, sinks)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.groups, ctx.scale = groups, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        grad = grad.contiguous()
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        for group, own, keys in _slices(ctx.groups, len(k) - len(q)):
            saved = [grad[own], q[own], k[keys], v[keys], out[own], lse[own]]
            _group_backward(saved, [dq[own], dk[keys], dv[keys]], group, ctx.scale)
        dq[own.stop :], dk[keys.stop :], dv[keys.stop :] = 0, 0, 0
        dsinks = None if sinks is None else sinks_gradient(grad, out, lse, sinks)
        return dq, dk, dv, dsinks, None, None


def _slices(groups: tuple[Group, ...], cached: int) -> Iterator[tuple[Group, slice, slice]]:
    """Each group's rows of queries and of keys; ``cached`` of the first rows of keys aren't queries."""
    origin = groups[0].prompt.start
    for group in groups:
        start, end = group.prompt.start - origin, group.end - origin
        yield group, slice(start, end - cached), slice(start, end)


def _group_forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, group: Group, scale: float) -> None:
    """Fills ``out [L,H,D]`` and ``lse [L,H]`` of one group (L less the prompt if that is cached)."""
    prompt = group.prompt.length
    here = len(q) - len(k) + prompt  # queries of the prompt: all, or none
    k_prompt, v_prompt = _heads(k[:prompt]), _heads(v[:prompt])
    if here:
        o_here, l_here = _heads(out[:prompt]), _heads(lse[:prompt])
        for rows, part, l_part in causal(_heads(q[:prompt]), k_prompt, v_prompt, scale):
            o_here[:, :, rows], l_here[:, :, rows] = part, l_part
    if not group.buckets:
        return
    part, l_part = flash(_heads(q[here:]), k_prompt, v_prompt, scale)
    far, l_far = part[0].transpose(0, 1), l_part[0].transpose(0, 1)
    offset = prompt - here
    for bucket in group.buckets:
        o_far, l_one = _take(far, bucket, prompt), _take(l_far, bucket, prompt)
        o_own, l_own = _take(out, bucket, offset), _take(lse, bucket, offset)
        own = _take(q, bucket, offset), _take(k, bucket, 0), _take(v, bucket, 0)
        for rows, part, l_two in causal(*own, scale):
            o_own[:, :, rows], l_own[:, :, rows] = join(o_far[:, :, rows], l_one[:, :, rows], part, l_two)
        _put(out, o_own, bucket, offset)
        _put(lse, l_own, bucket, offset)


def _group_backward(saved: list[Tensor], grads: list[Tensor], group: Group, scale: float) -> None:
    """Fills ``dq, dk, dv`` of one group from ``grad, q, k, v, out, lse``."""
    _, q, k, _, _, _ = saved
    dq, dk, dv = grads
    prompt = group.prompt.length
    here = len(q) - len(k) + prompt
    if here:
        causal_backward([_heads(x[:prompt]) for x in saved], [_heads(x[:prompt]) for x in grads], scale)
    else:
        dk[:prompt], dv[:prompt] = 0, 0
    if not group.buckets:
        return
    offset = prompt - here
    origins = offset, offset, 0, 0, offset, offset  # of grad, q, k, v, out, lse
    for bucket in group.buckets:
        own = [_take(x, bucket, origin) for x, origin in zip(grads, origins[1:4], strict=True)]
        causal_backward([_take(x, bucket, origin) for x, origin in zip(saved, origins, strict=True)], own, scale)
        for target, part, origin in zip(grads, own, origins[1:4], strict=True):
            _put(target, part, bucket, origin)
    far = [_heads(x[:prompt] if number in (2, 3) else x[here:]) for number, x in enumerate(saved)]
    parts = flash_backward(far, scale)
    for target, part in zip((dq[here:], dk[:prompt], dv[:prompt]), parts, strict=True):
        target += part[0].transpose(0, 1)


def _heads(x: Tensor) -> Tensor:
    """``[L,H,D] -> [1,H,L,D]``, a view."""
    return x.transpose(0, 1)[None]


def _take(x: Tensor, bucket: Bucket, origin: int) -> Tensor:
    """``[L,H,D] -> [B,H,n,D]``: the responses of one bucket; a view if they stand side by side.

    The first row of ``x`` is token ``origin`` of the group.
    """
    span = bucket.span
    rows = x[bucket.index - origin] if span is None else x[span.start - origin : span.end - origin]
    return rows.reshape(-1, bucket.length, *x.shape[1:]).transpose(1, 2)


def _put(target: Tensor, part: Tensor, bucket: Bucket, origin: int) -> None:
    """Writes ``part``, which ``_take`` gave, back into ``target``, unless it is a view of it."""
    if bucket.span is None:
        target[bucket.index - origin] = part.transpose(1, 2).flatten(0, 1)
