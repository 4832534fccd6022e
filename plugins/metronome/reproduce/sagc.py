"""Rows of SAGC, straggler-aware group control (arXiv 2606.02218): rates and choices; hours stand in ``sagc_hours``."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from metronome.reproduce.rows import Figure, Row, Way, at_least, at_most, between, exactly, near
from metronome.reproduce.stragglers import CALIBRATED, MODEL, SIZES, STEPS, control, fixed_rate, lengths
from metronome.sagc import events, options

TECHNIQUE = "SAGC"
PAPER = "arXiv 2606.02218"
RATE_BEFORE, RATE_AFTER = 0.996, 0.434  # the paper's row


def rates() -> Mapping[str, float]:
    """p(S | G) by the shipped event."""
    return {f"G = {size}": fixed_rate(size) for size in SIZES}


def conventions() -> Mapping[str, float]:
    """The rates that two other conventions would give: the lower middle as the median, and any group."""
    found = {}
    for size in SIZES:
        ordered = np.sort(lengths(size), -1)
        lower = ordered[..., -1] / ordered[..., (size - 1) // 2]
        found[f"lower middle, G = {size}"] = float((lower.mean(-1) > 2.0).mean())
        largest = np.array([[events.straggler_ratio(own) for own in one] for one in lengths(size, 1000).tolist()])
        found[f"any group, G = {size}"] = float((largest.max(-1) > 2.0).mean())
    return found


def convergence() -> Mapping[str, float]:
    """The rate in the second half of a run against delta."""
    found = {}
    for delta in (0.3, 0.4, 0.43):
        run = control(delta=delta)
        found[f"delta {delta:g}, second half"] = float(run.events[STEPS // 2 :].mean())
    return found


def calibrated() -> Mapping[str, float]:
    """The paper's row between two values of delta."""
    return {
        "fixed G = 16": fixed_rate(16),
        "controlled, delta 0.40": control(delta=0.40).rate,
        "controlled, delta 0.43": control(delta=0.43).rate,
    }


def hull() -> Mapping[str, float]:
    """What the line from 4 to 16 gives at the rate of 8, in bits, and how often 8 is used all the same."""
    p = {size: fixed_rate(size) for size in SIZES}
    worth = {size: options.utility("log2", size) for size in SIZES}
    line = worth[4] + (worth[16] - worth[4]) * (p[8] - p[4]) / (p[16] - p[4])
    return {
        "line from 4 to 16 at the rate of 8, less log2 8": line - worth[8],
        "share of steps at 8": control(delta=0.4, min_dwell=1).share(8),
    }


def dwell() -> Mapping[str, float]:
    """Switches and rates without and with ``min_dwell``."""
    free, held = control(delta=0.4, min_dwell=1), control(delta=0.4, min_dwell=5)
    return {
        "switches, min_dwell 1": float(free.switched.mean()),
        "switches, min_dwell 5": float(held.switched.mean()),
        "difference of the rates": abs(free.rate - held.rate),
    }


def infeasible() -> Mapping[str, float]:
    """The event of any group, without the fallback and with it."""
    steps = 1500
    worst = {}
    for size in SIZES:
        ratios = [[events.straggler_ratio(own) for own in one] for one in lengths(size, steps).tolist()]
        view = np.full((steps, 1, size), 1000)
        view[..., -1] = np.rint(1000 * np.max(ratios, -1))[:, None]
        worst[size] = view
    bare = control(worst, infeasible_after=10**6)
    guarded = control(worst)
    first = int(guarded.infeasible.argmax())
    return {
        "rate without the fallback": bare.rate,
        "mean G without the fallback, after 500 steps": float(bare.sizes[500:].mean()),
        "step at which the fallback acts": float(first),
        "share at the smallest size from there": float((guarded.sizes[first + 1 :] == SIZES[0]).mean()),
    }


def degenerate() -> Mapping[str, float]:
    """Share of groups whose rewards are all alike, from the DAPO-aware utility, at a success rate of 0.18."""
    found = {}
    for size in (2, 4, 8, 16):
        bits = options.utility("dapo", size, 0.18) - options.utility("log2", size)
        found[f"G = {size}"] = 1.0 - 2.0**bits
    return found


def traps() -> Mapping[str, float]:
    """What the event says where it is blind."""
    pairs = np.random.default_rng(0).integers(1, 100_000, (2000, 2)).tolist()
    return {
        "largest ratio of 2,000 pairs": max(events.straggler_ratio(pair) for pair in pairs),
        "ratio of a group cut as a whole": events.straggler_ratio([4096] * 16),
        "ratio of empty responses": events.straggler_ratio([0] * 8),
    }


def _rates(prefix: str, values: tuple[float, float, float], margin: float) -> tuple[Figure, ...]:
    return tuple(near(f"{prefix}G = {size}", value, margin, "%") for size, value in zip(SIZES, values, strict=True))


ROWS = (
    Row(
        "sagc-straggler-rates",
        TECHNIQUE,
        "how often a step straggles at each fixed G",
        "ours",
        Way.SIMULATION,
        _rates("", (0.118, 0.665, 0.9875), 0.02),
        f"{MODEL} Event: mean over groups of max/median above tau, the median of an even number being the mean of the "
        "two middle values.",
        rates,
    ),
    Row(
        "sagc-conventions",
        TECHNIQUE,
        "two other readings of the event can't be controlled: the lower middle as the median, and any group",
        "ours",
        Way.SIMULATION,
        (*_rates("lower middle, ", (0.567, 0.873, 0.996), 0.025), *_rates("any group, ", (0.874, 0.994, 1.0), 0.03)),
        f"{MODEL} The lower middle is torch.median's. At the smallest size both are above delta 0.3.",
        conventions,
    ),
    Row(
        "sagc-convergence",
        TECHNIQUE,
        "the long-run rate of stragglers goes to delta",
        f"{PAPER}, E[S | G] <= delta by dual ascent",
        Way.SIMULATION,
        tuple(near(f"delta {delta:g}, second half", delta, 0.035, "%") for delta in (0.3, 0.4, 0.43)),
        f"{MODEL} Shipped defaults but for delta, steps 2,000 to 4,000. The excess is lambda's climb and fades.",
        convergence,
    ),
    Row(
        "sagc-99.6-43.4",
        TECHNIQUE,
        "Llama-3.2-3B with DAPO: steps with stragglers 99.6 % (fixed 16) -> 43.4 %",
        f"{PAPER}, its row of Llama-3.2-3B and DAPO",
        Way.SIMULATION,
        (
            near("fixed G = 16", RATE_BEFORE, 0.015, "%", paper=RATE_BEFORE),
            between("controlled, delta 0.40", RATE_AFTER - 0.04, RATE_AFTER, "%", paper=RATE_AFTER),
            between("controlled, delta 0.43", RATE_AFTER, RATE_AFTER + 0.02, "%", paper=RATE_AFTER),
        ),
        f"{CALIBRATED} It brackets the row and reproduces nothing. {MODEL}",
        calibrated,
    ),
    Row(
        "sagc-hull",
        TECHNIQUE,
        "G = 8 isn't on the concave hull: a pure arg-max would jump between 4 and 16",
        "ours",
        Way.SIMULATION,
        (
            between("line from 4 to 16 at the rate of 8, less log2 8", 0.1, 0.4),
            at_least("share of steps at 8", 0.15, "%"),
        ),
        f"In bits. {MODEL} Neighbours and sampling keep 8 in use.",
        hull,
    ),
    Row(
        "sagc-dwell",
        TECHNIQUE,
        "min_dwell 5 switches less at the same rate",
        "ours",
        Way.SIMULATION,
        (
            near("switches, min_dwell 1", 0.37, 0.04, "%"),
            near("switches, min_dwell 5", 0.126, 0.015, "%"),
            at_most("difference of the rates", 0.015, "%"),
        ),
        f"{MODEL} At delta 0.4; where lambda is at its cap dwelling isn't free.",
        dwell,
    ),
    Row(
        "sagc-infeasible",
        TECHNIQUE,
        "an event that no size can keep below delta saturates lambda; the fallback takes the smallest size",
        "ours",
        Way.SIMULATION,
        (
            near("rate without the fallback", 0.97, 0.03, "%"),
            at_least("mean G without the fallback, after 500 steps", 7.0),
            between("step at which the fallback acts", 100.0, 300.0),
            at_least("share at the smallest size from there", 0.98, "%"),
        ),
        f"{MODEL} Event: any group of the step straggles, delta 0.3.",
        infeasible,
    ),
    Row(
        "sagc-dapo-filter",
        TECHNIQUE,
        "dynamic sampling filters more groups the smaller they are",
        "ours",
        Way.ARITHMETIC,
        tuple(
            near(f"G = {size}", value, 0.005, "%") for size, value in ((2, 0.705), (4, 0.453), (8, 0.204), (16, 0.042))
        ),
        "p^G + (1 - p)^G at a success rate of 0.18, read off the DAPO-aware utility: smaller G needs more generation.",
        degenerate,
    ),
    Row(
        "sagc-traps",
        TECHNIQUE,
        "where the ratio is blind: two rollouts, and a group cut as a whole",
        "ours",
        Way.ARITHMETIC,
        (
            between("largest ratio of 2,000 pairs", 1.9, 2.0),
            exactly("ratio of a group cut as a whole", 1.0),
            exactly("ratio of empty responses", 1.0),
        ),
        "At tau 2, G = 2 can never straggle; the truncation rate is logged beside the ratio.",
        traps,
    ),
)
