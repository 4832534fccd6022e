"""What a step's seconds went into, for a record without clock times: a stacked bar for each step."""

from __future__ import annotations

from typing import Any

from metronome.observe.figures import KINDS, Panel, Table, axis, fold, layout, pattern
from metronome.observe.measures import Measured
from metronome.observe.words import duration, percent

BARS = 100
PARTS = {
    "generation": "generate",
    "waiting": "idle",
    "training": "train",
    "proximal": "proximal",
    "old_log_probs": "old_log_probs",
    "reference": "reference",
    "optimizer": "step",
    "publication": "publish",
}
"""Attribute of Step -> the kind of span that has its colour and pattern."""


def panel(one: Measured, key: str) -> Panel:
    """Stacked bars of the steps' parts, and what no part names.

    Where waiting is recorded the stack is the trainer's time: generation goes on beside training, so it is a part only
    where the trainer's waiting isn't known.
    """
    series = {part: values for part in PARTS if (values := one.of(part))}
    beside = "generation" in series and "waiting" in series
    if beside:
        del series["generation"]
    steps = list(one.seconds)
    rest = {step: one.seconds[step] - sum(values.get(step, 0.0) for values in series.values()) for step in steps}
    overlap = any(left < -0.01 * one.seconds[step] for step, left in rest.items())
    blocks = fold(steps, BARS)
    stacks: dict[str, tuple[dict[int, float], dict[str, Any]]] = {}
    for part, values in series.items():
        word = "waiting" if part == "waiting" else KINDS[PARTS[part]][0]
        stacks[word] = (values, pattern(*KINDS[PARTS[part]][1:]))
    stacks[KINDS["rest"][0]] = ({step: max(0.0, left) for step, left in rest.items()}, pattern(*KINDS["rest"][1:]))
    heights = {
        word: [sum(values.get(step, 0.0) for step in block) / len(block) for block in blocks]
        for word, (values, _) in stacks.items()
    }
    names = [str(block[0]) if len(block) == 1 else f"{block[0]} to {block[-1]}" for block in blocks]
    figure = {
        "data": [
            {"type": "bar", "name": word, "x": [block[0] for block in blocks], "y": heights[word], "marker": marker}
            for word, (_, marker) in stacks.items()
        ],
        "layout": layout(
            axis("step", tickformat="d", **({"dtick": 1} if steps[-1] - steps[0] <= 10 else {"nticks": 8})),
            axis("seconds", rangemode="tozero"),
            barmode="stack",
        ),
    }
    whole = one.total_seconds
    shares = {word: sum(values.get(step, 0.0) for step in steps) for word, (values, _) in stacks.items()}
    notes = [
        "This record has no clock times, so there is no timeline: the bars are the seconds that each step recorded."
    ]
    if beside:
        notes.append("Generation goes on beside the trainer's work and is no part of the bars.")
    if overlap:
        notes.append("Some parts overlap in the run: they add up to more than the step's seconds.")
    if len(blocks[0]) > 1:
        notes.append(f"Each bar is the mean over {len(blocks[0])} steps, put at the first of them.")
    return Panel(
        key,
        "What the steps' seconds went into",
        "Seconds of each step by their part. Waiting is idle time of the trainer.",
        "Stacked bars by step. "
        + " ".join(
            f"{word}: {duration(seconds)}, {percent(seconds / whole if whole > 0 else None)} of the steps' time."
            for word, seconds in shares.items()
        ),
        figure,
        Table(
            f"Parts of the steps of {one.label}",
            ("Step", *(f"{word}, s" for word in stacks)),
            tuple((name, *(f"{heights[word][row]:.3f}" for word in stacks)) for row, name in enumerate(names)),
        ),
        tuple(notes),
        wide=True,
    )
