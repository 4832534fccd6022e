"""The summary of runs, and whether two runs did the same work, without which no ratio of seconds means anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from metronome.observe.figures import Table
from metronome.observe.measures import Measured
from metronome.observe.words import change, duration, number, percent, several


@dataclass(frozen=True)
class Work:
    """Whether a run did the work of another.

    Attributes:
        same: True, False, or None where the records don't tell.
        sentence: why.
    """

    same: bool | None
    sentence: str

    @property
    def label(self) -> str:
        """What stands beside a ratio."""
        return {True: "same work", False: "different work", None: "work not comparable"}[self.same]


def same_work(first: Measured, other: Measured) -> Work:
    """Whether each step of both trained the same prompts, as often, with as many response tokens in all.

    Prompts are the same if their names (and, where both recorded them, their tokens) are.
    """
    if first.total_rollouts is None or other.total_rollouts is None:
        lacking = " and ".join(run.label for run in (first, other) if run.total_rollouts is None)
        return Work(None, f"{lacking} recorded no rollouts, so it can't be told whether both did the same work.")
    if len(first.run.steps) != len(other.run.steps):
        return Work(False, f"{several(len(first.run.steps), 'step')} against {len(other.run.steps):,}: different work.")
    if _prompts(first) != _prompts(other):
        return Work(False, "The steps had other prompts, or other numbers of responses to them: different work.")
    known = not first.counts.without_prompt_tokens and not other.counts.without_prompt_tokens
    if known and first.counts.prompt_tokens != other.counts.prompt_tokens:
        return Work(False, "Prompts of the same names have other lengths: different work.")
    if first.counts.response_tokens != other.counts.response_tokens:
        return Work(
            False,
            f"The same prompts, but {number(first.total_response_tokens)} response tokens against "
            f"{number(other.total_response_tokens)}, not equal step by step: different work.",
        )
    return Work(
        True,
        f"The same work: in each of {several(len(first.run.steps), 'step')} the same prompts, as many responses to "
        f"each, and as many response tokens ({number(first.total_response_tokens)} in all).",
    )


def _prompts(one: Measured) -> dict[int, Counter[str]]:
    return {
        step: Counter({prompt: len(lengths) for prompt, lengths in groups.items()})
        for step, groups in one.counts.lengths.items()
    }


@dataclass(frozen=True)
class Row:
    """A row of the summary: what, how it is written, its value, and whether it gets a ratio."""

    what: str
    write: Callable[[Measured], str]
    value: Callable[[Measured], float | None] | None = None


def _per_second(one: Measured) -> float | None:
    tokens = one.total_response_tokens
    return tokens / one.total_seconds if tokens and one.total_seconds > 0 else None


def _sizes(one: Measured) -> str:
    sizes = list(one.group_sizes.values())
    return change(sizes) if len(set(sizes)) < 2 else f"{change(sizes)}, mean {number(sum(sizes) / len(sizes))}"


def _mean_seconds(one: Measured) -> float | None:
    return one.total_seconds / len(one.seconds) if one.seconds else None


ROWS = (
    Row("Steps", lambda one: number(len(one.run.steps)), lambda one: len(one.run.steps)),
    Row("Time of all steps", lambda one: duration(one.total_seconds), lambda one: one.total_seconds),
    Row("Seconds of a step, mean", lambda one: duration(_mean_seconds(one)), _mean_seconds),
    Row("Rollouts", lambda one: number(one.total_rollouts), lambda one: one.total_rollouts),
    Row("Response tokens", lambda one: number(one.total_response_tokens), lambda one: one.total_response_tokens),
    Row("Response tokens a second", lambda one: number(_per_second(one)), _per_second),
    Row("Times fewer tokens through the model than separate rows", lambda one: number(one.sharing_whole)),
    Row("Trainer idle", lambda one: percent(one.trainer_idle_share)),
    Row("Workers idle, mean", lambda one: percent(one.worker_idle_share)),
    Row("Staleness, mean (versions)", lambda one: number(one.mean_staleness)),
    Row("Group size G, first to last step", _sizes),
    Row("Reward, first to last step", lambda one: change(list(one.rewards.values()))),
)


def summary(runs: Sequence[Measured]) -> tuple[Table, tuple[str, ...]]:
    """The table at the top: a column for each run and its ratio to the first; and a sentence on each one's work."""
    works = [same_work(runs[0], other) for other in runs[1:]]
    headers = ["Figure", runs[0].label]
    for other, work in zip(runs[1:], works, strict=True):
        headers += [other.label, f"Ratio to {runs[0].label} ({work.label})"]
    rows = []
    for row in ROWS:
        cells = [row.what, row.write(runs[0])]
        for other in runs[1:]:
            cells += [row.write(other), _ratio(row, runs[0], other)]
        rows.append(tuple(cells))
    sentences = tuple(
        f"{other.label} against {runs[0].label}: {work.sentence}" for other, work in zip(runs[1:], works, strict=True)
    )
    return Table("Summary", tuple(headers), tuple(rows)), sentences


def _ratio(row: Row, first: Measured, other: Measured) -> str:
    if row.value is None:
        return ""
    below, above = row.value(first), row.value(other)
    if not below or above is None:
        return ""
    ratio = above / below
    return f"{ratio:.2g}" if abs(ratio) < 0.1 else f"{ratio:.2f}"
