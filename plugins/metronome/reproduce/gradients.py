"""A toy policy whose gradient is accumulated group by group, and the synchronous gradient of one expression.

Imported only by rows that need torch.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from metronome.periodic import normalizer, sources, stream, whitening
from metronome.periodic.records import Ticket

WORDS, WIDTH, ROLLOUTS, LONGEST, BATCH = 11, 6, 4, 12, 6
MODES = normalizer.StreamingNormalizer.MODES


@dataclass(frozen=True)
class Rollout:
    """Token ids ``[n + 1]``, which of the n predicted ones are trained, and one advantage."""

    ids: Tensor
    trained: Tensor
    advantage: float

    @property
    def count(self) -> int:
        """Trained tokens."""
        return int(self.trained.sum())


def group(index: int) -> list[Rollout]:
    """The rollouts of one prompt: they follow the prompt's index, lengths are uneven."""
    chance = random.Random(1000 + index)
    made = []
    for _ in range(ROLLOUTS):
        length = chance.choice([1, 3, 7, LONGEST])
        ids = torch.tensor([chance.randrange(WORDS) for _ in range(length + 1)])
        trained = torch.tensor([chance.random() < 0.8 for _ in range(length)])
        made.append(Rollout(ids, trained, chance.gauss(0.2, 1.0)))
    return made


def arrivals(seed: int) -> list[Rollout]:
    """One period's rollouts in the order in which the shipped stream hands them over; groups end at random."""
    under_way: dict[int, Future[list[Rollout]]] = {}

    def generate(ticket: Ticket[list[Rollout]]) -> Future[list[Rollout]]:
        under_way[ticket.index] = Future()
        return under_way[ticket.index]

    source, chance = sources.Periodic(), random.Random(seed)
    flow: stream.GroupStream[list[Rollout], list[Rollout]] = stream.GroupStream(
        source, group, generate, lambda _: [0], timeout=10.0
    )
    flow.open_period(0, BATCH)
    handed: list[Rollout] = []
    while not source.period_complete(flow.flow()):
        index = chance.choice(sorted(under_way))
        under_way.pop(index).set_result(group(index))
        handed += next(flow.arrivals()).group
    flow.close_period()
    return handed


def split(rollouts: Sequence[Rollout], seed: int) -> Iterator[Sequence[Rollout]]:
    """Micro-batches of one to five rollouts; they cut through groups."""
    chance, start = random.Random(seed), 0
    while start < len(rollouts):
        size = chance.randint(1, 5)
        yield rollouts[start : start + size]
        start += size


def policy(dtype: torch.dtype) -> torch.nn.Module:
    """The same small network each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            torch.nn.Embedding(WORDS, WIDTH),
            torch.nn.Linear(WIDTH, WIDTH),
            torch.nn.Tanh(),
            torch.nn.Linear(WIDTH, WORDS),
        )
    return net.to(dtype)


def loss(
    net: torch.nn.Module, rollout: Rollout, advantage: float | None = None, off: float = 0.0, kl: float = 0.05
) -> Tensor:
    """Summed token losses: PPO's, with a behaviour policy ``off`` by up to that much, and a KL-like term."""
    log_probs = net(rollout.ids[:-1]).log_softmax(-1).gather(-1, rollout.ids[1:, None])[:, 0]
    shift = off * torch.linspace(-1.0, 1.0, len(log_probs), dtype=log_probs.dtype)
    ratio = (log_probs - log_probs.detach() + shift).exp()
    value = rollout.advantage if advantage is None else advantage
    policy_term = -torch.minimum(ratio * value, ratio.clamp(0.8, 1.2) * value)
    total: Tensor = ((policy_term + kl * log_probs.square()) * rollout.trained).sum()
    return total


def gradient(net: torch.nn.Module) -> Tensor:
    """All parameters' gradients in one vector, float64."""
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]).double()


def relative(one: Tensor, other: Tensor) -> float:
    """``|one - other| / |other|``."""
    return float((one - other).norm() / other.norm())


def synchronous(mode: str, dtype: torch.dtype) -> Tensor:
    """The gradient of the whole batch's objective, written as one expression."""
    net = policy(dtype)
    rollouts = [one for index in range(BATCH) for one in group(index)]
    sums = torch.stack([loss(net, one) for one in rollouts])
    counts = torch.tensor([one.count for one in rollouts], dtype=dtype)
    objective = {
        "seq-mean": (sums / counts.clamp(min=1)).sum() / len(rollouts),
        "token-mean": sums.sum() / counts.sum(),
        "dr-grpo": sums.sum() / (len(rollouts) * LONGEST),
        "seq-mean-token-sum": sums.sum() / len(rollouts),
    }[mode]
    torch.autograd.backward(objective)
    return gradient(net)


def streamed(mode: str, seed: int, dtype: torch.dtype) -> Tensor:
    """The gradient accumulated in a random order of arrival and a random split, rescaled once.

    ``seed`` rows more were expected than came, as where groups are filtered.
    """
    net = policy(dtype)
    streaming = normalizer.StreamingNormalizer(mode, expected_rows=BATCH * ROLLOUTS + seed, max_tokens=LONGEST)
    for part in split(arrivals(seed), seed):
        weights = streaming.row_weights([one.count for one in part])
        torch.autograd.backward(torch.stack([w * loss(net, one) for w, one in zip(weights, part, strict=True)]).sum())
    return gradient(net) * streaming.final_factor()


def largest_difference(dtype: torch.dtype, orders: int) -> float:
    """The largest relative difference over all normalisers and ``orders`` orders of arrival and splits."""
    return max(
        relative(streamed(mode, seed, dtype), wanted)
        for mode in MODES
        for wanted in [synchronous(mode, dtype)]
        for seed in range(orders)
    )


def per_micro_batch(orders: int) -> float:
    """Negative control: the *smallest* difference if each micro-batch is divided by its own tokens."""
    wanted, found = synchronous("token-mean", torch.float64), []
    for seed in range(orders):
        net = policy(torch.float64)
        parts = list(split(arrivals(seed), seed))
        for part in parts:
            total = torch.stack([loss(net, one) for one in part]).sum()
            torch.autograd.backward(total / max(1, sum(one.count for one in part)) / len(parts))
        found.append(relative(gradient(net), wanted))
    return min(found)


def whitening_difference(off: float) -> float:
    """Advantages whitened over the batch by two accumulators against whitening first; ``off`` as in ``loss``."""
    rollouts = arrivals(3)
    moments = whitening.BatchMoments.of([one.advantage for one in rollouts], [one.count for one in rollouts])
    net = policy(torch.float64)
    counts = sum(one.count for one in rollouts)
    values = [(one.advantage - moments.mean) / moments.std() for one in rollouts]
    losses = [loss(net, one, value, off) for one, value in zip(rollouts, values, strict=True)]
    torch.autograd.backward(torch.stack(losses).sum() / counts)
    wanted = gradient(net)

    net, seen = policy(torch.float64), whitening.BatchMoments()
    accumulators = whitening.TwoAccumulators(net.parameters())
    streaming = normalizer.StreamingNormalizer("token-mean", expected_rows=BATCH * ROLLOUTS, max_tokens=LONGEST)
    for part in split(rollouts, 3):
        lengths = [one.count for one in part]
        weights = streaming.row_weights(lengths)
        seen += whitening.BatchMoments.of([one.advantage for one in part], lengths)
        kinds: tuple[tuple[whitening.Kind, float | None, float], ...] = (
            ("advantage", None, 0.0),
            ("unit", 1.0, 0.0),
        )
        for kind, advantage, kl in kinds:
            parts = [w * loss(net, one, advantage, off, kl) for w, one in zip(weights, part, strict=True)]
            torch.autograd.backward(torch.stack(parts).sum())
            accumulators.take(kind)
        parts = [w * (loss(net, one, 0.0, off)) for w, one in zip(weights, part, strict=True)]
        torch.autograd.backward(torch.stack(parts).sum())
        accumulators.take("other")
    accumulators.combine(seen.mean, seen.std(), streaming.final_factor())
    return relative(gradient(net), wanted)
