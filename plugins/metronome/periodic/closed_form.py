"""How long a period takes, exactly, for one serial trainer (docs/techniques/periodic.md, ours)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from metronome.errors import MetronomeError


def periodic_seconds(
    arrivals: Sequence[float], work: Sequence[float], step: float = 0.0, publish: float = 0.0
) -> float:
    """Seconds of a period that trains groups as they arrive.

    T = max_j(a_(j) + sum_{m >= j} w_(m)) + T_step + T_publish

    Args:
        arrivals: ``[groups]`` a_(j), seconds from the period's start to each arrival, in the order trained.
        work: ``[groups]`` w_(j), seconds to train each of them.
        step: the optimiser's seconds.
        publish: seconds of the publication.

    Raises MetronomeError if the two lists differ in length or a time is negative.
    """
    _require(arrivals, work, step, publish)
    remaining = list(accumulate(reversed(work)))[::-1]
    return max(map(sum, zip(arrivals, remaining, strict=True)), default=0.0) + step + publish


def synchronous_seconds(
    arrivals: Sequence[float], work: Sequence[float], step: float = 0.0, publish: float = 0.0
) -> float:
    """Seconds of a period that trains after the last arrival: T = max_j a_(j) + sum w + T_step + T_publish.

    Arguments and errors as for ``periodic_seconds``.
    """
    _require(arrivals, work, step, publish)
    return max(arrivals, default=0.0) + sum(work) + step + publish


def speed_bound(generation: float, training: float) -> float:
    """The most that periodic over synchronous can gain: (T_i + T_t) / max(T_i, T_t) <= 2.

    It is against a *disaggregated* synchronous run, one half of which always idles; against a colocated run
    on the same devices with free resharding the gain is 1.0.

    Args:
        generation: T_i, seconds to generate a period's groups.
        training: T_t, seconds to train them.

    Raises MetronomeError if a time is negative or both are zero.
    """
    _require([], [], generation, training)
    longest = max(generation, training)
    if longest == 0.0:
        raise MetronomeError("a period without work has no bound", remedy="pass seconds above 0")
    return (generation + training) / longest


def _require(arrivals: Sequence[float], work: Sequence[float], *others: float) -> None:
    if len(arrivals) != len(work):
        raise MetronomeError(
            "each arrival needs its training time",
            found=(len(arrivals), len(work)),
            remedy="lists of one length",
        )
    times = [*arrivals, *work, *others]
    if not all(time >= 0.0 for time in times):
        raise MetronomeError(
            "a time is negative or not a number", found=min(times), remedy="seconds from the period's start"
        )
