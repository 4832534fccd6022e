"""The periodic gradient is the synchronous one, in float64, whatever the order of arrival and the split."""

from __future__ import annotations

import random
from concurrent.futures import Future
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metronome.periodic.normalizer import Counts, StreamingNormalizer
from metronome.periodic.sources import Periodic
from metronome.periodic.stream import GroupStream
from metronome.periodic.whitening import BatchMoments, TwoAccumulators

WORDS, WIDTH, ROWS, LONGEST, BATCH = 7, 5, 3, 9, 4
EXACT = 1e-12


@dataclass(frozen=True)
class Row:
    """One rollout: ids [n + 1], mask [n] of the trained tokens, one advantage."""

    ids: torch.Tensor
    mask: torch.Tensor
    advantage: float

    @property
    def trained(self) -> int:
        return int(self.mask.sum())


def group_of(index: int) -> list[Row]:
    """The rollouts of one prompt: they follow the index alone; uneven lengths, some empty."""
    chance = random.Random(index)
    rows = []
    for _ in range(ROWS):
        length = chance.choice([1, 2, 5, LONGEST])
        ids = torch.tensor([chance.randrange(WORDS) for _ in range(length + 1)])
        mask = torch.tensor([chance.random() < 0.8 for _ in range(length)])
        rows.append(Row(ids, mask, chance.gauss(0.3, 1.0)))
    return rows


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = torch.nn.Embedding(WORDS, WIDTH), torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()
    return torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, WORDS)).double()


def token_losses(net: torch.nn.Module, row: Row, advantage: float | None = None, off: float = 0.0):
    """(policy [n], other [n]): PPO's term, its behaviour ``off`` by up to that much, and a KL-like term."""
    log_probs = net(row.ids[:-1]).log_softmax(-1).gather(-1, row.ids[1:, None])[:, 0]
    shift = off * torch.linspace(-1.0, 1.0, len(log_probs), dtype=torch.float64)
    ratio = (log_probs - log_probs.detach() + shift).exp()
    value = row.advantage if advantage is None else advantage
    policy = -torch.minimum(ratio * value, ratio.clamp(0.8, 1.2) * value)
    return policy * row.mask, 0.05 * log_probs.square() * row.mask


def formula(mode: str, rows: list[Row], losses: list[torch.Tensor]) -> torch.Tensor:
    """The synchronous objective of the whole batch in one expression."""
    sums = torch.stack([loss.sum() for loss in losses])
    lengths = torch.tensor([row.trained for row in rows], dtype=torch.float64)
    if mode == "seq-mean":
        return (sums / lengths.clamp(min=1)).sum() / len(rows)
    if mode == "token-mean":
        return sums.sum() / lengths.sum()
    return sums.sum() / len(rows) / (LONGEST if mode == "dr-grpo" else 1)


def gradient(net: torch.nn.Module) -> torch.Tensor:
    return torch.cat([param.grad.flatten() for param in net.parameters()])


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def synchronous_gradient(mode: str, indices: list[int], **options) -> torch.Tensor:
    net, rows = model(), [row for index in indices for row in group_of(index)]
    formula(mode, rows, [sum(token_losses(net, row, **options)) for row in rows]).backward()
    return gradient(net)


def streamed_rows(order_seed: int, unwanted: frozenset[int]) -> tuple[list[Row], tuple[int, ...]]:
    """Rows in the order in which a real stream hands them over, groups finishing in a random order."""
    out: dict[int, Future] = {}

    def generate(ticket):
        out[ticket.index] = Future()
        return out[ticket.index]

    chance = random.Random(order_seed)
    stream = GroupStream(Periodic(), group_of, generate, lambda group: [0], timeout=1.0)
    stream.open_period(0, BATCH)
    rows: list[Row] = []
    while not Periodic().period_complete(stream.flow()):
        index = chance.choice(sorted(out))
        out.pop(index).set_result(group_of(index))
        arrival = next(stream.arrivals())
        if index in unwanted:
            stream.filter(arrival)
        else:
            rows += arrival.group
    return rows, stream.close_period().indices


def split(rows: list[Row], sizes: list[int]) -> list[list[Row]]:
    """Micro-batches of the given sizes in turn; they cut through groups."""
    parts, start = [], 0
    while start < len(rows):
        size = sizes[len(parts) % len(sizes)]
        parts.append(rows[start : start + size])
        start += size
    return parts


ORDERS = st.integers(0, 10_000)
SIZES = st.lists(st.integers(1, 7), min_size=1, max_size=4)
UNWANTED = st.frozensets(st.integers(0, 6), max_size=4)


@given(order=ORDERS, sizes=SIZES, unwanted=UNWANTED, mode=st.sampled_from(StreamingNormalizer.MODES))
@settings(deadline=None, max_examples=60)
def test_any_order_split_and_filter_gives_the_synchronous_gradient(order, sizes, unwanted, mode):
    rows, indices = streamed_rows(order, unwanted)
    net = model()
    normalizer = StreamingNormalizer(mode, expected_rows=BATCH * ROWS, max_tokens=LONGEST)
    for micro in split(rows, sizes):
        weights = normalizer.row_weights([row.trained for row in micro])
        losses = [sum(token_losses(net, row)).sum() for row in micro]
        sum(weight * loss for weight, loss in zip(weights, losses, strict=True)).backward()
    factor = normalizer.final_factor()
    assert difference(gradient(net) * factor, synchronous_gradient(mode, sorted(indices))) < EXACT


@given(order=ORDERS, mode=st.sampled_from(StreamingNormalizer.MODES), kept=st.integers(1, BATCH))
@settings(deadline=None, max_examples=30)
def test_groups_filtered_without_refill_and_spread_over_ranks_give_the_same_gradient(order, mode, kept):
    indices = random.Random(order).sample(range(BATCH), kept)
    ranks = [indices[::2], indices[1::2]]  # the second may be empty
    total, counts = torch.zeros(()), Counts()
    for mine in ranks:
        net = model()
        normalizer = StreamingNormalizer(mode, expected_rows=BATCH * ROWS, max_tokens=LONGEST)
        rows = [row for index in mine for row in group_of(index)]
        weights = normalizer.row_weights([row.trained for row in rows])
        zero = sum(param.sum() for param in net.parameters()) * 0.0  # an idle rank's zero loss
        losses = [weight * sum(token_losses(net, row)).sum() for weight, row in zip(weights, rows, strict=True)]
        (zero + sum(losses)).backward()
        total, counts = total + gradient(net), counts + normalizer.counts
    got = total * normalizer.final_factor(counts)
    assert difference(got, synchronous_gradient(mode, sorted(indices))) < EXACT


def test_a_token_mean_per_micro_batch_is_not_the_synchronous_gradient():
    """Negative control: what a host does that divides each micro-batch by its own tokens."""
    rows, indices = streamed_rows(1, frozenset())
    net = model()
    parts = split(rows, [2])
    for micro in parts:
        losses = [sum(token_losses(net, row)) for row in micro]
        (formula("token-mean", micro, losses) / len(parts)).backward()
    assert difference(gradient(net), synchronous_gradient("token-mean", sorted(indices))) > 1e-3


def test_leaving_out_the_final_factor_is_seen():
    """Negative control: token-mean's scale is only made good by the last rescale."""
    rows, indices = streamed_rows(2, frozenset())
    net = model()
    normalizer = StreamingNormalizer("token-mean", expected_rows=BATCH * ROWS, max_tokens=LONGEST)
    weights = normalizer.row_weights([row.trained for row in rows])
    sum(weight * sum(token_losses(net, row)).sum() for weight, row in zip(weights, rows, strict=True)).backward()
    assert difference(gradient(net), synchronous_gradient("token-mean", sorted(indices))) > 1e-3


def whitened(mode: str, rows: list[Row], off: float) -> torch.Tensor:
    """The whole-batch gradient with advantages whitened directly over the trained tokens."""
    tokens = torch.cat([row.advantage * torch.ones(row.trained, dtype=torch.float64) for row in rows])
    mean, std = float(tokens.mean()), float(tokens.std(correction=0)) + 1e-8
    net = model()
    losses = [sum(token_losses(net, row, (row.advantage - mean) / std, off)) for row in rows]
    formula(mode, rows, losses).backward()
    return gradient(net)


def accumulated(mode: str, rows: list[Row], sizes: list[int], off: float) -> torch.Tensor:
    """The same by accumulators, group by group, mean and deviation known only at the end."""
    net, moments = model(), BatchMoments()
    accumulators = TwoAccumulators(net.parameters())
    normalizer = StreamingNormalizer(mode, expected_rows=BATCH * ROWS, max_tokens=LONGEST)
    for micro in split(rows, sizes):
        lengths = [row.trained for row in micro]
        weights = normalizer.row_weights(lengths)
        moments += BatchMoments.of([row.advantage for row in micro], lengths)
        for kind, advantage, part in (("advantage", None, 0), ("unit", 1.0, 0), ("other", None, 1)):
            losses = [token_losses(net, row, advantage, off)[part].sum() for row in micro]
            sum(weight * loss for weight, loss in zip(weights, losses, strict=True)).backward()
            accumulators.take(kind)
    accumulators.combine(moments.mean, moments.std(), normalizer.final_factor())
    return gradient(net)


@given(order=ORDERS, sizes=SIZES, unwanted=UNWANTED, mode=st.sampled_from(StreamingNormalizer.MODES))
@settings(deadline=None, max_examples=30)
def test_two_accumulators_whiten_over_the_batch_exactly_at_ratio_one(order, sizes, unwanted, mode):
    rows, indices = streamed_rows(order, unwanted)
    in_order = [row for index in sorted(indices) for row in group_of(index)]
    assert difference(accumulated(mode, rows, sizes, 0.0), whitened(mode, in_order, 0.0)) < 1e-11


@pytest.mark.parametrize("mode", StreamingNormalizer.MODES)
def test_two_accumulators_are_wrong_where_the_ratio_is_clipped(mode):
    """Negative control and reason for the refusal: clipping looks at the whitened advantage's sign."""
    rows = [row for index in range(BATCH) for row in group_of(index)]
    assert difference(accumulated(mode, rows, [3], 0.5), whitened(mode, rows, 0.5)) > 0.05
