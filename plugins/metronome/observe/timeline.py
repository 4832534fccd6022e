"""The timeline of a run: a lane for the trainer and each worker, with the bubbles drawn and written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from metronome.observe.figures import KINDS, Panel, Table, axis, layout, pattern, shown
from metronome.observe.lanes import REST, TRAINER, Lane, Lanes, Stretches, union
from metronome.observe.measures import Measured
from metronome.observe.words import MISSING, duration, number, percent, several

LANES = 24
"""Lanes that are drawn; the others are in the table."""
BARS = 4000
"""Bars that are drawn; later steps are left out where there would be more."""
FIRST = 8
"""Steps that are in view at first where a run has more than half as many again."""


@dataclass(frozen=True)
class Drawn:
    """What of a run's timeline is drawn.

    Attributes:
        bars: (lane, kind, start, end).
        steps: how many of the run's first steps.
        gap: seconds; shorter gaps within a lane are closed.
    """

    bars: tuple[tuple[Lane, str, float, float], ...]
    steps: int
    gap: float


def panel(one: Measured, key: str) -> Panel | None:
    """The timeline of a run, its first steps in view; None for a record without clock times."""
    if one.lanes is None:
        return None
    lanes = one.lanes
    drawn = _drawn(lanes)
    first = float(lanes.windows.starts[0])
    in_view = drawn.steps if drawn.steps <= 1.5 * FIRST else FIRST
    figure = {
        "data": _traces(drawn),
        "layout": layout(
            axis("seconds from the run's start", range=[first, float(lanes.windows.ends[in_view - 1])]),
            axis(
                "",
                type="category",
                categoryorder="array",
                categoryarray=[_lane_name(lane) for lane in lanes.lanes[:LANES]],
                autorange="reversed",
                fixedrange=True,
                showgrid=False,
            ),
            height=150 + 44 * min(LANES, len(lanes.lanes)),
            barmode="overlay",
            bargap=0.25,
            shapes=[
                {
                    "type": "line",
                    "x0": x,
                    "x1": x,
                    "y0": 0,
                    "y1": 1,
                    "yref": "paper",
                    "line": {"width": 1, "dash": "dot"},
                }
                for x in lanes.windows.starts[: drawn.steps].tolist()
            ],
        ),
    }
    rows = tuple(
        (lane.name, KINDS.get(kind, (kind,))[0], f"{start:.3f}", f"{stop:.3f}", f"{stop - start:.3f}")
        for lane, kind, start, stop in drawn.bars
    )
    return Panel(
        key,
        "Timeline",
        "What the trainer and each worker did, and when. The hatched stretches are idle (bubbles); their share of the "
        "steps is written beside each lane. Dotted lines are where steps begin.",
        "Timeline. "
        + " ".join(f"{lane.name}: idle {percent(lane.idle_share)} of the steps' time." for lane in lanes.lanes[:LANES]),
        figure,
        Table("Stretches drawn", ("Lane", "What", "Start, s", "End, s", "Seconds"), rows),
        _notes(one, lanes, drawn),
        tuple(
            (f"Step {step}", float(lanes.windows.starts[index]), float(lanes.windows.ends[index]))
            for index, step in enumerate(lanes.steps[: drawn.steps])
        ),
        wide=True,
    )


def lane_table(one: Measured) -> Table | None:
    """Busy and idle time of every lane; None for a record without clock times."""
    if one.lanes is None:
        return None
    rows = tuple(
        (
            lane.name,
            percent(lane.idle_share),
            duration(float((lane.idle.ends - lane.idle.starts).sum())),
            number(len(lane.idle.starts)),
            duration(float((lane.idle.ends - lane.idle.starts).max(initial=0.0))),
            "" if lane.name == TRAINER else number(lane.in_flight),
        )
        for lane in one.lanes.lanes
    )
    headers = ("Lane", "Idle share", "Idle time", "Idle stretches", "Longest one", "In progress at once, mean")
    return Table(f"Idle time of {one.label}", headers, rows)


def _drawn(lanes: Lanes) -> Drawn:
    """The first steps' bars, as many steps as keep to ``BARS``; gaps are closed until at least one step does."""
    ends = lanes.windows.ends
    gap = max(1e-6, float(np.median(ends - lanes.windows.starts)) / 1000)
    while True:
        merged = _merged(lanes, gap)
        starts = np.sort(np.concatenate([stretches.starts for _, _, stretches in merged]))
        if len(starts) <= BARS:
            steps = len(ends)
            break
        steps = int(np.searchsorted(ends, starts[BARS], "right"))
        if steps:
            break
        gap *= 2
    limit = float(ends[steps - 1]) if steps < len(ends) else np.inf
    bars = tuple(
        (lane, kind, start, min(end, limit))
        for lane, kind, stretches in merged
        for start, end in zip(stretches.starts.tolist(), stretches.ends.tolist(), strict=True)
        if start < limit
    )
    return Drawn(bars, steps, gap)


def _merged(lanes: Lanes, gap: float) -> list[tuple[Lane, str, Stretches]]:
    return [
        (lane, kind, stretches)
        for lane in lanes.lanes[:LANES]
        for kind, stretches in [
            *((kind, union(one.starts, one.ends, gap)) for kind, one in lane.kinds.items()),
            ("idle", _longer(lane.idle, gap)),
        ]
    ]


def _longer(stretches: Stretches, seconds: float) -> Stretches:
    keep = stretches.ends - stretches.starts > seconds
    return Stretches(stretches.starts[keep], stretches.ends[keep])


def _traces(drawn: Drawn) -> list[dict[str, Any]]:
    kinds = list(dict.fromkeys([*(kind for kind in KINDS if kind != "idle"), *(bar[1] for bar in drawn.bars), "idle"]))
    traces = []
    for kind in kinds:
        bars = [bar for bar in drawn.bars if bar[1] == kind]
        if not bars:
            continue
        word, colour, shape, size = KINDS.get(kind, (kind, *KINDS["other"][1:]))
        marker = pattern(colour, shape, size)
        if kind == "idle":
            marker = {
                "color": "rgba(0,0,0,0)",
                "line": {"color": colour, "width": 1},
                "pattern": {"shape": shape, "fillmode": "replace", "fgcolor": colour, "size": size, "solidity": 0.15},
            }
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": shown(word),
                "y": [_lane_name(lane) for lane, *_ in bars],
                "base": [round(start, 4) for _, _, start, _ in bars],
                "x": [round(end - start, 4) for _, _, start, end in bars],
                "marker": marker,
                "hovertemplate": f"{shown(word)}: %{{x:.3f}} s from %{{base:.3f}} s<extra></extra>",
            }
        )
    return traces


def _lane_name(lane: Lane) -> str:
    return f"{shown(lane.name)}<br>idle {percent(lane.idle_share)}"


def _notes(one: Measured, lanes: Lanes, drawn: Drawn) -> tuple[str, ...]:
    notes = []
    names = {lane.name for lane in lanes.lanes}
    if names == {TRAINER}:
        notes.append("The workers' times were not recorded: only the trainer has a lane.")
    if TRAINER not in names:
        notes.append("The trainer's times were not recorded: only workers have lanes.")
    notes += _idle_notes(one, lanes)
    if len(lanes.lanes) > LANES:
        notes.append(f"{LANES} of {len(lanes.lanes)} lanes are drawn; the table of idle time has all.")
    if drawn.steps < len(lanes.steps):
        notes.append(
            f"Only the first {several(drawn.steps, 'step')} of {len(lanes.steps):,} are drawn; shares are over all."
        )
    if len(lanes.steps) < len(one.run.steps):
        missing = len(one.run.steps) - len(lanes.steps)
        notes.append(f"{several(missing, 'step')} without clock times: {MISSING}.")
    notes.append(f"Gaps shorter than {1000 * drawn.gap:.3g} ms are not drawn; the shares count them.")
    return tuple(notes)


def _idle_notes(one: Measured, lanes: Lanes) -> list[str]:
    """What the lanes' idle shares count, where the records leave it open."""
    trainer = next((lane for lane in lanes.lanes if lane.name == TRAINER), None)
    if trainer is None:
        return []
    rest, whole = trainer.kinds.get(REST), float((lanes.windows.ends - lanes.windows.starts).sum())
    if rest is not None and len(rest.starts):
        share = float((rest.ends - rest.starts).sum()) / whole
        return [
            f"No recorded part names {percent(share)} of the steps' time. It isn't counted as idle in the trainer's "
            "lane; in a worker's it is, as time outside its generation."
        ]
    waited = one.trainer_idle_share
    if one.of("waiting") and waited is not None and abs(waited - trainer.idle_share) > 0.01:
        return [
            f"The run recorded {percent(waited)} of waiting, which the summary has; the trainer's lane leaves "
            f"{percent(trainer.idle_share)}: some of its work has no span."
        ]
    return []
