"""A plain CSV, a line a response: step, prompt, response_length, start, end; times in seconds on one clock.

Optional columns: prompt_length, reward, worker, version (that sampled it), trained_version. Lengths are tokens.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import replace
from io import StringIO
from statistics import fmean

from metronome.errors import ConfigurationError, nearest
from metronome.observe.readers.files import finite, integer, read_text, renumbered
from metronome.observe.readers.inventory import Inventory
from metronome.observe.records import Rollout, RunRecord, Span, Step

LOOKED_FOR = "csv: one .csv file, a line a response"
_NEEDED = ("step", "prompt", "response_length", "start", "end")
_OPTIONAL = ("prompt_length", "reward", "worker", "version", "trained_version")


def found(files: Inventory) -> bool:
    """Whether the place itself is a CSV file."""
    return files.place.is_file() and files.place.suffix.lower() == ".csv"


def read(files: Inventory, _given: Mapping[str, object]) -> RunRecord:
    """The run in a CSV. Steps are numbered from 0 in the order of the column ``step``.

    A step lasts from its first start to the next step's first start, the last one to its last end; what the trainer did
    is not in such a file. Raises ConfigurationError for a header that lacks a column or has an unknown one, a file
    without rows, and a value that doesn't fit, with its line.
    """
    path = files.place
    text = read_text(path).removeprefix("\ufeff")
    reader = csv.DictReader(StringIO(text, newline=""))
    header = [name.strip() for name in reader.fieldnames or ()]
    reader.fieldnames = header
    _check(header, str(path))
    notes = ["A CSV holds responses only: a step's seconds run from its first start to the next step's first start."]
    rows = []
    lines = text.rstrip("\r\n").count("\n") + 1
    for row in reader:
        if reader.line_num == lines and not text.endswith("\n") and (None in row.values()):
            notes.append("The last line is cut (a run that still writes); left out.")
            break
        rows.append(_row(row, f"{path}, line {reader.line_num}"))
    if not rows:
        raise ConfigurationError("the CSV has no rows", found=str(path), remedy="write a line a response")
    origin = min(row.start for row in rows if row.start is not None)
    numbers = {step: number for number, step in enumerate(sorted({row.step for row in rows}))}
    rollouts = tuple(
        sorted((_placed(row, numbers[row.step], origin) for row in rows), key=lambda one: (one.step, one.start or 0.0))
    )
    notes += renumbered([*numbers], "the CSV's step")
    spans = tuple(
        Span(one.worker or "rollout", "generate", one.start, one.end, one.step)
        for one in sorted(rollouts, key=lambda one: (one.start or 0.0, one.end or 0.0))
        if one.start is not None and one.end is not None
    )
    return RunRecord(path.name, "csv", None, tuple(_steps(rollouts)), rollouts, spans, {}, tuple(notes))


def _check(header: Sequence[str], where: str) -> None:
    missing = [name for name in _NEEDED if name not in header]
    if len(header) == 1 and (other := next((sign for sign in ";\t" if sign in header[0]), None)) is not None:
        raise ConfigurationError(
            f"the CSV's values are separated by {'semicolons' if other == ';' else 'tabs'}",
            found=header[0],
            where=f"{where}, line 1",
            remedy="separate them by commas, and write numbers with a point (0.5)",
        )
    if missing:
        raise ConfigurationError(
            "the CSV's header lacks a column",
            found=", ".join(header) or "an empty file",
            where=where,
            remedy=f"add {', '.join(missing)}",
        )
    for name in header:
        if name not in _NEEDED + _OPTIONAL:
            raise ConfigurationError(
                "no such column", found=name, where=f"{where}, line 1", remedy=nearest(name, _NEEDED + _OPTIONAL)
            )
        if header.count(name) > 1:
            raise ConfigurationError("a column stands twice", found=name, where=f"{where}, line 1", remedy="keep one")


def _row(row: Mapping[str | None, str | None], where: str) -> Rollout:
    def value(name: str) -> float | None:
        text = (row.get(name) or "").strip()
        if not text and name not in _NEEDED:
            return None
        try:
            number = float(text)
        except ValueError:
            number = float("nan")
        return finite(number if number == number else text, name, where)

    def whole(name: str) -> int | None:
        number = value(name)
        return None if number is None else integer(number, name, where)

    if None in row or None in row.values():
        raise ConfigurationError(
            "a line has more or fewer values than the header",
            where=where,
            remedy="give it a value for each column, an empty one where nothing is known",
        )
    start, end, length = value("start"), value("end"), whole("response_length")
    if start is not None and end is not None and end < start:
        raise ConfigurationError(
            "a response ends before it starts",
            found=(start, end),
            where=where,
            remedy="give start and end in seconds on one clock, end after start",
        )
    prompt, worker = whole("prompt_length"), (row.get("worker") or "").strip()
    for name, number, remedy in (
        ("start", start, "count seconds from any moment before the first start"),
        ("response_length", length, "give the response's tokens, 0 or more"),
        ("prompt_length", prompt, "give the prompt's tokens, or leave the value empty"),
    ):
        if number is not None and number < 0:
            raise ConfigurationError(f"{name} can't be negative", found=number, where=where, remedy=remedy)
    return Rollout(
        step=whole("step") or 0,
        prompt=(row.get("prompt") or "").strip(),
        response_tokens=length or 0,
        prompt_tokens=prompt,
        start=start,
        end=end,
        worker=f"worker {worker}" if worker.isdigit() else worker or None,
        reward=value("reward"),
        version=whole("version"),
        trained_version=whole("trained_version"),
    )


def _placed(row: Rollout, step: int, origin: float) -> Rollout:
    return replace(row, step=step, start=(row.start or 0.0) - origin, end=(row.end or 0.0) - origin)


def _steps(rollouts: Sequence[Rollout]) -> list[Step]:
    by_step: dict[int, list[Rollout]] = {}
    for one in rollouts:
        by_step.setdefault(one.step, []).append(one)
    begins = [min(one.start or 0.0 for one in members) for members in by_step.values()]
    ends = [max(one.end or 0.0 for one in members) for members in by_step.values()]
    steps = []
    for number, members in by_step.items():
        until = begins[number + 1] if number + 1 < len(begins) else ends[number]
        prompts = len({one.prompt for one in members})
        rewards = [one.reward for one in members if one.reward is not None]
        known = [one.prompt_tokens for one in members if one.prompt_tokens is not None]
        steps.append(
            Step(
                number=number,
                seconds=max(0.0, until - begins[number]),
                generation=ends[number] - begins[number],
                group_size=len(members) // prompts if len(members) % prompts == 0 else None,
                prompts=prompts,
                prompt_tokens=fmean(known) if known else None,
                response_tokens=fmean(one.response_tokens for one in members),
                response_tokens_max=float(max(one.response_tokens for one in members)),
                reward=fmean(rewards) if rewards else None,
            )
        )
    return steps
