"""CUDA: FlexAttention with a block mask that is written down from the plan instead of searched for in a T x T mask.

The keys that one query sees are two runs: a stretch of its group's prompt and a stretch of its own segment. A
window over *positions* shortens both from the left. These bounds say of every pair of blocks whether all, some or
none of its pairs are seen, and inside a partly seen block they are the mask.

Not run on a card here. FlexAttention has no backward on CPU (torch 2.13 raises NotImplementedError), so here the
mask is proven equal to the reference's block by block, and the forward is compared in eager mode.

Shape suffixes: Q query rows, T keys, A query blocks, B key blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from metronome.contracts import AttentionNeed
from metronome.shared_prompt.plan import SharedPromptPlan
from metronome.shared_prompt.reference import common_refusal
from metronome.shared_prompt.sinks import add_sinks

BLOCK = 128
"""Tokens of a block; torch's default, which its tile sizes divide."""

_NARROWEST_HEAD = 16  # torch/_inductor/kernel/flex/flex_attention.py: tl.dot takes no less
_RECOMPILE_LIMIT = 64  # kinds of layers (heads, widths, sinks) and of rows (one block or several) in one process


class FlexBackend:
    """Blocks that no query sees are skipped, blocks that all see need no mask; nothing is gathered or copied.

    Args:
        device: the kind of device that it serves.
        block: tokens of a block.
    """

    name = "flex"
    shares_prompt = True

    def __init__(self, device: str = "cuda", block: int = BLOCK) -> None:
        self._device, self._block = device, block

    def supports(self, need: AttentionNeed) -> str | None:
        """None, or why not: device, dtype, narrow heads."""
        if need.device != self._device:
            no_backward = " (on CPU it has no backward)" if need.device == "cpu" else ""
            return f"FlexAttention is used on {self._device}, this is {need.device}{no_backward}"
        if need.dtype not in ("float32", "bfloat16", "float16"):
            return f"FlexAttention's kernel computes in float32 at most, this is {need.dtype}"
        narrowest = min(need.head_dim, need.value_dim)
        if need.device == "cuda" and narrowest < _NARROWEST_HEAD:
            return f"FlexAttention's heads are at least {_NARROWEST_HEAD} wide, this is {narrowest}"
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
        """``q [Q,Nq,D], k [T,Nkv,D], v [T,Nkv,Dv] -> [Q,Nq,Dv]`` in q's dtype; padding attends to itself."""
        if not plan.queries:  # a cached prompt with nothing but empty responses: no block to compute
            nothing = sum(x[:0].sum() for x in (k, v, sinks) if x is not None)
            return q.sum(-1, keepdim=True).expand(-1, -1, v.shape[-1]) + nothing
        run: Callable[..., Any] = flex_attention
        if q.device.type == "cuda":
            run = _compiled()
        found = run(
            *(x.transpose(0, 1)[None] for x in (q, k, v)),
            block_mask=block_mask(plan, window, self._block),
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
            return_aux=None if sinks is None else AuxRequest(lse=True),
        )
        if sinks is None:
            out: Tensor = found[0].transpose(0, 1)
            return out
        out, lse = found[0][0].transpose(0, 1), found[1].lse[0].transpose(0, 1)
        return add_sinks(out, lse, sinks)[0]  # the log-sum-exp carries its part of the gradient


@dataclass(frozen=True)
class Bounds:
    """The keys that each query row sees: ``far_start <= j < far_end`` or ``own_start <= j <= own_end``.

    Every member is int32 ``[Q]``, in packed places. ``far`` is the stretch of the prompt that a response sees,
    empty for the prompt's own rows, for padding, and for a response that stands right behind its prompt: there
    both stretches are one. Along a segment all four never fall.
    """

    far_start: np.ndarray
    far_end: np.ndarray
    own_start: np.ndarray
    own_end: np.ndarray


def bounds(plan: SharedPromptPlan, window: int | None = None) -> Bounds:
    """The bounds of every query row, by arithmetic over all segments at once."""
    start, length, own, far_start, far_end = _segments(plan)
    place = np.arange(plan.first_query, plan.tokens, dtype=np.int32)
    own, far_start, far_end = (np.repeat(x, length) for x in (own, far_start, far_end))
    if window is not None:
        own = np.maximum(own, place - (window - 1))
        position = far_end + place - np.repeat(start, length)  # where the row would stand right behind its prompt
        far_start = np.minimum(np.maximum(far_start, position - (window - 1)), far_end)
    return Bounds(far_start, far_end, own, place)


@dataclass(frozen=True)
class Blocks:
    """Which pairs of blocks a mask needs: for each query block the key blocks, in order.

    Attributes:
        partial_count, full_count: int32 ``[A]``.
        partial, full: int32 ``[A,B]``, filled up with zeros behind the counts.
    """

    partial_count: np.ndarray
    partial: np.ndarray
    full_count: np.ndarray
    full: np.ndarray


def blocks(plan: SharedPromptPlan, window: int | None = None, block: int = BLOCK) -> Blocks:
    """The pairs of blocks, in memory of ``A x B`` small integers.

    Rows of one segment within one query block are a *run*. As bounds never fall along it, its rows together touch
    the keys between the first row's lower and the last row's upper bound, and all of them see those between the
    last row's lower and the first row's upper one. A pair of blocks is full if every run of the query block sees the
    whole key block, and partial if any touches it. Blocks that stand out over the end are never full, as in
    torch's ``create_block_mask``.
    """
    edges = bounds(plan, window)
    queries, columns = plan.queries, -(-plan.tokens // block)
    first = np.union1d(np.arange(0, queries, block), _segments(plan)[0] - plan.first_query)
    last = np.append(first[1:], queries) - 1
    rows = first // block
    touched = _Marks(-(-queries // block), columns)
    touched.add(rows, edges.own_start[first] // block, edges.own_end[last] // block)
    far = edges.far_start[first] < edges.far_end[first]
    touched.add(rows[far], (edges.far_start[first] // block)[far], ((edges.far_end[first] - 1) // block)[far])
    covered = _Marks(-(-queries // block), columns)
    for low, end in (
        (edges.own_start[last], edges.own_end[first] + 1),
        (edges.far_start[last], edges.far_end[last]),
    ):
        inside = -(-low // block), end // block - 1  # the whole blocks between the two
        some = inside[0] <= inside[1]
        covered.add(rows[some], inside[0][some], inside[1][some])
    full = covered.counts() == np.bincount(rows)[:, None]
    if queries % block:
        full[-1] = False
    partial = (touched.counts() > 0) & ~full
    return Blocks(*_listed(partial), *_listed(full))


def block_mask(plan: SharedPromptPlan, window: int | None = None, block: int = BLOCK) -> BlockMask:
    """The plan's BlockMask, made once for all layers with this window.

    Its mask function captures tensors only: a captured Python number would be compiled in, and every row would
    be compiled anew.
    """

    def build() -> BlockMask:
        edges = bounds(plan, window)
        stacked = np.stack([edges.far_start, edges.far_end, edges.own_start, edges.own_end])
        far_start, far_end, own_start, own_end = torch.from_numpy(stacked).to(plan.device, non_blocking=True)

        def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            far = (key >= far_start[query]) & (key < far_end[query])
            seen: Tensor = far | (key >= own_start[query]) & (key <= own_end[query])
            return seen

        listed = blocks(plan, window, block)
        partial_count, partial, full_count, full = (
            torch.from_numpy(x)[None, None].to(plan.device, non_blocking=True)
            for x in (listed.partial_count, listed.partial, listed.full_count, listed.full)
        )
        return BlockMask.from_kv_blocks(
            partial_count,
            partial,
            full_count,
            full,
            BLOCK_SIZE=block,
            mask_mod=mask_mod,
            seq_lengths=(plan.queries, plan.tokens),
        )

    return plan.once(("block mask", window, block), build)


@cache
def _compiled() -> Callable[..., Any]:
    """FlexAttention compiled once a process: its fused kernels exist in compiled form only.

    ``dynamic``, since every micro-batch has another length. ``fullgraph``, so that running out of recompilations is
    an error: what torch falls back to without it holds all T x T scores.
    """
    compiler: Callable[..., Callable[..., Any]] = torch.compile  # its overloads leave recompile_limit out
    return compiler(flex_attention, dynamic=True, fullgraph=True, recompile_limit=_RECOMPILE_LIMIT)


class _Marks:
    """How often each key block is marked for each query block; ranges are added at their ends and summed up once."""

    def __init__(self, rows: int, columns: int) -> None:
        self._steps = np.zeros((rows, columns + 1), dtype=np.int16)  # a row's runs are at most a block's tokens

    def add(self, rows: np.ndarray, first: np.ndarray, last: np.ndarray) -> None:
        """Marks the key blocks ``first .. last`` of each row."""
        np.add.at(self._steps, (rows, first), 1)
        np.add.at(self._steps, (rows, last + 1), -1)

    def counts(self) -> np.ndarray:
        """int16 ``[A,B]``; call it once, it sums in place."""
        return np.cumsum(self._steps, axis=1, out=self._steps)[:, :-1]


def _segments(plan: SharedPromptPlan) -> np.ndarray:
    """int32 ``[5, segments]`` of queries: start, length, first key of the own stretch, and the far one's two ends."""
    rows: list[tuple[int, int, int, int, int]] = []
    for group in plan.groups:
        start, end = group.prompt.start, group.prompt.end
        if not plan.first_query:
            rows.append((start, group.prompt.length, start, start, start))
        for response in group.responses:
            if response.start == end:
                rows.append((end, response.length, start, start, start))
            else:
                rows.append((response.start, response.length, response.start, start, end))
    if plan.padding is not None:
        rows.append((plan.padding.start, plan.padding.length, plan.padding.start, 0, 0))
    table: np.ndarray = np.array([row for row in rows if row[1]], dtype=np.int32).reshape(-1, 5).T
    return table


def _listed(marked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int32 ``[A]`` and ``[A,B]``: how many columns of each row are marked, and which, in order, then zeros."""
    counts = marked.sum(1, dtype=np.int32)
    rows, columns = np.nonzero(marked)
    indices = np.zeros(marked.shape, dtype=np.int32)
    indices[rows, np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)] = columns
    return counts, indices
