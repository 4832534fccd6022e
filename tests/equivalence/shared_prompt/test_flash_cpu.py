"""The CPU flash kernel in chunks and blocks of rows is causal attention, and computes few pairs in vain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from metronome.shared_prompt import flash_cpu
from metronome.shared_prompt.cost import causal_pairs
from metronome.shared_prompt.flash_cpu import causal, causal_backward, flash, join

LENGTHS = (1, 31, 32, 33, 64, 100, 256, 511, 512, 513, 700, 1100)


def drawn(length: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    draw = torch.Generator().manual_seed(length)
    return [torch.randn(2, length, heads, 8, generator=draw, dtype=dtype).transpose(1, 2) for heads in (6, 2, 2, 6)]


def ours(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    out, lse = torch.full_like(q, torch.nan), q.new_full(q.shape[:3], torch.nan)
    for rows, part, l_part in causal(q, k, v, 0.3):
        out[:, :, rows], lse[:, :, rows] = part, l_part
    grads = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    causal_backward([grad, q, k, v, out, lse], grads, 0.3)
    return [out, lse, *grads]


def plain(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(3, 1) for x in leaves[1:])
    seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    scores = (0.3 * leaves[0] @ keys.transpose(2, 3)).masked_fill(~seen, -torch.inf)
    out = torch.softmax(scores, -1) @ values
    gradients = torch.autograd.grad(out, leaves, grad)
    return [out.detach(), torch.logsumexp(scores, -1).detach(), *gradients]


def largest_difference(found: list[Tensor], wanted: list[Tensor]) -> float:
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("length", LENGTHS)
def test_blocks_of_rows_are_causal_attention(length: int) -> None:
    assert largest_difference(ours(*drawn(length)), plain(*drawn(length))) < 1e-12


@pytest.mark.parametrize("length", [100, 700])
def test_a_mask_that_is_dropped_or_off_by_one_is_seen(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = flash_cpu._blocks

    def changed(change: Callable[[Tensor], Tensor]) -> float:
        def faulty(*given: Any) -> Any:
            return [(rows, mask if mask is None else change(mask)) for rows, mask in blocks(*given)]

        monkeypatch.setattr(flash_cpu, "_blocks", faulty)
        return largest_difference(ours(*drawn(length)), plain(*drawn(length)))

    assert changed(lambda mask: mask) < 1e-12
    assert changed(torch.zeros_like) > 1e-2
    assert changed(lambda mask: mask.roll(1, -1)) > 1e-2


@pytest.mark.parametrize("length, most", [(64, 1.5), (256, 1.15), (512, 1.15), (2048, 1.05), (5000, 1.02)])
def test_few_pairs_are_computed_in_vain(length: int, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = []

    def counted(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, Tensor]:
        pairs.append(q.shape[2] * k.shape[2])
        return torch.empty_like(q), torch.empty(q.shape[:3])

    monkeypatch.setattr(flash_cpu, "flash", counted)
    x = torch.empty(1, 1, length, 1)
    assert sum(rows.stop - rows.start for rows, _, _ in causal(x, x, x, 1.0)) == length
    assert causal_pairs(length) <= sum(pairs) <= most * causal_pairs(length)


def test_two_softmaxes_are_joined_into_one() -> None:
    q, k, v, _ = drawn(64)
    halves = [flash(q, k[:, :, part], v[:, :, part], 0.3) for part in (slice(24), slice(24, 64))]
    whole = flash(q, k, v, 0.3)
    assert largest_difference(list(join(*halves[0], *halves[1])), list(whole)) < 1e-12
    wrong = join(halves[0][0], halves[1][1], halves[1][0], halves[0][1])  # statistics in the wrong order
    assert largest_difference(list(wrong), list(whole)) > 1e-2
