"""OpenRLHF's own records: TensorBoard (``--logger.tensorboard_dir``) or its log, a line a step.

Read in OpenRLHF 0.11.2: a step logs ``timing/generation``, ``make_experience``, ``ppo_train``, ``broadcast`` and
``step_total`` (under ``train/`` in TensorBoard) and ``rollout/...``; the log has the same after "Global step N:". It
writes nothing of single responses.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence

from metronome.errors import ConfigurationError
from metronome.observe.readers.files import IN_TURNS, MEND, Line, host_metrics, renumbered, source_of
from metronome.observe.readers.inventory import Inventory, one_of
from metronome.observe.readers.laid import laid_end_to_end
from metronome.observe.records import RunRecord, Step

LOOKED_FOR = "openrlhf: TensorBoard events or kept output (.log, .txt, .out)"
_LINE = re.compile(r"Global step (\d+): (\{.*)")
_ORDER = (
    ("generate", "generation"),
    ("old_log_probs", "make_experience"),
    ("train", "ppo_train"),
    ("publish", "broadcast"),
)


def found(files: Inventory) -> bool:
    """Whether anything that only OpenRLHF writes is there."""
    return files.has_tag(_known) or any(_is_log(text) for text in files.logs.values())


def read(files: Inventory, given: Mapping[str, object]) -> RunRecord:
    """OpenRLHF's run; ``given`` may have ``source``, and ``group_size``, which it doesn't record.

    Raises ConfigurationError for records of several runs and for figures that aren't finite.
    """
    notes: list[str] = []
    logged = _lines(files, notes)
    lines = [*logged.values()]
    source = source_of(given, _source(lines))
    steps = tuple(_step(number, line, source, given, notes) for number, line in enumerate(lines))
    notes.append("OpenRLHF records nothing of single responses: lengths and rewards are known by their step's means.")
    if {step.group_size for step in steps} == {None}:
        notes.append("OpenRLHF doesn't record the group size: give group_size=G.")
    notes.append("OpenRLHF's make_experience (rewards, and the passes of actor and reference) stands as old log-probs.")
    if source in IN_TURNS:
        spans = laid_end_to_end(steps, _ORDER, "timing/")
        notes.append("OpenRLHF records no clock times: each step's parts are laid end to end in its own order.")
        if "source" not in given:
            notes.append("Whether engines and trainer share devices isn't recorded: source=colocated if they do.")
    else:
        spans = ()
        notes.append("OpenRLHF records no clock times, and here generation and training overlap: no timeline.")
    notes += renumbered([*logged], "OpenRLHF's step")
    settings: dict[str, object] = {} if source == "bounded" else {"staleness": 0}
    sizes = {step.group_size for step in steps} - {None}
    if len(sizes) == 1:
        settings["group_size"] = sizes.pop()
    return RunRecord(files.place.name, "openrlhf", source, steps, (), spans, settings, tuple(notes), laid=bool(spans))


def _known(tag: str) -> bool:
    return tag == "train/timing/step_total"


def _is_log(text: str) -> bool:
    return any("timing/" in match.group(2) for match in _LINE.finditer(text))


def _lines(files: Inventory, notes: list[str]) -> dict[int, Line]:
    """OpenRLHF's step -> what it logged."""
    logged = files.scalars(_known, notes)
    if logged:
        return {
            step: Line({tag.removeprefix("train/"): value for tag, value in one.values.items()}, one.where)
            for step, one in logged.items()
            if any(_known(tag) for tag in one.values)
        }
    path = one_of([path for path, text in files.logs.items() if _is_log(text)], files.place)
    result: dict[int, Line] = {}
    rows = [] if path is None else files.logs[path].split("\n")
    for number, row in enumerate(rows, start=1):
        match = _LINE.search(row)
        if match is None or "timing/" not in match.group(2):
            continue
        step, where = int(match.group(1)), f"{path}, line {number}"
        data = _dictionary(match.group(2))
        if data is None:
            if number == len(rows):
                notes.append(f"The last line of {files.place.name} is cut (a run that still writes); left out.")
                break
            raise ConfigurationError("a step's line can't be read", found=row[-80:], where=where, remedy=MEND)
        for later in [one for one in result if one >= step]:  # a resumed run goes over them again
            del result[later]
        result[step] = Line(data, where)
    return result


def _dictionary(text: str) -> dict[str, object] | None:
    """The Python dict that OpenRLHF prints; nan and inf, which aren't literals, become floats."""
    body = text[: text.rfind("}") + 1]
    try:
        data = ast.literal_eval(re.sub(r"(?<=: )(-?)(nan|inf)\b", r"\g<1>1e999", body))
    except (ValueError, SyntaxError):
        return None
    return data if isinstance(data, dict) else None


def _source(lines: Sequence[Line]) -> str:
    keys = {key for line in lines for key in line.data}
    if "metronome/periodic/seconds_waiting" in keys:
        return "periodic"
    if "metronome/bounded/staleness_max" in keys or any(_overlaps(line) for line in lines):
        return "bounded"
    return "synchronous"


def _parts(line: Line) -> dict[str, float]:
    names = ("generation", "make_experience", "ppo_train", "broadcast")
    return {name: value for name in names if (value := line.number(f"timing/{name}")) is not None}


def _overlaps(line: Line) -> bool:
    """Whether a step's seconds are the clock's (asynchronous trainers) and not the sum of its parts."""
    total, parts = line.number("timing/step_total") or 0.0, sum(_parts(line).values())
    return abs(total - parts) > 1e-3 * max(total, parts)


def _step(number: int, line: Line, source: str | None, given: Mapping[str, object], notes: list[str]) -> Step:
    line.refuse_negative("timing/", "metronome/periodic/seconds_waiting")
    parts, total = _parts(line), line.number("timing/step_total")
    if total is None:
        raise ConfigurationError("a step has no timing/step_total", where=line.where, remedy=MEND)
    waiting = line.number("metronome/periodic/seconds_waiting")
    if source == "periodic":
        total += (waiting or 0.0) - parts.get("generation", 0.0)  # OpenRLHF's total sums parts, which lack the wait
    elif source in IN_TURNS:
        waiting = parts.get("generation")
    else:
        waiting = max(0.0, total - sum(seconds for name, seconds in parts.items() if name != "generation"))
    samples, size = line.whole("rollout/num_samples"), line.whole("metronome/group_controller/size")
    if size is None and isinstance(fixed := given.get("group_size"), int):
        size = fixed
    whole, response = line.number("total_length"), line.number("response_length")
    return Step(
        number=number,
        seconds=total,
        generation=None if source == "periodic" else parts.get("generation"),
        waiting=waiting,
        training=parts.get("ppo_train"),
        old_log_probs=parts.get("make_experience"),
        publication=parts.get("broadcast"),
        group_size=size,
        prompts=samples // size if samples and size else None,
        prompt_tokens=None if whole is None or response is None else whole - response,
        response_tokens=line.number("rollout/response_length_mean"),
        reward=line.number("rollout/reward_mean"),
        metrics=host_metrics(line.data, notes, line.where),
    )
