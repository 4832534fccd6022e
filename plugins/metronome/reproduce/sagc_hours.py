"""Rows of SAGC's hours, at equal steps and at equal rollouts (arXiv 2606.02218); all of them are simulated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from metronome.reproduce.rows import Row, Way, at_least, between, exactly, near, quoted
from metronome.reproduce.sagc import PAPER, TECHNIQUE
from metronome.reproduce.stragglers import CALIBRATED, PROMPTS, SIGMA, SIZES, control
from metronome.sagc import budget, options

ROLLOUTS = 128  # of a step at the largest size
SIMULATED_STEPS, SIMULATED_SLOTS = 800, 8
HOURS_BEFORE, HOURS_AFTER = 29.50, 16.00  # the paper's row


@dataclass(frozen=True)
class Cost:
    """A mean step: its barrier (the longest response), its rollouts and its tokens."""

    barrier: float
    rollouts: float
    tokens: float


def step_cost(kind: budget.Budget, size: int) -> Cost:
    """Prompts differ with sigma 0.5, rollouts of a prompt 0.4, cap 6; continuous batching with a slot for each."""
    chance = np.random.default_rng(200 + size)
    count = budget.prompts(kind, ROLLOUTS, 1, size=size, largest=SIZES[-1])
    of_prompt = 0.5 * chance.standard_normal((8000, count, 1))
    drawn = np.minimum(np.exp(of_prompt + 0.4 * chance.standard_normal((8000, count, size))), 6.0)
    return Cost(float(drawn.max((1, 2)).mean()), float(count * size), float(drawn.sum((1, 2)).mean()))


def visited(kind: budget.Budget) -> tuple[Cost, Cost]:
    """A mean step at the largest size, and one of the sizes that the calibrated controller visits."""
    run = control(delta=0.43)
    costs = {size: step_cost(kind, size) for size in SIZES}
    mean = Cost(
        *(
            sum(run.share(size) * getattr(costs[size], part) for size in SIZES)
            for part in ("barrier", "rollouts", "tokens")
        )
    )
    return costs[SIZES[-1]], mean


def hours_at_equal_steps() -> Mapping[str, float]:
    """The paper's 29.50 h under control, as many steps: if only the barrier counts, and if only tokens do."""
    before, after = visited("fixed_prompts")
    return {
        "barrier-only": HOURS_BEFORE * after.barrier / before.barrier,
        "token-bound": HOURS_BEFORE * after.tokens / before.tokens,
        "speed, barrier-only": before.barrier / after.barrier,
        "speed, token-bound": before.tokens / after.tokens,
        "the paper's hours lie between": float(
            after.tokens / before.tokens < HOURS_AFTER / HOURS_BEFORE < after.barrier / before.barrier
        ),
    }


def hours_at_equal_rollouts() -> Mapping[str, float]:
    """The same with as many rollouts as the fixed size: more steps, or more prompts a step."""
    before, after = visited("fixed_prompts")
    more = before.rollouts / after.rollouts
    full, spread = visited("fixed_rollouts")
    return {
        "fixed_prompts, barrier-only": HOURS_BEFORE * more * after.barrier / before.barrier,
        "fixed_prompts, token-bound": HOURS_BEFORE * more * after.tokens / before.tokens,
        "fixed_rollouts, barrier-only": HOURS_BEFORE * spread.barrier / full.barrier,
        "fixed_rollouts, token-bound": HOURS_BEFORE * spread.tokens / full.tokens,
    }


def hours_simulated() -> Mapping[str, float]:
    """The paper's 29.50 h on a simulated cluster: few slots, and a slot for each rollout."""
    from metronome.reproduce import clusters

    found = {}
    for slots in (SIMULATED_SLOTS, ROLLOUTS):
        of = clusters.cluster(
            PROMPTS, SIZES[-1], slots=slots, sigma=SIGMA, steps=SIMULATED_STEPS, seconds_per_token=1e-9
        )
        fixed = clusters.run(of, "synchronous")
        for kind in ("fixed_prompts", "fixed_rollouts"):
            chosen = options.SagcOptions(sizes=SIZES, delta=0.43, budget=kind)
            ours = clusters.run(of, "synchronous", group_controller="sagc", sagc=chosen)
            steps = HOURS_BEFORE * ours.step_seconds / fixed.step_seconds
            rollouts = HOURS_BEFORE * fixed.rollouts_per_second / ours.rollouts_per_second
            found[f"{kind}, {slots} slots, equal steps"] = steps
            found[f"{kind}, {slots} slots, equal rollouts"] = rollouts
    return found


def budgets() -> Mapping[str, float]:
    """Barrier speed against G = 16 of each smaller size."""
    found = {}
    for size in (8, 4):
        for kind in ("fixed_rollouts", "fixed_prompts"):
            base, own = step_cost(kind, SIZES[-1]), step_cost(kind, size)
            speed = base.barrier / own.barrier
            found[f"{kind}, G = {size}, equal steps"] = speed
            found[f"{kind}, G = {size}, equal rollouts"] = speed * own.rollouts / base.rollouts
    return found


ROWS = (
    Row(
        "sagc-hours-equal-steps",
        TECHNIQUE,
        "29.50 h (fixed 16) -> 16.00 h, at equal steps",
        f"{PAPER}, its row of Llama-3.2-3B and DAPO",
        Way.SIMULATION,
        (
            between("barrier-only", 24.5, 27.0, "h", paper=HOURS_AFTER),
            between("token-bound", 10.9, 14.8, "h", paper=HOURS_AFTER),
            between("speed, barrier-only", 1.1, 1.2, "x", paper=HOURS_BEFORE / HOURS_AFTER),
            between("speed, token-bound", 2.0, 2.7, "x", paper=HOURS_BEFORE / HOURS_AFTER),
            exactly("the paper's hours lie between", 1.0),
        ),
        f"Bracketed, not reproduced: simulated with fixed prompts, so smaller groups mean fewer rollouts. {CALIBRATED} "
        "Prompts differ with sigma 0.5, rollouts of a prompt 0.4.",
        hours_at_equal_steps,
    ),
    Row(
        "sagc-hours-equal-rollouts",
        TECHNIQUE,
        "the same, at equal rollouts",
        f"ours, on the row of {PAPER}",
        Way.SIMULATION,
        (
            at_least("fixed_prompts, barrier-only", HOURS_BEFORE, "h"),
            near("fixed_prompts, token-bound", HOURS_BEFORE, 0.6, "h"),
            between("fixed_rollouts, barrier-only", HOURS_BEFORE, 1.1 * HOURS_BEFORE, "h"),
            near("fixed_rollouts, token-bound", HOURS_BEFORE, 0.6, "h"),
        ),
        "Simulated. No hour is saved at equal rollouts with continuous batching: the paper's gain is mostly fewer "
        "rollouts. "
        f"{CALIBRATED}",
        hours_at_equal_rollouts,
    ),
    Row(
        "sagc-hours-simulated",
        TECHNIQUE,
        "29.50 h (fixed 16) -> 16.00 h on a simulated cluster",
        f"ours, on the row of {PAPER}",
        Way.SIMULATION,
        (
            between("fixed_prompts, 8 slots, equal steps", 13.5, HOURS_AFTER, "h", paper=HOURS_AFTER),
            between("fixed_prompts, 128 slots, equal steps", HOURS_AFTER, 27.0, "h", paper=HOURS_AFTER),
            at_least("fixed_prompts, 8 slots, equal rollouts", HOURS_BEFORE, "h"),
            at_least("fixed_prompts, 128 slots, equal rollouts", HOURS_BEFORE, "h"),
            near("fixed_rollouts, 8 slots, equal steps", HOURS_BEFORE, 1.0, "h"),
            near("fixed_rollouts, 128 slots, equal steps", HOURS_BEFORE, 1.0, "h"),
            near("fixed_rollouts, 8 slots, equal rollouts", HOURS_BEFORE, 1.0, "h"),
            near("fixed_rollouts, 128 slots, equal rollouts", HOURS_BEFORE, 1.0, "h"),
        ),
        "Simulated, generation alone: 128 rollouts at G = 16 on 8 slots (tokens decide) and on 128 (the longest "
        "decides), sigma 0.5, all prompts alike, 800 steps from G = 16. At equal steps the paper's hours lie between "
        f"the two; at equal rollouts none are saved. {CALIBRATED}",
        hours_simulated,
        cheap=False,
        needs=("simpy",),
    ),
    Row(
        "sagc-budgets",
        TECHNIQUE,
        "barrier speed against G = 16, at equal steps and at equal rollouts",
        "ours",
        Way.SIMULATION,
        tuple(
            near(name, value, 0.015, "x")
            for size, same, faster, dearer in ((8, 0.944, 1.104, 1 / 1.812), (4, 0.908, 1.235, 1 / 3.238))
            for name, value in (
                (f"fixed_rollouts, G = {size}, equal steps", same),
                (f"fixed_rollouts, G = {size}, equal rollouts", same),
                (f"fixed_prompts, G = {size}, equal steps", faster),
                (f"fixed_prompts, G = {size}, equal rollouts", dearer),
            )
        ),
        "Simulated: at equal rollouts smaller groups are slower in the barrier (more distinct prompts).",
        budgets,
    ),
    Row(
        "sagc-hours",
        TECHNIQUE,
        "29.50 h -> 16.00 h measured, competitive rewards, shorter outputs",
        f"{PAPER}, its row of Llama-3.2-3B and DAPO",
        Way.NOT_HERE,
        (quoted("fixed G = 16", HOURS_BEFORE, "h"), quoted("controlled", HOURS_AFTER, "h")),
        "Needs the training of a 3B model, whose batch, lengths, hardware and thresholds aren't public. "
        "Bracketed above.",
    ),
    Row(
        "sagc-evaluation",
        TECHNIQUE,
        "AIME, AMC and GPQA comparable to the best fixed G",
        f"{PAPER}, its evaluation",
        Way.NOT_HERE,
        (),
        "Needs the training of 3B models; the cells of its tables aren't known to us.",
    ),
)
