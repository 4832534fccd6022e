"""The staleness histogram: versions between the weights that sampled a rollout and those in training with it."""

from __future__ import annotations

from collections.abc import Sequence

from metronome.observe.by_step import Subject, panel_of
from metronome.observe.figures import Panel, Table, axis, filled, layout, shown
from metronome.observe.measures import STALENESS, Measured
from metronome.observe.words import number, percent, several

_BY_STEP = Subject(
    "staleness",
    "Staleness by step",
    "Versions between sampling and training, the mean of each step as the host recorded it. The versions of single "
    "rollouts were not recorded, so there is no histogram.",
    "versions",
    lambda one: [("", one.metric(STALENESS))],
)


def panel(runs: Sequence[Measured]) -> Panel | None:
    """The histogram over rollouts; the mean by step where no run recorded versions; None where there is neither."""
    having = [(index, run) for index, run in enumerate(runs) if run.counts.staleness]
    if not having:
        return panel_of(_BY_STEP, runs)
    values = sorted({value for _, run in having for value in run.counts.staleness})
    shares = {
        index: [run.counts.staleness[value] / run.counts.staleness.total() for value in values] for index, run in having
    }
    written = len(values) * len(having) <= 8  # more bars are too narrow for it
    figure = {
        "data": [
            {
                "type": "bar",
                "name": shown(run.label),
                "x": values,
                "y": shares[index],
                "text": [percent(share) if share and written else "" for share in shares[index]],
                "textposition": "outside",
                "cliponaxis": False,
                "marker": filled(index),
            }
            for index, run in having
        ],
        "layout": layout(
            axis(
                "versions",
                tickformat="d",
                dtick=max(1, (values[-1] - values[0]) // 8),
                range=[values[0] - 0.6, values[-1] + 0.6],
            ),
            axis("share of rollouts", tickformat=".0%", range=[0, 1.15 * max(map(max, shares.values()))]),
            barmode="group",
            bargap=0.3,
            showlegend=len(runs) > 1,
        ),
    }
    notes = [f"{run.label}: not recorded." for run in runs if not run.counts.staleness]
    notes += [
        f"{run.label}: {several(run.counts.without_version, 'rollout')} of unknown version left out."
        for _, run in having
        if run.counts.without_version
    ]
    rows = tuple(
        (
            number(value),
            *(
                cell
                for index, run in having
                for cell in (number(run.counts.staleness[value]), percent(shares[index][row]))
            ),
        )
        for row, value in enumerate(values)
    )
    headers = ("Versions", *(f"{name}, {run.label}" for _, run in having for name in ("Rollouts", "Share")))
    return Panel(
        "staleness",
        "Staleness",
        "Versions of the weights between those that sampled a rollout's first token and those in training when it was "
        "trained; 0 is fresh.",
        "Histogram of staleness. "
        + " ".join(
            f"{run.label}: mean {number(run.mean_staleness)}, largest {max(run.counts.staleness)}, "
            f"{percent(run.counts.staleness[0] / run.counts.staleness.total())} of rollouts fresh."
            for _, run in having
        ),
        figure,
        Table("Staleness", headers, rows),
        tuple(notes),
    )
