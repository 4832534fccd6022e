"""Rows of the survey of sixteen libraries: generation times, and the bound on staleness."""

from __future__ import annotations

import random
from collections.abc import Mapping

from metronome.contracts import Flow, Verdict
from metronome.periodic import sources
from metronome.reproduce.rows import Row, Way, between, exactly, near

TECHNIQUE = "Buffers and staleness (survey)"
SURVEY = "Hugging Face blog, Keep the Tokens Flowing (10 March 2026)"

ROLLOUTS = 512
RATES = {"7B": 6300.0, "32B": 1200.0}  # tokens a second of one H100, the survey's
SECONDS = {"min": 60.0, "h": 3600.0}
TABLE = (  # model, thousands of tokens, the survey's time, its unit
    ("7B", 2, 3.0, "min"),
    ("7B", 8, 11.0, "min"),
    ("7B", 32, 45.0, "min"),
    ("32B", 2, 14.0, "min"),
    ("32B", 8, 56.0, "min"),
    ("32B", 32, 3.7, "h"),
)
THOUSAND = 1024


def generation_seconds(rollouts: int, length: int, tokens_per_second: float) -> float:
    """Seconds to sample ``rollouts`` responses of ``length`` tokens: rollouts * length / rate."""
    return rollouts * length / tokens_per_second


def _name(model: str, thousands: int) -> str:
    return f"{model}, {thousands}K tokens"


def times() -> Mapping[str, float]:
    """The survey's table by arithmetic, K = 1,024."""
    return {
        _name(model, thousands): generation_seconds(ROLLOUTS, thousands * THOUSAND, RATES[model]) / SECONDS[unit]
        for model, thousands, _, unit in TABLE
    }


def admission() -> Mapping[str, float]:
    """The published admission formula against the shipped source's window form, over seeded counts.

    Published: (max_staleness + version + 1) * batch - (accepted + running) over the whole run, where accepted
    counts what was trained in earlier versions too.
    """
    chance, different, stuck = random.Random(0), 0, 0
    for _ in range(2000):
        bound, version, batch = chance.randrange(5), chance.randrange(50), chance.randrange(1, 65)
        source = sources.Bounded(bound)
        trained = chance.randrange(batch + 1)
        queued = chance.randrange(2 * batch)
        running = chance.randrange(2 * batch)
        accepted = version * batch + trained + queued
        published = max(0, (bound + version + 1) * batch - (accepted + running))
        found = source.capacity(Flow(version, batch, running=running, queued=queued, trained=trained))
        different += found != published
        stuck += sources.Bounded(0).capacity(Flow(version, batch)) != batch
    return {"capacities that differ": different, "max_staleness 0 without progress": stuck}


def staleness_bound() -> Mapping[str, float]:
    """The oldest token that each bound lets pass: staleness is measured when a group is trained."""
    found = {}
    for bound in (0, 1, 2, 4, 8):
        source, training = sources.Bounded(bound), 20
        passed = [d for d in range(training) if source.verdict([training - d, training], training) is Verdict.TRAIN]
        found[f"bound {bound}"] = float(max(passed))
    return found


def staleness_simulated() -> Mapping[str, float]:
    """The stalest rollout that a simulated run trains, and what its trainer waits, by the bound."""
    from metronome.reproduce import clusters

    of = clusters.balanced(clusters.cluster(64, 8, steps=12))
    found = {}
    for bound in (0, 1, 2, 4):
        outcome = clusters.run(of, "bounded", max_staleness=bound)
        found[f"stalest, bound {bound}"] = float(max(outcome.staleness))
        if bound < 2:
            found[f"trainer idle, bound {bound}"] = outcome.trainer_idle
    return found


def _timed(model: str, thousands: int, value: float, unit: str) -> tuple[str, float, float, str]:
    return _name(model, thousands), value, max(0.05 * value, 0.5 if unit == "min" else 0.0), unit


ROWS = (
    Row(
        "survey-generation-time",
        TECHNIQUE,
        "512 rollouts of one H100 take this long",
        f"{SURVEY}, the table of generation times",
        Way.ARITHMETIC,
        tuple(
            near(name, value, margin, unit, paper=value)
            for name, value, margin, unit in (_timed(*entry) for entry in TABLE)
        ),
        "512 * L / rate with K = 1,024. Tolerance 5 % or half a minute: the table is rounded and doesn't say which K. "
        "32B at 32K is 3.88 h (3.79 h with K = 1,000) where the table prints 3.7.",
        times,
    ),
    Row(
        "survey-admission",
        TECHNIQUE,
        "capacity = (max_staleness + version + 1) * batch - (accepted + running)",
        "arXiv 2505.24298 and its released code",
        Way.ARITHMETIC,
        (exactly("capacities that differ", 0.0), exactly("max_staleness 0 without progress", 0.0)),
        "Ours counts the window only, so that it survives a resume; 2,000 seeded states, never below 0.",
        admission,
    ),
    Row(
        "survey-staleness-bound",
        TECHNIQUE,
        "the effective bound is the bound that was asked for",
        "ours (a group's oldest token decides, measured when it is trained)",
        Way.ARITHMETIC,
        tuple(exactly(f"bound {bound}", float(bound)) for bound in (0, 1, 2, 4, 8)),
        "The time in the queue counts. The survey's per-library policies aren't rows: they are lists of features.",
        staleness_bound,
    ),
    Row(
        "survey-staleness-simulated",
        TECHNIQUE,
        "a bounded queue of one more batch keeps the trainer busy; staleness stays within the bound",
        "ours",
        Way.SIMULATION,
        (
            *(exactly(f"stalest, bound {bound}", float(bound)) for bound in (0, 1, 2, 4)),
            between("trainer idle, bound 0", 0.10, 0.25, "%"),
            between("trainer idle, bound 1", 0.0, 0.05, "%"),
        ),
        "Simulated: 64 x 8 lognormal lengths, 256 slots, training as long as generation, 12 steps.",
        staleness_simulated,
        needs=("simpy",),
    ),
)
