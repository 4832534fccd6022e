"""torch's flash kernel on CPU, called so that causal parts waste little.

The kernel walks keys in blocks of 512 and, told that a part is causal, still computes every pair of a block
that it enters (torch 2.13, FlashAttentionKernel.cpp): twice the work up to 512 tokens, a fifth more at 2048.
Here a causal part is cut into chunks of 512 rows. The keys before a chunk are a rectangle without a mask. In
the chunk, blocks of 32 or 64 rows are each given the keys up to their own end, and a mask for the pairs above
their diagonal.

Shape suffixes: B sequences of one length n, H query heads, N key/value heads (the kernel takes them
unexpanded), D head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_CHUNK = 512  # rows that share one call for all keys before them
_BLOCKS = 8  # blocks of rows a chunk: more waste fewer pairs and add up more gradients of keys
_STEP = 32  # a block's rows are a multiple of it


def flash(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None, is_causal: bool = False
) -> tuple[Tensor, Tensor]:
    """``q [B,H,S,D], k, v [B,N,M,D]``: the output ``[B,H,S,D]`` and log-sum-exp ``[B,H,S]``; ``mask [S,M]`` adds."""
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = forward(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)
    return out, lse


def flash_backward(
    saved: Sequence[Tensor], scale: float, mask: Tensor | None = None, is_causal: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """``dq, dk, dv`` from ``grad, q, k, v, out, lse``, which may be those of a softmax over more keys.

    ``p = exp(scale q k + mask - lse)`` and ``dS = p (dO v - dO o)``, whatever lse and o are.
    """
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    dq, dk, dv = backward(*saved, 0.0, is_causal, attn_mask=mask, scale=scale)
    return dq, dk, dv


def join(one: Tensor, l_one: Tensor, two: Tensor, l_two: Tensor) -> tuple[Tensor, Tensor]:
    """The softmax over two sets of keys from those over each: ``[..,D]`` and ``[..]``, in the statistics' dtype."""
    total = torch.logaddexp(l_one, l_two)
    joined = one * torch.exp(l_one - total)[..., None]
    return joined.addcmul_(two.to(total.dtype), torch.exp(l_two - total)[..., None]), total


def causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """``q [B,H,n,D], k, v [B,N,n,D]``: rows, their output ``[B,H,rows,D]`` and their log-sum-exp, block by block."""
    for start, end in _chunks(q.shape[2]):
        before = slice(start)
        if start:
            far, l_far = flash(q[:, :, start:end], k[:, :, before], v[:, :, before], scale)
        for rows, mask in _blocks(end - start, q):
            keys = slice(start, start + rows.stop)
            place = slice(start + rows.start, start + rows.stop)
            out, lse = flash(q[:, :, place], k[:, :, keys], v[:, :, keys], scale, mask, is_causal=mask is None)
            yield place, *(join(far[:, :, rows], l_far[:, :, rows], out, lse) if start else (out, lse))


def causal_backward(saved: Sequence[Tensor], grads: Sequence[Tensor], scale: float) -> None:
    """Overwrites ``dq [B,H,n,D], dk, dv [B,N,n,D]`` from ``grad, q, k, v, out, lse``."""
    for start, end in _chunks(saved[1].shape[2]):
        blocks = list(_blocks(end - start, saved[1]))
        for rows, mask in reversed(blocks):  # the last block of rows reads every key of the chunk
            place, keys = slice(start + rows.start, start + rows.stop), slice(start, start + rows.stop)
            parts = flash_backward(_cut(saved, place, keys), scale, mask, is_causal=mask is None)
            grads[0][:, :, place] = parts[0]
            for target, part in zip(grads[1:], parts[1:], strict=True):
                if rows.stop == end - start:
                    target[:, :, keys] = part
                else:
                    target[:, :, keys] += part
        if start:
            rows, keys = slice(start, end), slice(start)
            parts = flash_backward(_cut(saved, rows, keys), scale)
            for target, part, place in zip(grads, parts, (rows, keys, keys), strict=True):
                target[:, :, place] += part


def _cut(saved: Sequence[Tensor], rows: slice, keys: slice) -> list[Tensor]:
    grad, q, k, v, out, lse = saved
    return [grad[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys], out[:, :, rows], lse[:, :, rows]]


def _chunks(length: int) -> Iterator[tuple[int, int]]:
    for start in range(0, length, _CHUNK):
        yield start, min(start + _CHUNK, length)


def _blocks(length: int, like: Tensor) -> Iterator[tuple[slice, Tensor | None]]:
    """Rows of each block of a chunk, and its mask ``[rows, keys up to the block's end]``, cut from one tensor.

    None for a single block: the kernel's own causal mask costs less to make.
    """
    rows = -(-length // _BLOCKS // _STEP) * _STEP
    if length <= rows:
        yield slice(0, length), None
        return
    before = (length - 1) // rows * rows  # keys before the last block
    mask = torch.zeros(rows, before + rows, dtype=like.dtype, device=like.device)
    mask[:, before:].fill_(-torch.inf).triu_(1)
    for start in range(0, length, rows):
        end = min(start + rows, length)
        yield slice(start, end), mask[: end - start, before - start : before - start + end]
