"""The panels that show a figure by step, all runs in one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from metronome.observe.figures import Panel, Table, axis, fold, layout, look, shown
from metronome.observe.measures import CLIPPED, COMPUTED, EVENT, RATIO, SEPARATE, TAU, Measured, Series
from metronome.observe.words import MISSING, number, percent, several

POINTS = 500
"""Points of a line and rows of a table; more steps than that are averaged in blocks."""


CONTROLLER = "controller's event"


@dataclass(frozen=True)
class Line:
    """A line of a panel: whose run, what it is (empty for the panel's own subject), its values, not a run's first."""

    run: int
    label: str
    what: str
    values: Series
    further: bool = False


@dataclass(frozen=True)
class Subject:
    """What a panel shows.

    Attributes:
        key, title, text: as in Panel.
        axis: title of the vertical axis, with its unit.
        lines: of one run, (what, values) each; the first without a name.
        write: a value as the table writes it.
        share: whether the axis is a share 0..1.
    """

    key: str
    title: str
    text: str
    axis: str
    lines: Callable[[Measured], list[tuple[str, Series]]]
    write: Callable[[float | None], str] = number
    share: bool = False


SUBJECTS = (
    Subject(
        "reward",
        "Reward by step",
        "Mean over the rollouts that each step generated.",
        "mean reward",
        lambda one: [("", one.rewards)],
    ),
    Subject(
        "seconds",
        "Seconds of a step",
        "From the end of the step before to its own.",
        "seconds",
        lambda one: [("", one.seconds)],
    ),
    Subject(
        "idle",
        "Idle share by step",
        "The trainer's: the share of the step in which it had nothing to train, as the run recorded it, or else what "
        "its lane of the timeline leaves. The workers': the mean over workers of what their lanes leave.",
        "share of the step",
        lambda one: [
            ("trainer", one.trainer_idle),
            ("workers", {} if one.lanes is None else one.lanes.worker_idle),
        ],
        percent,
        share=True,
    ),
    Subject(
        "group-size",
        "Group size G by step",
        "Rollouts of one prompt.",
        "G",
        lambda one: [("", one.group_sizes)],
    ),
    Subject(
        "stragglers",
        "Straggler rate by step",
        f"The share of a step's groups whose longest response has more than {TAU:g} times the tokens of the median one "
        "(the median of an even number is the mean of the two middle ones). Where a group controller recorded its own "
        "event (0 or 1 a step, by its own threshold) it is shown too.",
        "share of groups",
        lambda one: [("", one.straggler_rate), (CONTROLLER, one.metric(EVENT))],
        percent,
        share=True,
    ),
    Subject(
        "straggler-ratio",
        "Straggler ratio by step",
        "Longest over median response, the mean over a step's groups, as the group controller recorded it.",
        "longest / median",
        lambda one: [("", one.metric(RATIO))],
    ),
    Subject(
        "tokens",
        "Tokens of a step",
        "Tokens that went through the model, and those that separate rows would have had, prompts counted.",
        "tokens",
        lambda one: [("through the model", one.metric(COMPUTED)), ("as separate rows", one.metric(SEPARATE))],
    ),
    Subject(
        "sharing",
        "Tokens shared by step",
        "Tokens that separate rows would have had, over the tokens that went through the model: 1 is no sharing.",
        "times fewer tokens",
        lambda one: [("", one.sharing)],
    ),
    Subject(
        "clipped",
        "Clipped fraction by step",
        "The share of trained tokens whose minimum is the clipped branch, as the host recorded it.",
        "share of tokens",
        lambda one: [("", one.metric(CLIPPED))],
        percent,
        share=True,
    ),
)


def panels(runs: Sequence[Measured]) -> tuple[list[Panel], list[str]]:
    """The panels that at least one run has figures for, and the titles of those that none has."""
    made, missing = [], []
    for subject in SUBJECTS:
        panel = panel_of(subject, runs)
        if panel is None:
            missing.append(subject.title)
        else:
            made.append(panel)
    return made, missing


def panel_of(subject: Subject, runs: Sequence[Measured]) -> Panel | None:
    """The panel of ``subject``; None if no run recorded it."""
    lines = [
        Line(index, run.label, what, values, further=place > 0)
        for index, run in enumerate(runs)
        for place, (what, values) in enumerate(subject.lines(run))
        if values
    ]
    if not lines:
        return None
    blocks = fold(sorted({step for line in lines for step in line.values}), POINTS)
    notes = [
        f"{run.label}: {MISSING}." for index, run in enumerate(runs) if not any(line.run == index for line in lines)
    ]
    notes += [
        f"{_name(line, len(runs))} lies exactly on {_name(first, len(runs))}."
        for line in lines
        if (first := _first_equal(line, lines)) is not line
    ]
    if len(blocks[0]) > 1:
        notes.append(f"Each point is the mean over {len(blocks[0])} steps, put at the first of them.")
    drawn = [(line, [_mean(line.values, block) for block in blocks]) for line in lines]
    vertical = axis(subject.axis, rangemode="tozero")
    if subject.share:
        top = max(value for _, values in drawn for value in values if value is not None)
        vertical |= {"tickformat": ".0%" if top >= 0.05 else ".2%", "range": [0, max(1e-3, 1.08 * top)]}
    figure = {
        "data": [_trace(line, values, blocks, len(runs)) for line, values in drawn],
        "layout": layout(
            axis("step", tickformat="d", **_step_ticks(blocks)),
            vertical,
            height=320 + 18 * max(0, len(lines) - 2),  # rows of the legend
            showlegend=len(lines) > 1 or len(runs) > 1 or lines[0].what != "",
        ),
    }
    headers = ("Step", *(_name(line, len(runs)) for line in lines))
    rows = tuple(
        (_block_name(block), *(subject.write(values[row]) if values[row] is not None else "" for _, values in drawn))
        for row, block in enumerate(blocks)
    )
    alternative = f"Line chart, {subject.axis} by step. " + " ".join(
        _summary(line, subject.write, len(runs)) for line in lines
    )
    return Panel(
        subject.key,
        subject.title,
        subject.text,
        alternative,
        figure,
        Table(subject.title, headers, rows),
        tuple(notes),
    )


def _first_equal(line: Line, lines: Sequence[Line]) -> Line:
    """The first line that has the values of ``line`` and covers, or is covered by, it."""
    return next(one for one in lines if one.values == line.values)


def _trace(line: Line, values: list[float | None], blocks: list[list[int]], runs: int) -> dict[str, Any]:
    trace = {
        "x": [block[0] for block in blocks],
        "y": values,
        "name": shown(_name(line, runs)),
        **look(line.run, len(blocks)),
    }
    if line.further:  # the second line of a run: thinner, open markers
        trace["line"] = {**trace["line"], "width": 1.5, "dash": "dot"}
        trace["marker"] = {**trace["marker"], "symbol": f"{trace['marker']['symbol']}-open"}
    if line.what == CONTROLLER:
        trace["mode"] = "markers"
    return trace


def _step_ticks(blocks: list[list[int]]) -> dict[str, Any]:
    """Whole steps on the axis, where plotly would write 0.5 of a step."""
    return {"dtick": 1} if blocks[-1][-1] - blocks[0][0] <= 10 else {"nticks": 8}


def _name(line: Line, runs: int) -> str:
    if runs == 1:
        return line.what or line.label
    return f"{line.label}, {line.what}" if line.what else line.label


def _block_name(block: list[int]) -> str:
    return str(block[0]) if len(block) == 1 else f"{block[0]} to {block[-1]}"


def _mean(values: Series, block: list[int]) -> float | None:
    found = [values[step] for step in block if step in values]
    return sum(found) / len(found) if found else None


def _summary(line: Line, write: Callable[[float | None], str], runs: int) -> str:
    steps = list(line.values)
    low, high = (choose(steps, key=line.values.__getitem__) for choose in (min, max))
    if line.values[low] == line.values[high]:
        return f"{_name(line, runs)}: {write(line.values[low])} in {several(len(steps), 'step')}."
    first, last, lowest, highest = (
        f"{write(line.values[step])} at step {step}" for step in (steps[0], steps[-1], low, high)
    )
    return f"{_name(line, runs)}: {first}, {last}; lowest {lowest}, highest {highest}."
