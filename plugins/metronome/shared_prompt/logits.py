"""Log-probs of response tokens from hidden states, without a ``[tokens, vocabulary]`` copy of the logits.

``log p(token) = logit[token] - logsumexp(logits)``: gathered from rows that stand once each, a block of rows
at a time. Shape suffixes: U distinct label rows, N response tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from metronome.shared_prompt.plan import SharedPromptPlan

_BLOCK_BYTES = 128 * 2**20  # logits held at once


def head_of(base: Any, config: Any) -> Callable[[Tensor], Tensor]:
    """``hidden [U,d] -> logits [U,V]`` in float32 (float64 for float64 inputs).

    Honours ``logits_scaling`` (Granite: divides), ``logit_scale`` (Cohere: multiplies) and
    ``final_logit_softcapping`` c (Gemma: ``c tanh(logits / c)``).
    """
    linear = base.get_output_embeddings()
    factor = float(getattr(config, "logit_scale", None) or 1.0)
    factor /= float(getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)

    def head(hidden: Tensor) -> Tensor:
        logits: Tensor = linear(hidden)
        if logits.dtype != torch.float64:
            logits = logits.float()
        if factor != 1.0:
            logits = logits * factor
        if cap:
            logits = torch.tanh(logits / cap) * cap
        return logits

    return head


def response_log_probs(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    tokens: Tensor,
    plan: SharedPromptPlan,
    vocabulary: int,
    temperature: float = 1.0,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of each response token, and if asked the entropy of the distribution that it was drawn from.

    With more than one block of rows the logits are computed again in the backward pass instead of being kept.

    Args:
        hidden: ``[T,d]``, the decoder's last hidden states.
        head: from ``head_of``.
        tokens: int64 ``[N]``, the response tokens in packed order.
        plan: the row's layout.
        vocabulary: V, to size the blocks.
        temperature: divides the logits.
        entropy: whether entropies (nats, with gradient) are computed.

    Returns two ``[N]`` tensors, the second None without ``entropy``.
    """
    rows_Ud = hidden[plan.unique_label_rows]
    return row_log_probs(rows_Ud, head, tokens, plan, vocabulary, temperature, entropy)


def row_log_probs(
    rows_Ud: Tensor,
    head: Callable[[Tensor], Tensor],
    tokens: Tensor,
    plan: SharedPromptPlan,
    vocabulary: int,
    temperature: float = 1.0,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """``response_log_probs`` from rows that are picked already: ``[U,d]``, in the order of ``unique_label_rows``."""
    if plan.response_tokens == 0:
        empty = rows_Ud.to(torch.promote_types(rows_Ud.dtype, torch.float32)).sum(
            -1
        )  # keeps the graph, so that backward() of an empty row works
        return empty, empty if entropy else None
    tokens_sorted = tokens[plan.label_order]
    row_sorted = plan.label_inverse[plan.label_order]
    bounds, unique = plan.label_bounds, len(plan.label_bounds) - 1
    block = max(1, _BLOCK_BYTES // (vocabulary * (8 if rows_Ud.dtype == torch.float64 else 4)))
    keep = unique <= block or not torch.is_grad_enabled()
    parts: list[tuple[Tensor, Tensor | None]] = []
    for start in range(0, unique, block):
        end = min(start + block, unique)
        own = slice(int(bounds[start]), int(bounds[end]))
        arguments = (
            rows_Ud[start:end],
            head,
            tokens_sorted[own],
            row_sorted[own] - start,
            temperature,
            entropy,
        )
        if keep:
            parts.append(_block(*arguments))
        else:
            parts.append(checkpoint(_block, *arguments, use_reentrant=False, preserve_rng_state=False))
    back = torch.argsort(plan.label_order)
    log_probs = torch.cat([part[0] for part in parts])[back]
    entropies = [part[1] for part in parts if part[1] is not None]
    return log_probs, torch.cat(entropies)[back] if entropies else None


def _block(
    rows: Tensor,
    head: Callable[[Tensor], Tensor],
    tokens: Tensor,
    row: Tensor,
    temperature: float,
    entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    logits = head(rows)
    if temperature != 1.0:
        logits = logits / temperature
    if not entropy:
        pick: Callable[..., Tensor] = _Picked.apply
        return pick(logits, row, tokens), None
    total = torch.logsumexp(logits, dim=-1)
    log_probs = logits[row, tokens] - total[row]
    mean = (torch.softmax(logits, dim=-1) * logits).sum(-1)
    return log_probs, (total - mean)[row]


class _Picked(torch.autograd.Function):
    """``logits[row, token] - logsumexp(logits[row])`` with one ``[U,V]`` tensor in the backward, not three.

    ``d logits[u] = sum_n g_n (onehot(token_n) - softmax(logits[u]))`` over the tokens n that row u predicts.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, row: Tensor, tokens: Tensor) -> Tensor:
        total = torch.logsumexp(logits, dim=-1)
        ctx.save_for_backward(logits, row, tokens, total)
        return logits[row, tokens] - total[row]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, row, tokens, total = ctx.saved_tensors
        found = torch.sub(logits, total[:, None]).exp_()
        found.mul_(torch.zeros_like(total).index_add_(0, row, grad).neg_()[:, None])
        found.index_put_((row, tokens), grad, accumulate=True)
        return found, None, None
