"""The split of a cluster's devices between engines and trainer ranks that is fastest for periodic asynchrony."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from metronome.simulate.cluster import Cluster
from metronome.simulate.lengths import LengthSource
from metronome.simulate.model import simulate
from metronome.simulate.policy import Policy

# Where more splits are feasible, the search moves by several engines at a time.
_PLACES = 40

# Rollouts that the simulation of one split should hold, so that chance doesn't choose the split.
_ROLLOUTS = 10_000


@dataclass(frozen=True, slots=True)
class Split:
    """One split, simulated.

    Attributes:
        engines, ranks: of the two sides.
        step_seconds: mean of a step.
        generation: seconds of a step's generation, T_i.
        training: seconds of a step's training, T_t, optimiser and publication included.
    """

    engines: int
    ranks: int
    step_seconds: float
    generation: float
    training: float


@dataclass(frozen=True, slots=True)
class Splits:
    """What the search found.

    Attributes:
        given: the cluster's own split.
        balanced: of the tried ones that whose T_i and T_t are nearest to each other.
        fastest: of the tried ones.
        tried: in the order of their engines.
        feasible: splits of all devices that have an engine and a rank.
        grain: engines by which two neighbours of the search differ.
        steps: that were simulated of each.
    """

    given: Split
    balanced: Split
    fastest: Split
    tried: tuple[Split, ...]
    feasible: int
    grain: int
    steps: int


def best_split(cluster: Cluster, *, lengths: LengthSource | None = None) -> Splits:
    """Searches the splits of ``cluster.devices()`` with simulated steps of the policy ``periodic``, without failures.

    More engines make T_i shorter and T_t longer, so the balance is found by halving. The fastest split lies near it,
    but not at it where arrivals are coarse (T is the closed form's maximum, not max(T_i, T_t)), so it is searched by
    golden section, which takes T to fall and then rise. It is the fastest of those tried; that no other is faster
    isn't promised.
    """
    cluster = cluster.model_copy(update={"failures": None})
    feasible = [
        (engines, ranks)
        for engines in range(1, cluster.devices() // cluster.engines.devices + 1)
        if (ranks := (cluster.devices() - engines * cluster.engines.devices) // cluster.trainer.devices) > 0
    ]
    grain = -(-len(feasible) // _PLACES)
    places = feasible[:: grain or 1]
    rollouts = cluster.prompts_per_step * cluster.group_size
    steps = min(cluster.steps, max(1, _ROLLOUTS // rollouts))
    tried: dict[tuple[int, int], Split] = {}

    def at(split: tuple[int, int]) -> Split:
        if split not in tried:
            tried[split] = _simulated(cluster.with_split(*split), steps, lengths)
        return tried[split]

    given = at((cluster.engines.count, cluster.trainer.ranks))
    _first(len(places), lambda place: at(places[place]).generation <= at(places[place]).training)
    _lowest(len(places), lambda place: at(places[place]).step_seconds)
    found = tuple(tried[key] for key in sorted(tried))
    return Splits(
        given=given,
        balanced=min(found, key=lambda split: abs(split.generation - split.training)),
        fastest=min(found, key=lambda split: split.step_seconds),
        tried=found,
        feasible=len(feasible),
        grain=grain,
        steps=steps,
    )


def _simulated(cluster: Cluster, steps: int, lengths: LengthSource | None) -> Split:
    outcome = simulate(cluster, Policy(source="periodic"), steps=steps, lengths=lengths)
    training = sum(sum(step.work) + step.optimizer + step.publication for step in outcome.steps)
    return Split(
        cluster.engines.count,
        cluster.trainer.ranks,
        outcome.step_seconds,
        sum(step.generation for step in outcome.steps) / steps,
        training / steps,
    )


def _first(count: int, true: Callable[[int], bool]) -> int:
    """The first of ``count`` places at which a condition that stays true holds; ``count`` if it never does."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if true(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _lowest(count: int, value: Callable[[int], float]) -> int:
    """The lowest of ``count`` places of a function that falls, then rises; its neighbours are looked at too."""
    low, high = 0, count - 1
    while high - low > 4:
        left = low + round((high - low) * 0.382)
        right = low + round((high - low) * 0.618)
        if value(left) <= value(right):
            high = right
        else:
            low = left
    return min(range(low, high + 1), key=value)
