"""The figures of several simulated policies: one JSON-able mapping, and the tables that show it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from metronome.periodic.closed_form import speed_bound
from metronome.sagc.budget import prompts
from metronome.simulate.cluster import Cluster
from metronome.simulate.outcome import Outcome
from metronome.simulate.policy import Policy
from metronome.simulate.split import Splits


def figures(name: str, cluster: Cluster, outcomes: Sequence[Outcome], splits: Splits) -> dict[str, Any]:
    """JSON-able figures; ratios are against the first outcome, at equal steps and at equal rollouts.

    Seconds, tokens and rollouts per second, shares 0..1.
    """
    first = outcomes[0]
    synchronous = next((one for one in outcomes if one.policy.source == "synchronous"), None)
    return {
        "cluster": name,
        "description": cluster.description,
        "simulated": True,
        "devices": cluster.devices(),
        "engines": cluster.engines.count,
        "ranks": cluster.trainer.ranks,
        "steps": len(first.steps),
        "seed": cluster.seed,
        "periodic_bound": None if synchronous is None else _bound(synchronous),
        "policies": [_policy(one, first, cluster.prompts_per_step * cluster.group_size) for one in outcomes],
        "split": asdict(splits),
    }


def _bound(outcome: Outcome) -> float:
    """The most that periodic asynchrony can gain over this synchronous run, from its mean T_i and T_t."""
    generation = float(np.mean([step.generation for step in outcome.steps]))
    training = float(np.mean([sum(step.work) for step in outcome.steps]))
    return speed_bound(generation, training)


def _prompts(policy: Policy, budget: int) -> dict[str, int]:
    """Prompts of a step at each G that SAGC may choose; empty without it."""
    if policy.group_controller != "sagc":
        return {}
    sizes = policy.sagc.sizes
    return {str(one): prompts(policy.sagc.budget, budget, 1, size=one, largest=sizes[-1]) for one in sizes}


def _policy(outcome: Outcome, first: Outcome, budget: int) -> dict[str, Any]:
    steps = outcome.steps
    return {
        "label": outcome.policy.label(),
        "policy": outcome.policy.model_dump(),
        "step_seconds": outcome.step_seconds,
        "rollouts_per_second": outcome.rollouts_per_second,
        "tokens_per_second": outcome.tokens_per_second,
        "ratio_at_equal_steps": first.step_seconds / outcome.step_seconds,
        "ratio_at_equal_rollouts": outcome.rollouts_per_second / first.rollouts_per_second,
        "rollout_idle": outcome.rollout_idle,
        "slots_idle": outcome.slots_idle,
        "trainer_idle": outcome.trainer_idle,
        "staleness": {str(key): count for key, count in outcome.staleness.items()},
        "dropped_groups": outcome.dropped,
        "unfinished_groups": outcome.unfinished,
        "restarted_rollouts": outcome.restarted,
        "tail_ratio": float(np.mean([step.tail_ratio for step in steps])),
        "tail_seconds": float(np.mean([step.tail_seconds for step in steps])),
        "group_sizes": list(outcome.group_sizes),
        "rollouts_per_step": outcome.rollouts / len(steps),
        "prompts_by_size": _prompts(outcome.policy, budget),
        "seconds": [step.seconds for step in steps],
    }


def print_figures(result: dict[str, Any]) -> None:
    """Prints two tables and the split in words."""
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    console.print(f"{result['cluster']}: {result['description']}".rstrip(": "))
    console.print(
        f"simulated, not measured: {result['engines']} engines and {result['ranks']} trainer ranks on "
        f"{result['devices']} devices, {result['steps']} step(s), seed {result['seed']}\n"
    )
    rows = result["policies"]
    heads = ["policy", "s/step", "x, steps", "rollouts/s", "x, rollouts", "tokens/s"]
    cells = [
        [
            row["label"],
            f"{row['step_seconds']:.1f}",
            f"{row['ratio_at_equal_steps']:.2f}",
            f"{row['rollouts_per_second']:.2f}",
            f"{row['ratio_at_equal_rollouts']:.2f}",
            f"{row['tokens_per_second']:,.0f}",
        ]
        for row in rows
    ]
    console.print(_table(heads, cells))
    console.print()
    heads = ["policy", "idle: engines", "slots", "trainer", "tail, x", "tail, s", "mean G"]
    cells = [
        [
            row["label"],
            f"{row['rollout_idle']:.0%}",
            f"{row['slots_idle']:.0%}",
            f"{row['trainer_idle']:.0%}",
            f"{row['tail_ratio']:.1f}",
            f"{row['tail_seconds']:.1f}",
            f"{sum(row['group_sizes']) / len(row['group_sizes']):.3g}",
        ]
        for row in rows
    ]
    console.print(_table(heads, cells))
    console.print()
    for line in _sentences(result):
        console.print(line)


def _table(heads: list[str], rows: list[list[str]]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column(heads[0], min_width=20)
    for head in heads[1:]:
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def _sizes(sizes: list[int]) -> str:
    """``it was 16 for 4 step(s), 8 for 2``, in the order in which they were chosen first."""
    counts = Counter(sizes)
    first, *others = counts
    if not others:
        return f"it never moved from {first} in {len(sizes)} step(s): simulate more steps"
    return "it was " + ", ".join(
        [f"{first} for {counts[first]} step(s)", *(f"{size} for {counts[size]}" for size in others)]
    )


def _choices(prompts_by_size: dict[str, int]) -> str:
    """``2, 4, 8 with 1,024, 512, 256 prompts a step``; one number where the prompts stay."""
    counts = [f"{count:,}" for count in prompts_by_size.values()]
    return f"{', '.join(prompts_by_size)} with {', '.join(dict.fromkeys(counts))} prompts a step"


def _staleness(counts: dict[str, int]) -> str:
    """``0: 40 %, 1: 60 %``."""
    total = sum(counts.values())
    return ", ".join(f"{key}: {count / total:.0%}".replace("%", " %") for key, count in counts.items())


def _sentences(result: dict[str, Any]) -> list[str]:
    lines = [
        "x is against the first policy: seconds at equal steps, rollouts a second at equal rollouts.",
        "Idle: share of the time without a rollout (engines, slots), without a pass or an optimiser step (trainer).",
        "Tail: longest over median rollout, and seconds from the 95th of a hundred to the last, from their dispatch.",
    ]
    for row in result["policies"]:
        if row["prompts_by_size"]:
            lines.append(
                f"{row['label']}: G is chosen among {_choices(row['prompts_by_size'])}; {_sizes(row['group_sizes'])}."
            )
        if len(row["staleness"]) > 1:
            lines.append(f"Staleness of trained rollouts, {row['label']}: {_staleness(row['staleness'])}.")
        if row["dropped_groups"]:
            lines.append(
                f"{row['label']}: {row['dropped_groups']} group(s) were too stale and went out again. Long "
                "groups are dropped most, so compare tokens a second too."
            )
    restarted = {row["label"]: row["restarted_rollouts"] for row in result["policies"] if row["restarted_rollouts"]}
    if restarted:
        counts = "; ".join(f"{label}: {count}" for label, count in restarted.items())
        lines.append(f"Rollouts begun again after a failure of their engine: {counts}.")
    if result["periodic_bound"] is not None:
        lines.append(
            f"Periodic asynchrony alone gains at most {result['periodic_bound']:.2f}x over synchronous with the "
            "same arrivals here, (T_i + T_t) / max(T_i, T_t), and 2x anywhere; against a colocated "
            "run with free resharding, perfect scaling and no tail, 1.0x (bounds ours)."
        )
    split = result["split"]
    given, fastest, balanced = split["given"], split["fastest"], split["balanced"]
    gain = given["step_seconds"] / fastest["step_seconds"]
    lines.append(
        f"Split for periodic, without failures, over its first {split['steps']} step(s): {len(split['tried'])} of "
        f"{split['feasible']} splits tried, to within {split['grain']} engine(s). The fastest is {_split(fastest)}, "
        f"{gain:.2f}x the given {_split(given)}; nearest to balance is {_split(balanced)}."
    )
    return lines


def _split(split: dict[str, Any]) -> str:
    return f"{split['engines']} engines + {split['ranks']} ranks ({split['step_seconds']:.1f} s/step)"
