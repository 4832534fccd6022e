"""How fast the engines decode: the curve with which the simulated engines end groups when the recorded ones did."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from metronome.simulate.cluster import Engines, LawCurve
from metronome.simulate.lengths import Group
from metronome.simulate.model import simulation_package
from metronome.simulate.pool import Dispatch, Pool

# Rollouts that a fit looks at; more don't change it but cost seconds.
_ROLLOUTS = 2000
_FLAT = 1e6
"""``half`` of an engine whose speed doesn't depend on what runs beside."""

_NORMAL = 1.645  # of a 90 % interval

_PROMPT = (0.0, 0.003, 0.01, 0.03, 0.1, 0.3)
"""What a prompt token may cost, in tokens that a sequence alone decodes meanwhile."""

Ends = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Observed:
    """Groups that the engines took at known times; seconds from the first dispatch.

    Attributes:
        groups: ``[groups]`` lengths, in the order of dispatch.
        starts: ``[groups]`` when each was dispatched.
        ends: ``[groups]`` when each one's last response ended; one number alone: when the last group's did.
    """

    groups: tuple[Group, ...]
    starts: tuple[float, ...]
    ends: tuple[float, ...]

    @property
    def at_once(self) -> bool:
        """Whether all were dispatched together, as far as it matters."""
        return max(self.starts) - min(self.starts) <= 0.02 * max(self.ends)


@dataclass(frozen=True, slots=True)
class Decode:
    """A fitted curve.

    Attributes:
        curve: of the engines.
        prefill: seconds of an engine for one prompt token.
        error: root mean square of simulated minus recorded ends, over the mean of the recorded ones.
        half_fitted: whether ``half`` was fitted too.
        dearest: curve and prefill of the dearest prompts with which the ends fit as well; None: none dearer than
            ``prefill``.
    """

    curve: LawCurve
    prefill: float
    error: float
    half_fitted: bool
    dearest: tuple[LawCurve, float] | None = None


def fit(observed: Sequence[Observed], engines: Engines, half: float | None, *, prompts: bool = True) -> Decode:
    """The curve ``r / (1 + running / half)`` and prefill that leave the smallest squared difference of groups' ends.

    For each ``half`` of a grid, and each cost of a prompt token in decoded tokens, the best ``r`` is found: where
    everything was dispatched at once all ends are proportional to 1 / r, so that it follows from one simulation; else
    by golden section. A prefill, or another ``half``, is taken if it brings the difference down by two in a hundred.
    Prompts of another cost fit as well if the likelihood doesn't tell them apart: ``2 n ln(error / best) <= 1.645^2``,
    n ends with normal differences.

    Args:
        observed: batches that the engines ran one after the other.
        engines: with any curve and prefill; how many, their slots, and how they read prompts.
        half: a known one; None: fitted from groups' ends, and ``slots`` where only the last end is known.
        prompts: whether the prompts' lengths are known; else reading them costs nothing.
    """
    batches = _some(observed)
    only_last = all(len(one.ends) == 1 < len(one.groups) for one in batches)
    slots = engines.slots
    halves = [half] if half is not None else [float(slots)] if only_last else _grid(slots)
    best: Decode | None = None
    by_prompt: list[Decode] = []
    for prompt in (0.0,) if only_last or not prompts else _PROMPT:
        fits = []
        for candidate in halves:
            rate, error = _best_rate(batches, engines, candidate, prompt)
            curve = LawCurve(tokens_per_second=rate, half=candidate)
            fits.append(Decode(curve, prompt / rate, error, len(halves) > 1))
            if best is None or error < best.error * 0.98:
                best = fits[-1]
        by_prompt.append(min(fits, key=_error))
    assert best is not None
    ends = sum(len(one.ends) for one in batches)
    limit = best.error * float(np.exp(_NORMAL**2 / 2.0 / ends))
    dearest = [one for one in by_prompt if one.error <= limit and one.prefill > best.prefill]
    return replace(best, dearest=(dearest[-1].curve, dearest[-1].prefill) if dearest else None)


def _error(found: Decode) -> float:
    return found.error


def _grid(slots: int) -> list[float]:
    halves, place = [_FLAT], 0.5
    while place <= 8 * slots:
        halves.append(place)
        place *= 2
    return halves


def _some(observed: Sequence[Observed]) -> list[Observed]:
    chosen: list[Observed] = []
    count = 0
    for one in observed:
        count += sum(len(group.responses) for group in one.groups)
        if chosen and count > _ROLLOUTS:
            break
        chosen.append(one)
    return chosen


def _best_rate(batches: Sequence[Observed], like: Engines, half: float, prompt: float) -> tuple[float, float]:
    recorded = np.concatenate([np.array(one.ends) for one in batches])

    def ends(rate: float, stretch: float = 1.0) -> Ends:
        curve = LawCurve(tokens_per_second=rate, half=half)
        engines = like.model_copy(update={"decode": curve, "prefill_seconds_per_token": prompt / rate})
        return np.concatenate([_replayed(engines, one, stretch) for one in batches])

    def error(simulated: Ends) -> float:
        return float(np.sqrt(np.mean((simulated - recorded) ** 2)) / np.mean(recorded))

    alone = ends(1.0, 0.0)
    rate = float(np.sum(alone**2) / np.sum(alone * recorded))
    if all(one.at_once for one in batches):
        return rate, error(alone / rate)
    rate = _lowest(lambda x: error(ends(float(np.exp(x)))), float(np.log(rate / 4)), float(np.log(rate * 1024)))
    return float(np.exp(rate)), error(ends(float(np.exp(rate))))


def _lowest(value: Callable[[float], float], low: float, high: float) -> float:
    """Golden section to one in a thousand."""
    golden = (np.sqrt(5.0) - 1.0) / 2.0
    left, right = high - golden * (high - low), low + golden * (high - low)
    at_left, at_right = value(left), value(right)
    while high - low > 1e-3:
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - golden * (high - low)
            at_left = value(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + golden * (high - low)
            at_right = value(right)
    return float((low + high) / 2.0)


def _replayed(engines: Engines, batch: Observed, stretch: float) -> Ends:
    """The ends of ``batch`` on ``engines`` with its dispatches at ``stretch`` times their own seconds."""
    environment = simulation_package().Environment()
    pool = Pool(environment, engines, lambda group: None, lambda: True)
    sent = [
        Dispatch(0, place, group, start * stretch)
        for place, (group, start) in enumerate(zip(batch.groups, batch.starts, strict=True))
    ]
    if stretch == 0.0 or batch.at_once:
        pool.dispatch(sent)
    else:
        environment.process(_dispatch(environment, pool, sent))
    environment.run()
    arrived = np.array([group.arrived for group in sent])
    return arrived if len(batch.ends) == len(sent) else np.array([arrived.max()])


def _dispatch(environment: Any, pool: Pool, sent: Sequence[Dispatch]) -> Generator[Any, Any, None]:
    for group in sent:
        yield environment.timeout(max(0.0, group.sent - environment.now))
        pool.dispatch([group])
