"""The rollout side of a recorded run: how many engines and slots, and how fast they decode."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from metronome.advise.decode import Observed, fit
from metronome.advise.lengths import StepGroups
from metronome.errors import ConfigurationError
from metronome.observe.records import RunRecord
from metronome.simulate.cluster import Engines, LawCurve

_MOST_SLOTS = 256


def reading(host: str) -> dict[str, bool]:
    """How a host's engines read prompts, as far as it is known; by default each member reads its own, beside decoding.

    The local host's engine computes a prompt once for all its members, and decodes nothing meanwhile.
    """
    return {"prefix_cache": True, "prefill_stops_decoding": True} if host == "local" else {}


def placement(run: RunRecord, steps: Sequence[StepGroups], colocated: bool, assumed: list[str]) -> tuple[int, int, int]:
    """Engines, slots of each, trainer ranks; in a colocated run engines and ranks are all devices.

    Appends to ``assumed`` what isn't recorded. Raises ConfigurationError where a colocated run's devices aren't.
    """
    workers = run.settings.get("workers")
    names = {one.worker for step in steps for group in step.rollouts for one in group if one.worker is not None}
    if not isinstance(workers, int) or workers < 1:
        if colocated:
            raise ConfigurationError(
                "a colocated run's devices aren't recorded",
                found=run.name,
                where=f"a run of {run.host}",
                remedy="give workers=8, the devices (or the rollout engines on them)",
            )
        workers = len(names) or 1
        if not names:
            assumed.append("one rollout engine: give workers=N")
    slots = run.settings.get("slots")
    if not isinstance(slots, int) or slots < 1:
        most = max(sum(len(group.responses) for group in one.groups) for one in steps)
        slots = _concurrent(steps) or min(_MOST_SLOTS, -(-most // workers))
        assumed.append(f"{slots} sequences at once on an engine: give slots=N")
    ranks = run.settings.get("trainer_ranks")
    if colocated:
        ranks = workers
    elif not isinstance(ranks, int) or ranks < 1:
        ranks = 1  # the same times whatever it is, as long as nobody asks for another split
    return workers, slots, ranks


def _concurrent(steps: Sequence[StepGroups]) -> int | None:
    """The most responses that one worker had at once, where single responses have times of their own."""
    single = [one for step in steps for group in step.rollouts if len({r.end for r in group}) > 1 for one in group]
    marks: dict[str | None, list[tuple[float, int]]] = {}
    for one in single:
        if one.start is not None and one.end is not None:
            marks.setdefault(one.worker, []).extend([(one.start, 1), (one.end, -1)])
    most = 0
    for of_worker in marks.values():
        running = 0
        for _, change in sorted(of_worker):
            running += change
            most = max(most, running)
    return most or None


def decoding(
    engines: Engines,
    steps: Sequence[StepGroups],
    source: str,
    half: float | None,
    seconds: Callable[[LawCurve], float],
    measured: list[str],
    assumed: list[str],
    *,
    prompts_known: bool,
) -> tuple[Engines, float | None, Engines | None]:
    """The engines as fast as they were, how far simulated ends of groups are off the recorded ones, and the engines
    with the dearest prompts that the record leaves open (``Decode.dearest``).

    Args:
        engines: with any curve.
        half: given; None: fitted or assumed.
        seconds: simulated seconds of the whole run with a curve, for runs that record nothing of generation.
        prompts_known: whether the prompts' lengths are; else reading them is taken to cost nothing.
    """
    observed = _observed(steps, source)
    dearest: Engines | None = None
    if observed:
        found = fit(observed, engines, half, prompts=prompts_known)
        curve, prefill, error, fitted = found.curve, found.prefill, found.error, found.half_fitted
        if found.dearest is not None:
            dearest = _with(engines, *found.dearest)
        how = "the arrivals of groups" if len(observed[0].ends) > 1 else "the seconds of generation"
        off = f" ({100 * found.error:.1f} % off)"
    else:
        curve = _by_steps(seconds, half or float(engines.slots), sum(one.step.seconds for one in steps), assumed)
        prefill, error, fitted, how, off = 0.0, None, False, "the seconds of whole steps", ""
    if not fitted and half is None:
        assumed.append(f"a sequence decodes half as fast beside {engines.slots} as alone: give half=N")
    measured.append(
        f"decoding {curve.rate(1):.3g} tokens/s alone and {curve.rate(engines.slots):.3g} beside full slots, fitted to "
        f"{how}{off}"
    )
    if prefill > 0.0 or dearest is not None:
        text = f"reading a prompt takes an engine {1e3 * prefill:.3g} ms a token"
        if dearest is not None:
            most = 1e3 * dearest.prefill_seconds_per_token
            text += f"; the record leaves open up to {most:.3g} ms, which the intervals hold"
        measured.append(text)
    return _with(engines, curve, prefill), error, dearest


def _with(engines: Engines, curve: LawCurve, prefill: float) -> Engines:
    return engines.model_copy(update={"decode": curve, "prefill_seconds_per_token": prefill})


def _observed(steps: Sequence[StepGroups], source: str) -> list[Observed]:
    """What the engines were seen to do; empty if neither groups' ends nor a step's generation are known."""
    timed: list[list[tuple[float, float]]] = []
    for step in steps:
        spans = []
        for group in step.rollouts:
            starts = [one.start for one in group if one.start is not None]
            ends = [one.end for one in group if one.end is not None]
            if len(starts) == len(ends) == len(group):
                spans.append((min(starts), max(ends)))
        timed.append(spans)
    if all(len(spans) == len(step.groups) for spans, step in zip(timed, steps, strict=True)):
        if source != "bounded":
            return [_batch([step], [spans], at_once=True) for step, spans in zip(steps, timed, strict=True)]
        return [_batch(steps, timed, at_once=False)]
    if source == "bounded" or any(not one.step.generation for one in steps):
        return []
    return [Observed(one.groups, (0.0,) * len(one.groups), (one.step.generation or 0.0,)) for one in steps]


def _batch(steps: Sequence[StepGroups], timed: Sequence[Sequence[tuple[float, float]]], *, at_once: bool) -> Observed:
    """One batch of all ``steps``; ``at_once``: a period's prompts go out together, whenever a slot took them."""
    rows = [
        (start, end, group)
        for step, spans in zip(steps, timed, strict=True)
        for (start, end), group in zip(spans, step.groups, strict=True)
    ]
    rows.sort(key=lambda row: row[0])
    first = rows[0][0]
    starts = tuple(0.0 if at_once else start - first for start, _, _ in rows)
    return Observed(tuple(group for *_, group in rows), starts, tuple(max(1e-9, end - first) for _, end, _ in rows))


def _by_steps(seconds: Callable[[LawCurve], float], half: float, wanted: float, assumed: list[str]) -> LawCurve:
    """The slowest curve with which the simulated run takes no longer than the recorded one."""

    def taken(logarithm: float) -> float:
        return seconds(LawCurve(tokens_per_second=float(np.exp(logarithm)), half=half))

    low, high = float(np.log(1e-2)), float(np.log(1e7))
    if taken(high) >= 0.99 * wanted:
        assumed.append("generation was never waited for, so that its speed is only known to be enough")
        wanted = 1.01 * taken(high)
    while high - low > 1e-3:
        middle = (low + high) / 2.0
        low, high = (low, middle) if taken(middle) <= wanted else (middle, high)
    return LawCurve(tokens_per_second=float(np.exp(high)), half=half)
