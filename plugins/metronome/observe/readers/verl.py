"""verl's own records: metrics (``trainer.logger`` file or tensorboard) and rollout dump (``trainer.rollout_data_dir``).

Read in verl 0.9.1: FileLogger writes a line {"step", "data"} a step; the dump is N.jsonl a step, a line {"input",
"output", "gts", "score", "step", "uid"} a response, in texts without token counts; no file has clock times but
TensorBoard's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from metronome.errors import ConfigurationError
from metronome.observe.readers.files import (
    IN_TURNS,
    MEND,
    Line,
    host_metrics,
    integer,
    read_jsonl,
    renumbered,
    source_of,
)
from metronome.observe.readers.inventory import Inventory, one_of
from metronome.observe.readers.laid import laid_end_to_end
from metronome.observe.readers.tokens import NOTE, counter, scaled
from metronome.observe.records import Rollout, RunRecord, Step

_ROW = re.compile(r"step:(\d+) - (.*timing_s/step:.*)")
_FIGURE = re.compile(r"([^\s:]+):(?:np\.\w+\()?(-?(?:\d+\.?\d*(?:e[+-]?\d+)?|nan|inf))\b")
LOOKED_FOR = "verl: metrics (file logger, TensorBoard, kept output) or dumps N.jsonl"
_ORDER = (
    ("generate", "gen"),
    ("other", "reward"),
    ("old_log_probs", "old_log_prob"),
    ("reference", "ref"),
    ("other", "values"),
    ("other", "adv"),
    ("other", "update_critic"),
    ("train", "update_actor"),
    ("save", "save_checkpoint"),
    ("publish", "update_weights"),
)
"""The parts of a step of verl's synchronous trainer in their order (trainer_base.py), all within timing_s/step."""


def found(files: Inventory) -> bool:
    """Whether anything that only verl writes is there."""
    return bool(_metric_files(files) or _dumps(files) or _logs(files)) or files.has_tag(_known)


def read(files: Inventory, given: Mapping[str, object]) -> RunRecord:
    """verl's run; ``given`` may have ``source`` and ``tokenizer``, a folder whose tokenizer.json counts the tokens.

    Raises ConfigurationError for records of several runs and for figures that aren't finite.
    """
    notes: list[str] = []
    metrics = _metrics(files, notes)
    source = source_of(given, _source([*metrics.values()]))
    dumped = _rollouts(_dumps(files), metrics, source, given, notes)
    numbers = {step: number for number, step in enumerate(sorted({*metrics, *dumped}))}
    steps = tuple(
        _with_group(_step(numbers[at], line, source, notes), dumped.get(at, [])) for at, line in metrics.items()
    )
    rollouts = [replace(one, step=numbers[at]) for at, of_step in dumped.items() for one in of_step]
    notes += _missing(metrics, dumped, source) + renumbered([*numbers], "verl's step")
    spans = laid_end_to_end(steps, _ORDER, "timing_s/") if source in IN_TURNS else ()
    settings: dict[str, object] = {} if source in (None, "bounded") else {"staleness": 0}
    for key, values in (("group_size", {one.group_size for one in steps}), ("prompts", {one.prompts for one in steps})):
        if len(values) == 1 and None not in values:
            settings[key] = values.pop()
    return RunRecord(
        files.place.name, "verl", source, steps, tuple(rollouts), spans, settings, tuple(notes), laid=bool(spans)
    )


def _with_group(step: Step, rollouts: Sequence[Rollout]) -> Step:
    prompts = len({one.prompt for one in rollouts})
    if not prompts:
        return step
    size = step.group_size or (len(rollouts) // prompts if len(rollouts) % prompts == 0 else None)
    return replace(step, prompts=prompts, group_size=size)


def _missing(metrics: Mapping[int, Line], dumped: Mapping[int, list[Rollout]], source: str | None) -> list[str]:
    notes = []
    if not metrics:
        notes.append('No metrics: run verl with trainer.logger=["console","file"], or with "tensorboard".')
    if not dumped:
        notes.append("No rollout dump, so nothing is known of single responses: set trainer.rollout_data_dir=FOLDER.")
    if source == "colocated":
        notes.append("Taken for verl's synchronous trainer, which generates and trains on the same devices in turns.")
    if source in IN_TURNS:
        notes.append("verl records no clock times: each step's parts are laid end to end in verl's order.")
    elif source is not None:
        notes.append("verl records no clock times, and here generation and training overlap: no timeline.")
    return notes


def _console(files: Inventory, notes: list[str]) -> Iterator[tuple[int, Line]]:
    """Step and metrics out of a kept console output: "step:1 - actor/loss:0.1 - timing_s/step:np.float64(3.2)"."""
    path = one_of(_logs(files), files.place)
    rows = [] if path is None else files.logs[path].split("\n")
    for number, row in enumerate(rows, start=1):
        match = _ROW.search(row)
        if match is None:
            continue
        if number == len(rows):
            notes.append(f"The last line of {files.place.name} has no end (a run that still writes); left out.")
            break
        data = {name: float(value) for name, value in _FIGURE.findall(match.group(2))}
        yield int(match.group(1)), Line(data, f"{path}, line {number}")


def _logs(files: Inventory) -> list[Path]:
    return [path for path, text in files.logs.items() if _ROW.search(text)]


def _known(tag: str) -> bool:
    return tag == "training/global_step" or tag == "timing_s/step"


def _metric_files(files: Inventory) -> list[Path]:
    return [path for path in files.lines_with("step", "data") if isinstance(files.heads[path]["data"], dict)]


def _dumps(files: Inventory) -> list[Path]:
    """N.jsonl of the training dump, by N; validation dumps, which lie in a folder of their own, hold other prompts."""
    dumps = [path for path in files.lines_with("input", "output", "score") if path.stem.isdigit()]
    folders = sorted({path.parent for path in dumps})
    training = [folder for folder in folders if "val" not in folder.name] if len(folders) > 1 else folders
    one_of(training, files.place)
    return sorted((path for path in dumps if path.parent in training), key=lambda path: int(path.stem))


def _metrics(files: Inventory, notes: list[str]) -> dict[int, Line]:
    """Step -> its metrics; only steps that trained."""
    file = one_of(_metric_files(files), files.place)
    result: dict[int, Line] = {}
    if file is not None:
        for line in read_jsonl(file, notes):
            step, data = integer(line.data.get("step"), "step", line.where), line.data.get("data")
            if not isinstance(data, dict):
                raise ConfigurationError("a line has no data", where=line.where, remedy="give verl's own file")
            if "timing_s/step" not in data:
                continue  # validation before training
            _put(result, step, Line(data, line.where))
        return result
    logged = files.scalars(_known, notes)
    if logged is not None:
        found = {step: Line(dict(one.values), one.where) for step, one in logged.items()}
        return {step: line for step, line in found.items() if "timing_s/step" in line.data}
    for step, line in _console(files, notes):
        _put(result, step, line)
    return result


def _put(result: dict[int, Line], step: int, line: Line) -> None:
    """``line`` at ``step``; a resumed run goes over steps again, and what came after them belongs to the old one."""
    for later in [one for one in result if one >= step]:
        del result[later]
    result[step] = line


def _source(lines: Sequence[Line]) -> str | None:
    """Which of verl's trainers wrote this, as far as its metrics tell."""
    keys = {key for line in lines for key in line.data}
    stale = (line.number("training/off_policy/trajectory_staleness_worst/max") or 0.0 for line in lines)
    if not lines:
        return None
    if "metronome/periodic/seconds_waiting" in keys:
        return "periodic"
    if "metronome/publication/seconds_waiting" in keys or any(one > 0.0 for one in stale):
        return "bounded"
    return "colocated"


def _step(number: int, line: Line, source: str | None, notes: list[str]) -> Step:
    line.refuse_negative("timing_s/", "metronome/periodic/seconds_waiting")

    def seconds(*names: str) -> float | None:
        found = [value for name in names if (value := line.number(f"timing_s/{name}")) is not None]
        return sum(found) if found else None

    step = seconds("step")
    if step is None:
        raise ConfigurationError("a step has no timing_s/step", where=line.where, remedy="give verl's own file")
    waited = line.number("metronome/periodic/seconds_waiting")
    gathering = seconds("gen")
    return Step(
        number=number,
        seconds=step,
        generation=gathering if source in IN_TURNS else None,
        waiting=gathering if waited is None else waited,
        training=seconds("update_actor", "update_critic"),
        old_log_probs=seconds("old_log_prob"),
        reference=seconds("ref"),
        optimizer=seconds("optimizer_step"),
        publication=seconds("update_weights"),
        group_size=line.whole("metronome/group_controller/size"),
        prompt_tokens=line.number("prompt_length/mean"),
        response_tokens=line.number("response_length/mean"),
        response_tokens_max=line.number("response_length/max"),
        reward=line.number("critic/score/mean", "critic/rewards/mean"),
        metrics=host_metrics(line.data, notes, line.where),
    )


def _rollouts(
    dumps: Sequence[Path],
    metrics: Mapping[int, Line],
    source: str | None,
    given: Mapping[str, object],
    notes: list[str],
) -> dict[int, list[Rollout]]:
    """verl's step -> its responses."""
    count = counter(given["tokenizer"]) if "tokenizer" in given else None
    result = {}
    for path in dumps:
        step, lines = int(path.stem), read_jsonl(path, notes)
        if metrics and step not in metrics:
            notes.append(f"{path.name} is of a step without metrics; left out.")
            continue
        known = metrics.get(step)
        if count is not None:
            tokens = [count(_text(line, "output")) for line in lines]
            prompts: Sequence[int | None] = [count(_text(line, "input")) for line in lines]
        elif known is not None and known.number("response_length/mean") is not None:
            tokens = _estimated(lines, "output", known, "response_length") or []
            prompts = _estimated(lines, "input", known, "prompt_length") or [None] * len(lines)
        else:
            raise ConfigurationError(
                "verl's dump has texts without token counts, and there are no metrics to scale them by",
                found=str(path),
                where="tokenizer",
                remedy="give tokenizer=FOLDER, which holds the model's tokenizer.json, or the run's metrics beside it",
            )
        on_policy = source in (*IN_TURNS, "periodic")
        result[step] = [
            Rollout(
                step=0,
                prompt=_group(line),
                response_tokens=length,
                prompt_tokens=prompt,
                reward=line.number("score"),
                version=step - 1 if on_policy else None,
                trained_version=step - 1 if metrics else None,
            )
            for line, length, prompt in zip(lines, tokens, prompts, strict=True)
        ]
    if result and count is None:
        notes.append(NOTE)
    return result


def _estimated(lines: Sequence[Line], key: str, known: Line, length: str) -> list[int] | None:
    """Token counts of the texts under ``key`` by the step's recorded mean and bounds; None where it has no mean."""
    mean = known.number(f"{length}/mean")
    if mean is None:
        return None
    texts = [_text(line, key) for line in lines]
    return scaled(texts, mean, known.number(f"{length}/min"), known.number(f"{length}/max"))


def _group(line: Line) -> str:
    """The prompt's uid out of verl's key uid_session_output; the prompt's text where there is no uid."""
    uid = line.data.get("uid")
    return uid.rsplit("_", 2)[0] if isinstance(uid, str) else _text(line, "input")


def _text(line: Line, key: str) -> str:
    value = line.data.get(key)
    if not isinstance(value, str):
        raise ConfigurationError(f"{key} must be a text", found=value, where=line.where, remedy=MEND)
    return value
