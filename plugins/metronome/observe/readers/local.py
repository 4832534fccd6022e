"""The local host's run folder: ``recipe.yaml``, ``metrics.jsonl``, ``groups.jsonl`` (docs/local.md, Run folder)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from metronome.errors import ConfigurationError
from metronome.observe.readers.files import MEND, Line, host_metrics, integer, read_jsonl, read_text, renumbered
from metronome.observe.readers.inventory import Inventory
from metronome.observe.records import Rollout, RunRecord, Span, Step
from metronome.recipes import parse_yaml

LOOKED_FOR = "local: metrics.jsonl beside groups.jsonl or recipe.yaml"


def found(files: Inventory) -> bool:
    """Whether the place is a run folder of the local host."""
    path = files.place
    return (path / "metrics.jsonl").is_file() and (
        (path / "groups.jsonl").is_file() or (path / "recipe.yaml").is_file()
    )


def read(files: Inventory, _given: Mapping[str, object]) -> RunRecord:
    """The run in a run folder.

    The folder has no clock time of a period's start. It is put where each group's ``end`` and its arrival, seconds
    after that start, meet: max_j(end_j - arrival_j), never before the period before has ended. Training spans follow
    from arrivals and work: a serial trainer takes a group when it has arrived and the one before is trained.

    Raises ConfigurationError for a folder without a whole period, and for figures that aren't finite, by file and line.
    """
    path = files.place
    notes: list[str] = []
    lines = read_jsonl(path / "metrics.jsonl", notes)
    evaluated = any("held_out_accuracy" in line.data for line in lines)
    lines = [line for line in lines if "seconds" in line.data]
    if not lines:
        raise ConfigurationError(
            "the run folder has no whole period yet", found=str(path), where="metrics.jsonl", remedy="wait for one"
        )
    periods = _latest(lines)
    groups = _groups(path, notes)
    recipe = _recipe(path, notes)
    source = _text(recipe, "metronome", "rollout_source")
    starts = _starts(periods, groups)
    steps = tuple(
        _step(number, line, groups.get(period, []), source, notes) for number, (period, line) in _each(periods)
    )
    rollouts: list[Rollout] = []
    spans: list[Span] = []
    for number, (period, line) in _each(periods):
        offset = starts[period]
        for group in groups.get(period, []):
            rollouts += _rollouts(number, group, offset[1])
            spans += _generating(number, group, offset[1])
        spans += _training(number, line, offset[0], source)
    if not groups:
        notes.append("groups.jsonl is missing or empty: nothing is known of single rollouts.")
    else:
        notes.append(
            "Start and end are a group's own: from its dispatch to its last response; single responses have no times."
        )
    if evaluated:
        notes.append("Evaluations run between the periods and are in no period's seconds.")
    notes += renumbered([*periods], "period")
    spans.sort(key=lambda span: (span.start, span.end))
    return RunRecord(path.name, "local", source, steps, tuple(rollouts), tuple(spans), _settings(recipe), tuple(notes))


def _latest(lines: Sequence[Line]) -> dict[int, Line]:
    """Period -> its line; a resumed run that repeats a period keeps the later line and forgets what followed it."""
    result: dict[int, Line] = {}
    for line in lines:
        period = line.whole("period")
        if period is None:
            raise ConfigurationError("a period's line has no period", where=line.where, remedy=MEND)
        line.refuse_negative("seconds", "arrivals", "work")
        for later in [one for one in result if one >= period]:
            del result[later]
        result[period] = line
    return result


def _groups(path: Path, notes: list[str]) -> dict[int, list[Line]]:
    """Period -> its groups in the order trained; of a prompt that stands twice in a period the later line."""
    if not (path / "groups.jsonl").is_file():
        return {}
    result: dict[int, dict[object, Line]] = {}
    for line in read_jsonl(path / "groups.jsonl", notes):
        period = line.whole("period")
        if period is None or "index" not in line.data:
            raise ConfigurationError("a group's line has no period or index", where=line.where, remedy=MEND)
        line.refuse_negative("start", "end", "lengths")
        if (line.number("end") or 0.0) < (line.number("start") or 0.0) and line.data.get("end") is not None:
            raise ConfigurationError(
                "a group ends before it starts",
                found=(line.number("start"), line.number("end")),
                where=line.where,
                remedy=MEND,
            )
        of_period = result.setdefault(period, {})
        of_period.pop(line.data["index"], None)
        of_period[line.data["index"]] = line
    return {period: list(groups.values()) for period, groups in result.items()}


def _each(periods: Mapping[int, Line]) -> list[tuple[int, tuple[int, Line]]]:
    return list(enumerate(periods.items()))


def _starts(periods: Mapping[int, Line], groups: Mapping[int, list[Line]]) -> dict[int, tuple[float, float]]:
    """Period -> (its start, what to add to a group's clock), both in seconds from the run's start."""
    result: dict[int, tuple[float, float]] = {}
    origin: float | None = None
    free = 0.0
    for period, line in periods.items():
        of_period, arrivals = groups.get(period, []), line.numbers("arrivals")
        clock = None
        if of_period and len(of_period) == len(arrivals):
            ends = [group.number("end") for group in of_period]
            differences = [end - a for end, a in zip(ends, arrivals, strict=True) if end is not None and a > 0.0]
            clock = max(differences, default=None)
        if clock is None:  # nothing to set it by: straight after the period before
            shift = -origin if origin is not None else 0.0
            result[period] = (free, shift)
        else:
            origin = clock - free if origin is None else origin
            if clock - origin < free - 1.0:  # another machine or another boot: its clock began anew
                origin = clock - free
            result[period] = (max(free, clock - origin), -origin)
        free = result[period][0] + _required(line, "seconds")
    return result


def _required(line: Line, key: str) -> float:
    value = line.number(key)
    if value is None:
        raise ConfigurationError(f"a period's line has no {key}", where=line.where, remedy=MEND)
    return value


def _step(number: int, line: Line, groups: Sequence[Line], source: str | None, notes: list[str]) -> Step:
    arrivals, proximal = line.numbers("arrivals"), line.number("seconds_proximal")
    training = line.number("seconds_training")
    if source == "bounded":  # its generation began in periods before: the groups' own clock tells
        starts, ends = ([one for g in groups if (one := g.number(key)) is not None] for key in ("start", "end"))
        generation = max(ends) - min(starts) if starts and ends else None
    else:
        generation = max(arrivals, default=None)
    size, prompts, tokens = line.whole("group_size"), line.whole("prompts"), line.number("tokens")
    lengths = [length for group in groups for length in group.numbers("lengths")]
    return Step(
        number=number,
        seconds=_required(line, "seconds"),
        generation=generation,
        waiting=line.number("seconds_waiting"),
        training=None if training is None else training - (proximal or 0.0),
        proximal=proximal,
        optimizer=line.number("seconds_step"),
        publication=line.number("seconds_publish"),
        group_size=size,
        prompts=prompts,
        prompt_tokens=(tokens - sum(lengths)) / len(lengths) if lengths and tokens is not None else None,
        response_tokens=line.number("response_length"),
        response_tokens_max=line.number("response_length_max"),
        fed_tokens=line.whole("tokens_computed"),
        reward=line.number("reward"),
        metrics=host_metrics(line.data, notes, line.where),
        fingerprint=mark if isinstance(mark := line.data.get("fingerprint"), str) else None,
    )


def _rollouts(step: int, group: Line, shift: float) -> list[Rollout]:
    lengths, rewards = group.numbers("lengths"), group.numbers("rewards")
    start, end = group.number("start"), group.number("end")
    if rewards and len(rewards) != len(lengths):
        raise ConfigurationError(
            "a group has not as many rewards as lengths",
            found=(len(rewards), len(lengths)),
            where=group.where,
            remedy=MEND,
        )
    versions = group.numbers("versions")
    return [
        Rollout(
            step=step,
            prompt=str(group.data["index"]),
            response_tokens=integer(length, "lengths", group.where),
            start=None if start is None else start + shift,
            end=None if end is None else end + shift,
            worker=_worker(group),
            reward=rewards[member] if rewards else None,
            version=int(min(versions)) if versions else None,
            trained_version=group.whole("trained_at"),
        )
        for member, length in enumerate(lengths)
    ]


def _worker(group: Line) -> str | None:
    number = group.data.get("worker")
    return None if number is None else f"worker {number}"


def _generating(step: int, group: Line, shift: float) -> list[Span]:
    start, end = group.number("start"), group.number("end")
    if start is None or end is None:
        return []
    return [Span(_worker(group) or "worker", "generate", start + shift, end + shift, step)]


def _training(step: int, line: Line, start: float, source: str | None) -> list[Span]:
    """The trainer's spans: each group's work, the optimiser's steps, the publication."""
    arrivals, work = line.numbers("arrivals"), line.numbers("work")
    end = start + _required(line, "seconds")
    published = end - (line.number("seconds_publish") or 0.0)
    stepped = published - (line.number("seconds_step") or 0.0)
    spans = []
    if work and len(work) == len(arrivals):
        ready = [max(arrivals)] * len(work) if source == "synchronous" else arrivals
        begins = [start]
        for arrived, seconds in zip(ready, work, strict=True):
            begin = max(begins[-1], start + arrived)
            spans.append(Span("trainer", "train", begin, begin + seconds, step))
            begins.append(begin + seconds)
    elif work:  # several steps: one stretch that ends with the period's last step
        spans.append(Span("trainer", "train", max(start, stepped - sum(work)), stepped, step))
    spans.append(Span("trainer", "step", stepped, published, step))
    spans.append(Span("trainer", "publish", published, end, step))
    return [span for span in spans if span.end > span.start]


def _recipe(path: Path, notes: list[str]) -> Mapping[str, Any]:
    file = path / "recipe.yaml"
    if not file.is_file():
        notes.append("recipe.yaml is missing: the rollout source and the run's settings aren't known.")
        return {}
    recipe = parse_yaml(read_text(file), str(file))
    if not isinstance(recipe, dict):
        raise ConfigurationError(
            "the recipe must be a mapping", where=str(file), remedy="give the run's own recipe.yaml"
        )
    return recipe


def _at(recipe: Mapping[str, Any], *keys: str) -> Any:
    value: Any = recipe
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _text(recipe: Mapping[str, Any], *keys: str) -> str | None:
    value = _at(recipe, *keys)
    return value if isinstance(value, str) else None


def _settings(recipe: Mapping[str, Any]) -> dict[str, object]:
    if not recipe:
        return {}
    source = _text(recipe, "metronome", "rollout_source")
    bound = _at(recipe, "metronome", "bounded", "max_staleness")
    result: dict[str, object] = {
        "staleness": (2 if bound is None else bound) if source == "bounded" else 0,
        "workers": _at(recipe, "machine", "workers") or 1,
        "slots": _at(recipe, "sampling", "slots"),
        "trainer_ranks": 1,
        "prompts": _at(recipe, "training", "prompts"),
        "max_tokens": _at(recipe, "sampling", "max_tokens"),
        "loss": _text(recipe, "metronome", "loss"),
        "attention": _text(recipe, "metronome", "attention"),
        "group_controller": _text(recipe, "metronome", "group_controller"),
    }
    chosen = {key: value for key, value in result.items() if value is not None}
    return chosen | {"recipe": recipe}
