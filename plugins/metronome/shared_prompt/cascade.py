"""Cascade attention on CPU: each part through the flash kernel, joined by log-sum-exp; the backward is exact.

A response token's softmax runs over two parts, the prompt and its own response. With ``(o_i, l_i)`` the
output and log-sum-exp of part i and s an optional sink of the head:

    l = log(exp l_1 + exp l_2 + exp s)        o = o_1 exp(l_1 - l) + o_2 exp(l_2 - l)

The kernel's backward computes ``p = exp(scale q k - l)`` and ``dS = p (dO v - dO o)``. Called part by part
with the *joined* o and l it therefore gives the joint softmax's gradient; the parts' own statistics aren't
kept (cascade inference is Ye et al. 2024, FlashInfer; the joined backward is ours). A sink's gradient is
``-sum exp(s - l) (dO o)``.

Shape suffixes: L tokens of a group, S response tokens, B responses of one length n, N key/value heads, G
query heads a key/value head, H query heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from metronome.contracts import AttentionNeed
from metronome.shared_prompt.plan import Bucket, Group, SharedPromptPlan
from metronome.shared_prompt.reference import common_refusal
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
        """``q [T,Nq,D], k [T,Nkv,D], v [T,Nkv,Dv] -> [T,Nq,Dv]`` in q's dtype; zeros at padding."""
        if window is None or all(group.reach <= window for group in plan.groups):
            return _joined(q, k, v, plan.groups, scale, sinks)
        lengths = [group.end - group.prompt.start for group in plan.groups]
        if plan.padding is not None:
            lengths.append(plan.padding.length)
        parts = []
        for group, q_part, k_part, v_part in zip(
            plan.groups,
            torch.split(q, lengths),
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
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        statistics = torch.float64 if q.dtype == torch.float64 else torch.float32
        lse = torch.zeros(q.shape[:2], dtype=statistics, device=q.device)
        origin = groups[0].prompt.start
        for group in groups:
            own = slice(group.prompt.start - origin, group.end - origin)
            _group_forward(q[own], k[own], v[own], out[own], lse[own], group, scale)
        if sinks is not None:
            total = torch.logaddexp(lse, sinks.to(statistics))
            out *= torch.exp(lse - total)[..., None].to(out.dtype)
            lse = total
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.groups, ctx.scale = groups, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        grad = grad.contiguous()
        dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        origin = ctx.groups[0].prompt.start
        for group in ctx.groups:
            own = slice(group.prompt.start - origin, group.end - origin)
            saved = [x[own] for x in (grad, q, k, v, out, lse)]
            _group_backward(saved, [x[own] for x in (dq, dk, dv)], group, ctx.scale)
        dsinks = None
        if sinks is not None:
            dot = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
            dsinks = -(torch.exp(sinks.to(lse.dtype) - lse) * dot).sum(0).to(sinks.dtype)
        return dq, dk, dv, dsinks, None, None


def _group_forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, group: Group, scale: float) -> None:
    """Fills ``out [L,H,D]`` and ``lse [L,H]`` of one group."""
    prompt, kv_heads = group.prompt.length, k.shape[1]
    k_prompt, v_prompt = _heads(k[:prompt]), _heads(v[:prompt])
    part, l_part = _flash(_heads(q[:prompt]), k_prompt, v_prompt, True, scale)
    out[:prompt], lse[:prompt] = part[0].transpose(0, 1), l_part[0].transpose(0, 1)
    if not group.buckets:
        return
    part, l_part = _flash(_fold(q[prompt:], kv_heads), k_prompt, v_prompt, False, scale)
    o_far, l_far = _unfold(part, q.shape[1]), _unfold(l_part[..., None], q.shape[1])[..., 0]
    o_own, l_own = torch.empty_like(o_far), torch.empty_like(l_far)
    for bucket in group.buckets:
        part, l_part = _flash(_take(q, bucket), _take(k, bucket), _take(v, bucket), True, scale)
        _put(o_own, part, bucket, prompt)
        _put(l_own[..., None], l_part[..., None], bucket, prompt)
    total = torch.logaddexp(l_far, l_own)
    joined = o_far.to(total.dtype) * torch.exp(l_far - total)[..., None]
    joined += o_own.to(total.dtype) * torch.exp(l_own - total)[..., None]
    out[prompt:], lse[prompt:] = joined.to(out.dtype), total


def _group_backward(saved: list[Tensor], grads: list[Tensor], group: Group, scale: float) -> None:
    """Fills ``dq, dk, dv`` of one group from ``grad, q, k, v, out, lse``."""
    grad, q, k, v, out, lse = saved
    dq, dk, dv = grads
    prompt, kv_heads, heads = group.prompt.length, k.shape[1], q.shape[1]
    k_prompt, v_prompt = _heads(k[:prompt]), _heads(v[:prompt])
    here = [_heads(x[:prompt]) for x in (grad, q, out)]
    l_here = lse[:prompt].transpose(0, 1)[None]
    parts = _flash_backward(here[0], here[1], k_prompt, v_prompt, here[2], l_here, True, scale)
    for target, part in zip(grads, parts, strict=True):
        target[:prompt] = part[0].transpose(0, 1)
    if not group.buckets:
        return
    far = [_fold(x[prompt:], kv_heads) for x in (grad, q, out)]
    l_far = _fold(lse[prompt:, :, None], kv_heads)[..., 0]
    dq_far, dk_far, dv_far = _flash_backward(far[0], far[1], k_prompt, v_prompt, far[2], l_far, False, scale)
    dk[:prompt] += dk_far[0].transpose(0, 1)
    dv[:prompt] += dv_far[0].transpose(0, 1)
    for bucket in group.buckets:
        g_own, q_own, k_own, v_own, o_own = (_take(x, bucket) for x in (grad, q, k, v, out))
        l_own = _take(lse[..., None], bucket)[..., 0]
        parts = _flash_backward(g_own, q_own, k_own, v_own, o_own, l_own, True, scale)
        for target, part in zip(grads, parts, strict=True):
            _put(target, part, bucket, 0)
    dq[prompt:] += _unfold(dq_far, heads)


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return out, lse


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    dq, dk, dv = backward(grad, q, k, v, out, lse, 0.0, causal, scale=scale)
    return dq, dk, dv


def _heads(x: Tensor) -> Tensor:
    """``[L,H,D] -> [1,H,L,D]``, a view."""
    return x.transpose(0, 1)[None]


def _fold(x: Tensor, kv_heads: int) -> Tensor:
    """``[S,H,D] -> [1,N,G S,D]``: query heads that share a key/value head stand one behind the other."""
    x_SNGD = x.reshape(x.shape[0], kv_heads, -1, x.shape[-1])
    return x_SNGD.permute(1, 2, 0, 3).reshape(1, kv_heads, -1, x.shape[-1])


def _unfold(x: Tensor, heads: int) -> Tensor:
    """``[1,N,G S,D] -> [S,H,D]``: undoes ``_fold``."""
    kv_heads, width = x.shape[1], x.shape[-1]
    x_NGSD = x.reshape(kv_heads, heads // kv_heads, -1, width)
    return x_NGSD.permute(2, 0, 1, 3).reshape(-1, heads, width)


def _take(x: Tensor, bucket: Bucket) -> Tensor:
    """``[L,H,D] -> [B,H,n,D]``: the responses of one bucket; a view if they stand side by side."""
    span = bucket.span
    rows = x[bucket.index] if span is None else x[span.start : span.end]
    return rows.reshape(-1, bucket.length, *x.shape[1:]).transpose(1, 2)


def _put(target: Tensor, part: Tensor, bucket: Bucket, offset: int) -> None:
    """Writes ``part [B,H,n,D]`` into ``target``, whose first row is token ``offset`` of the group."""
    rows, span = part.transpose(1, 2).flatten(0, 1), bucket.span
    if span is None:
        target[bucket.index - offset] = rows
    else:
        target[span.start - offset : span.end - offset] = rows
