"""Small simulated clusters whose training takes a chosen multiple of their generation.

What they give is simulated: lengths lognormal, one decoding speed whatever runs beside, a trainer that scales without
loss unless said. Needs simpy.
"""

from __future__ import annotations

from typing import Any

from metronome.simulate import Cluster, Outcome, Policy, simulate

SIGMA = 0.6  # of the logarithm of response lengths
SLOTS = 256
TOKENS_PER_SECOND = 50.0  # of each sequence; only ratios of times are used


def cluster(
    prompts: int,
    group_size: int,
    *,
    slots: int = SLOTS,
    engines: int = 1,
    ranks: int = 1,
    efficiency: float = 1.0,
    seconds_per_token: float = 1e-6,
    sigma: float = SIGMA,
    steps: int = 4,
) -> Cluster:
    """A cluster without prompt time, publication or failures: what is left is generation and training."""
    keys: dict[str, Any] = {
        "engines": {
            "count": engines,
            "slots": slots,
            "decode": {"kind": "points", "points": [[1, TOKENS_PER_SECOND]]},
        },
        "trainer": {"ranks": ranks, "seconds_per_token": seconds_per_token, "efficiency": efficiency},
        "lengths": {"kind": "lognormal", "median": 1000, "sigma": sigma, "cap": 1_000_000},
        "prompts_per_step": prompts,
        "group_size": group_size,
        "prompt_tokens": 1,
        "steps": steps,
    }
    return Cluster.model_validate(keys)


def balanced(of: Cluster, training_over_generation: float = 1.0, source: Any = "synchronous") -> Cluster:
    """``of`` with a trainer whose seconds are this multiple of the generation's.

    Generation is what a run of ``source`` takes whose training takes no time; for a synchronous one it is the same with
    any trainer.
    """
    steps = run(_trained_in(of, 1e-6), source).steps
    ratio = sum(step.seconds for step in steps) / sum(step.training for step in steps)
    return _trained_in(of, 1e-6, ratio * training_over_generation)


def _trained_in(of: Cluster, fraction: float, factor: float = 1.0) -> Cluster:
    seconds = of.trainer.seconds_per_token * fraction * factor
    return of.model_copy(update={"trainer": of.trainer.model_copy(update={"seconds_per_token": seconds})})


def run(of: Cluster, source: Any, **policy: Any) -> Outcome:
    """One policy simulated on a cluster."""
    return simulate(of, Policy(source=source, **policy))


def overlap(prompts: int, group_size: int, training_over_generation: float = 1.0, **keys: Any) -> float:
    """Seconds of the synchronous run over those of the periodic one, on the same split of devices."""
    of = balanced(cluster(prompts, group_size, **keys), training_over_generation)
    return run(of, "synchronous").seconds / run(of, "periodic").seconds
