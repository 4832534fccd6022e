"""The weight fingerprints of runs as a table: which publications changed the weights, and whether runs agree."""

from __future__ import annotations

from collections.abc import Sequence

from metronome.observe.figures import Table
from metronome.observe.measures import Measured
from metronome.observe.words import MISSING, several

ROWS = 500


def table(runs: Sequence[Measured]) -> tuple[Table | None, tuple[str, ...]]:
    """The table, None where no run recorded anything of its weights, and a sentence for each run."""
    steps = sorted({step for run in runs for step in (*run.fingerprints, *run.weights_changed)})
    if not steps:
        return None, ()
    sentences = [_sentence(run) for run in runs]
    marked = [run for run in runs if run.fingerprints]
    for other in marked[1:]:
        common = sorted(set(marked[0].fingerprints) & set(other.fingerprints))
        equal = sum(marked[0].fingerprints[step] == other.fingerprints[step] for step in common)
        sentences.append(
            f"{other.label} and {marked[0].label}: equal weights after {equal:,} of "
            f"{several(len(common), 'common step')}."
        )
    if len(steps) > ROWS:
        sentences.append(f"The table has the first {ROWS} of {len(steps):,} steps.")
    rows = tuple(
        (
            str(step),
            *(cell for run in runs for cell in (run.fingerprints.get(step, ""), _word(run.weights_changed.get(step)))),
        )
        for step in steps[:ROWS]
    )
    headers = ("Step", *(f"{run.label}: {what}" for run in runs for what in ("fingerprint", "since the one before")))
    return Table("Weights published", headers, rows), tuple(sentences)


def _word(changed: bool | None) -> str:
    return {True: "changed", False: "equal", None: ""}[changed]


def _sentence(run: Measured) -> str:
    changed = run.weights_changed
    if not changed and not run.fingerprints:
        return f"{run.label}: {MISSING}."
    later = " after the first" if run.fingerprints else ""
    counted = several(len(changed), "publication")
    return f"{run.label}: the weights changed at {sum(changed.values()):,} of {counted}{later}."
