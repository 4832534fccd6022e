"""Dense-mask attention in plain arithmetic: for every device and dtype; others are held against it.

Shape suffixes: T packed tokens, R query rows, M keys, N key/value heads, G query heads a key/value head, D
head width, V value width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from metronome.contracts import AttentionNeed
from metronome.shared_prompt.plan import SharedPromptPlan


def allowed(plan: SharedPromptPlan, window: int | None = None, rows: Tensor | None = None) -> Tensor:
    """Which keys each query row may see, bool ``[R, T]``; rows of queries count from the plan's first query.

    ``j <= i``, same group, and j in the prompt or in i's own response. A window w adds
    ``position_i - position_j < w``, measured over *position ids*: over packed indices a response would lose
    its prompt to its siblings. Padding sees padding only.

    Args:
        plan: the row's layout.
        window: w in tokens, the query itself included; None: no limit.
        rows: int64 ``[R]`` query rows; None: all Q.
    """
    group, segment = plan.segment_ids
    positions = plan.key_positions
    index = torch.arange(plan.tokens, device=plan.device)
    queries = index[plan.first_query :] if rows is None else rows + plan.first_query
    mask = queries[:, None] >= index
    mask &= group[queries, None] == group
    mask &= (segment == 0) | (segment[queries, None] == segment)
    if window is not None:
        mask &= positions[queries, None] - positions < window
    return mask


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """``softmax(scale q k^T + mask) v`` with grouped key/value heads left unexpanded.

    A sink s of a head adds ``exp(s)`` once to the denominator. Half-precision inputs are computed in float32.

    Args:
        q: ``[..., R, Nq, D]``.
        k: ``[..., M, Nkv, D]``.
        v: ``[..., M, Nkv, Dv]``.
        mask: bool, broadcastable to ``[..., 1, 1, R, M]`` as ``[R, M]``.
        scale: factor of the scores.
        sinks: ``[Nq]`` or None.

    Returns ``[..., R, Nq, Dv]`` in q's dtype.
    """
    dtype = torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else q.dtype
    heads, kv_heads = q.shape[-2], k.shape[-2]
    q_RNGD = q.to(dtype).reshape(*q.shape[:-2], kv_heads, heads // kv_heads, q.shape[-1])
    scores_NGRM = torch.einsum("...rngd,...mnd->...ngrm", q_RNGD, k.to(dtype)) * scale
    scores_NGRM = scores_NGRM.masked_fill(~mask, -torch.inf)
    peak = scores_NGRM.detach().amax(-1, keepdim=True)
    if sinks is not None:
        sink_NG11 = sinks.to(dtype).reshape(kv_heads, heads // kv_heads, 1, 1)
        peak = torch.maximum(peak, sink_NG11.detach())
    weights_NGRM = torch.exp(scores_NGRM - peak)
    total = weights_NGRM.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sink_NG11 - peak)
    out_RNGV = torch.einsum("...ngrm,...mnv->...rngv", weights_NGRM / total, v.to(dtype))
    return out_RNGV.reshape(*q.shape[:-1], v.shape[-1]).to(q.dtype)


class ReferenceBackend:
    """Attention through a dense ``[T, T]`` mask: memory grows with T squared."""

    name = "reference"
    shares_prompt = True

    def supports(self, need: AttentionNeed) -> str | None:
        """None, or why not: softcapping and dropout aren't computed, heads must divide."""
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
        """``q [Q,Nq,D], k [T,Nkv,D], v [T,Nkv,Dv] -> [Q,Nq,Dv]`` in q's dtype."""
        return masked_attention(q, k, v, allowed(plan, window), scale, sinks)


def common_refusal(need: AttentionNeed) -> str | None:
    """Why no backend of ours can serve ``need``, or None."""
    if need.softcap:
        return "attention logit softcapping isn't part of attend() and would be dropped"
    if need.dropout:
        return f"attention dropout ({need.dropout}) draws one mask for the prompt instead of K"
    if need.heads % need.kv_heads:
        return f"{need.heads} query heads don't divide among {need.kv_heads} key/value heads"
    return None
