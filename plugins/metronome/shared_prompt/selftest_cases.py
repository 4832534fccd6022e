"""The cases of ``metronome selftest`` and how one is checked, on whatever device.

The other side is float64 arithmetic on the CPU, whatever the device: an accelerator may have no float64. Toy
rows are held against a loop over tokens without any mask (``testing.attention.dense_attention``), longer ones
against ``reference.masked_attention``. At long lengths the loss reads a sample of query rows, the first and
last of segments and others at random, so that no ``[T,T]`` scores are needed and gradients are still complete.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from metronome.contracts import AttentionBackend, AttentionNeed
from metronome.shared_prompt.plan import SharedPromptPlan
from metronome.shared_prompt.reference import allowed, masked_attention
from metronome.testing.attention import PLANS, dense_attention

DTYPES: dict[str, Sequence[str]] = {
    "cpu": ("float64", "float32", "bfloat16"),
    "cuda": ("bfloat16", "float16", "float32"),
    "npu": ("bfloat16", "float16", "float32"),
}
TOLERANCE = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
"""Largest difference that passes, relative to the tensor's largest value."""

NAMES = ("output", "dq", "dk", "dv", "dsinks")
_SCORE_BYTES = 128 * 2**20  # float64 scores that the arithmetic holds at once
_DENSE_BYTES = 2 * 2**30  # scores of the reference backend beyond which it isn't run

Layout = tuple[Sequence[tuple[int, Sequence[int]]], int | None, bool]


_LONG: Sequence[tuple[str, Layout, int | None]] = (
    ("4096 and 8 x 512", ([(4096, [512] * 8)], None, False), None),
    ("4096 and uneven responses", ([(4096, [1, 511, 1300, 64, 777])], None, False), None),
    ("a cached prompt", ([(4096, [512] * 4)], None, True), None),
    ("uneven responses", ([(3000, [900, 31, 600])], None, False), 1024),
    ("16384 and 8 x 1024", ([(16384, [1024] * 8)], None, False), None),  # not on a CPU
)


@dataclass(frozen=True)
class Case:
    """One layout with what a layer asks for.

    Attributes:
        kind: ``toy``, ``middle`` or ``long``.
        title: the layout in words.
        layout: ``(groups, pad_to, cached_prompt)``.
        window: in tokens, the query included, or None.
        sinks: whether heads have sinks.
        heads, kv_heads, width: of the layer.
    """

    kind: str
    title: str
    layout: Layout
    window: int | None = None
    sinks: bool = False
    heads: int = 6
    kv_heads: int = 2
    width: int = 64

    @property
    def name(self) -> str:
        """Kind, title and what is asked for, on one line."""
        window = "" if self.window is None else f", window {self.window}"
        return f"{self.kind}: {self.title}{window}{', sinks' if self.sinks else ''}"

    def need(self, device: str, dtype: str) -> AttentionNeed:
        """What ``supports`` is asked."""
        width, window = self.width, self.window is not None
        return AttentionNeed(
            device, dtype, width, width, self.heads, self.kv_heads, window, self.sinks, cached_prompt=self.layout[2]
        )

    def plan(self, device: str) -> SharedPromptPlan:
        """The layout's plan, its index tensors on ``device``."""
        groups, pad_to, cached = self.layout
        return SharedPromptPlan.build(groups, pad_to, device, cached)

    def dense_bytes(self) -> int:
        """Float32 scores that a dense mask costs."""
        plan = self.plan("cpu")
        return 4 * self.heads * plan.queries * plan.tokens

    def too_dense(self, backend: str) -> str | None:
        """Why the dense reference isn't run on this case, or None."""
        if backend != "reference" or self.dense_bytes() <= _DENSE_BYTES:
            return None
        return f"its scores would take {self.dense_bytes() / 2**30:.0f} GiB"


def cases(device: str, long: bool) -> Iterator[Case]:
    """Toy and middle lengths, with ``long`` also what real rows hold; the longest not on a CPU."""
    for window, sinks in ((None, False), (4, False), (None, True), (4, True)):
        for title, layout in PLANS.items():
            yield Case("toy", title, layout, window, sinks)
    uneven = ([(300, [64, 1, 90, 0, 64])], None, False)
    yield Case("middle", "equal responses", ([(256, [64] * 8)], None, False), heads=9, kv_heads=3)
    yield Case("middle", "several groups and padding", ([(200, [33, 70]), (129, [128] * 3)], 1024, False))
    yield Case("middle", "a cached prompt", ([(520, [64, 64, 30])], None, True))
    for window, sinks in ((None, False), (100, False), (100, True)):
        yield Case("middle", "uneven responses", uneven, window, sinks)
    if not long:
        return
    yield Case("long", "1500 segments", ([(9, [3, 8, 5, 8])] * 300, 10240, False))
    for title, layout, window in _LONG[: len(_LONG) - (device == "cpu")]:
        yield Case("long", title, layout, window, heads=12, kv_heads=2, width=128)


def check(backend: AttentionBackend, case: Case, device: str, dtype: str) -> dict[str, Any]:
    """Largest differences of output and gradients, and whether a second call gave the same bits.

    Returns ``{"largest": {name: relative difference}, "same_bits": bool, "passed": bool}``; whatever the
    backend raises goes through.
    """
    plan, here = case.plan("cpu"), case.plan(device)
    draw = torch.Generator().manual_seed(0)
    exact_type = getattr(torch, dtype)
    shapes: list[tuple[int, ...]] = [
        (plan.queries, case.heads, case.width),
        (plan.tokens, case.kv_heads, case.width),
        (plan.tokens, case.kv_heads, case.width),
    ]
    if case.sinks:
        shapes.append((case.heads,))
    inputs = [torch.randn(shape, generator=draw).to(exact_type) for shape in shapes]
    rows = _sample(plan, case.heads, draw)
    weights = torch.randn(len(rows), case.heads, case.width, generator=draw).to(exact_type)
    scale = case.width**-0.5

    def run() -> list[Tensor]:
        leaves = [x.to(device).requires_grad_() for x in inputs]
        q, k, v = leaves[:3]
        out = backend.attend(q, k, v, here, scale, window=case.window, sinks=leaves[3] if case.sinks else None)
        gradients = torch.autograd.grad(out[rows.to(device)], leaves, weights.to(device), allow_unused=True)
        found = [out.detach()[rows.to(device)]]
        found += [torch.zeros_like(x) if g is None else g for g, x in zip(gradients, leaves, strict=True)]
        return [x.cpu() for x in found]

    leaves = [x.double().requires_grad_() for x in inputs]
    q, k, v = leaves[:3]
    sinks = leaves[3] if case.sinks else None
    if case.kind == "toy":
        out = dense_attention(q, k, v, plan, scale, case.window, sinks)[rows]
    else:
        out = masked_attention(q[rows], k, v, allowed(plan, case.window, rows), scale, sinks)
    wanted = [out.detach(), *torch.autograd.grad(out, leaves, weights.double())]
    found, again = run(), run()
    largest = {}
    for name, one, other in zip(NAMES, found, wanted, strict=False):
        largest[name] = ((one.double() - other).abs().max() / other.abs().max().clamp_min(1e-30)).item()
    return {
        "largest": largest,
        "same_bits": all(torch.equal(one, other) for one, other in zip(found, again, strict=True)),
        "passed": all(difference <= TOLERANCE[dtype] for difference in largest.values()),  # a NaN fails
    }


def timing(backend: AttentionBackend, device: str, dtype: str, long: bool) -> dict[str, Any]:
    """Forward and backward against K separate rows through torch's own attention, seconds of ``interleaved``."""
    prompt, count, length = (4096, 8, 512) if long else (512, 8, 64)
    heads, kv_heads, width = (12, 2, 128) if long else (9, 3, 64)
    plan = SharedPromptPlan.build([(prompt, [length] * count)], device=device)
    kind = getattr(torch, dtype)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=kind, device=device, requires_grad=True)

    packed = [drawn(plan.tokens, number, width) for number in (heads, kv_heads, kv_heads)]
    rows = [drawn(count, number, prompt + length, width) for number in (heads, kv_heads, kv_heads)]

    def shared() -> None:
        q, k, v = packed
        out = backend.attend(q, k, v, plan, width**-0.5)
        torch.autograd.grad(out, packed, torch.ones_like(out))

    def separate(native: bool = True) -> None:
        q, k, v = rows
        if not native:
            k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=native)
        torch.autograd.grad(out, rows, torch.ones_like(out))

    native = True
    try:
        separate()
    except RuntimeError:  # a device whose torch has no grouped heads in this operation
        native = False
    seconds = interleaved([lambda: separate(native), shared], device)
    return {
        "shape": [prompt, count, length],
        "heads": [heads, kv_heads, width],
        "rows_with_native_grouped_heads": native,
        "seconds_rows": seconds[0],
        "seconds_shared": seconds[1],
        "ratio": seconds[0] / seconds[1],
    }


def interleaved(ways: Sequence[Callable[[], None]], device: str, repeats: int = 5) -> list[float]:
    """Median seconds of each, in turns after two warm-ups: of the process on a CPU, by the clock on a card.

    A card is idle before and after each.
    """
    wait: Callable[[], None] = (lambda: None) if device == "cpu" else getattr(torch, device).synchronize
    clock = time.process_time if device == "cpu" else time.perf_counter
    times: list[list[float]] = [[] for _ in ways]
    for repeat in range(repeats + 2):
        for way, found in zip(ways, times, strict=True):
            wait()
            start = clock()
            way()
            wait()
            if repeat >= 2:
                found.append(clock() - start)
    return [median(found) for found in times]


def _sample(plan: SharedPromptPlan, heads: int, draw: torch.Generator) -> Tensor:
    """Query rows that the loss reads, ascending: all of a small row; of a large one ends of segments and others."""
    real = plan.tokens_shared - plan.first_query
    budget = max(16, _SCORE_BYTES // (8 * heads * plan.tokens))
    ends = {
        place - plan.first_query
        for group in plan.groups
        for segment in (group.prompt, *group.responses)
        if segment.length
        for place in (segment.start, segment.end - 1)
        if place >= plan.first_query
    }
    first = torch.tensor(sorted(ends), dtype=torch.int64)
    first = first[torch.randperm(len(first), generator=draw)[:budget]]
    rows: Tensor = torch.unique(torch.cat([first, torch.randperm(real, generator=draw)[: budget - len(first)]]))
    return rows
