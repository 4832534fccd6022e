"""AReaL's own records: TensorBoard, rollout dump, session traces and performance traces of one trial.

Read in AReaL 1.0.4. ``stats_logger.tensorboard.path`` gives metrics (``timeperf/...``, ``ppo_actor/...``);
``rollout.dump_to_file`` gives rollout/VERSION/TASK.jsonl with lengths, rewards and the last token's version;
``perf_tracer.enabled`` gives traces-rN.jsonl (spans of the trainer) and, with ``perf_tracer.session_tracer.enabled``,
sessions-rN.jsonl (clock times of each response). No file says which step trained a response.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from metronome.errors import ConfigurationError
from metronome.observe.readers.areal_traces import Session, sessions_of, trainer_spans
from metronome.observe.readers.files import (
    IN_TURNS,
    MEND,
    Line,
    host_metrics,
    read_jsonl,
    read_text,
    renumbered,
    source_of,
)
from metronome.observe.readers.inventory import Inventory
from metronome.observe.records import Rollout, RunRecord, Span, Step
from metronome.recipes import parse_yaml

LOOKED_FOR = "areal: TensorBoard events, rollout/VERSION/TASK.jsonl or sessions-r0.jsonl"
_TIMES = "timeperf/"
_WAITED = "metronome/periodic/seconds_waiting"


def found(files: Inventory) -> bool:
    """Whether anything that only AReaL writes is there."""
    return files.has_tag(_known) or bool(_dumps(files)) or bool(files.lines_with("session_id", "task_id", "submit_ts"))


def read(files: Inventory, given: Mapping[str, object]) -> RunRecord:
    """AReaL's run; ``given`` may have ``source``.

    A response's step is that whose weights sampled its last token, which is the step that trained it unless the run is
    bounded. Raises ConfigurationError for records of several runs and for figures that aren't finite.
    """
    notes: list[str] = []
    config = _config(files)
    logged = files.scalars(_known, notes) or {}
    metrics = {at: Line(dict(one.values), one.where) for at, one in logged.items() if any(map(_known, one.values))}
    source, settings = source_of(given, _source(metrics, config)), _settings(config)
    sessions = sessions_of(files, notes)
    dumped = list(_rollouts(files, sessions, notes))
    ends = {at: logged[at].wall_time for at in metrics}
    known = sorted(metrics or {one.step for one in dumped})
    numbers = {at: number for number, at in enumerate(known)}
    dropped = sum(one.step not in numbers for one in dumped)
    if dropped:
        notes.append(f"{dropped} responses are of versions that no recorded step trained; left out.")
    dumped = [replace(one, step=numbers[one.step]) for one in dumped if one.step in numbers]
    dumped.sort(key=lambda one: (one.step, one.start or 0.0, one.prompt))
    traced = trainer_spans(files, ends, numbers, source == "periodic", notes)
    origin = min([one.start for one in dumped if one.start is not None] + [one.start for one in traced], default=0.0)
    rollouts = [_shifted(one, origin) for one in dumped]
    if source == "bounded":
        notes.append(
            "AReaL doesn't record which step trained a response: its step is that of its last token's version."
        )
    elif source is not None:
        rollouts = [replace(one, trained_version=one.version) for one in rollouts]
    steps = [_step(numbers[at], line, source, ends, at, notes) for at, line in metrics.items()]
    steps = [_with_rollouts(step, [one for one in rollouts if one.step == step.number]) for step in steps]
    generated = [
        Span(one.worker or "rollout", "generate", one.start, one.end, one.step)
        for one in rollouts
        if one.start is not None and one.end is not None
    ]
    moved = [replace(one, start=one.start - origin, end=one.end - origin) for one in traced]
    spans = sorted([*generated, *moved], key=lambda one: (one.start, one.end))
    notes += _missing(metrics, rollouts, sessions, source) + renumbered(known, "AReaL's step")
    return RunRecord(
        files.place.name, "areal", source, tuple(steps), tuple(rollouts), tuple(spans), settings, tuple(notes)
    )


def _known(tag: str) -> bool:
    return tag == _TIMES + "train_step"


def _dumps(files: Inventory) -> list[Path]:
    return [path for path in files.lines_with("task_id", "sample_idx", "tail_version") if "eval" not in _kind(path)]


def _kind(path: Path) -> str:
    return path.parent.parent.name


def _rollouts(files: Inventory, sessions: Mapping[int, Sequence[Session]], notes: list[str]) -> Iterator[Rollout]:
    """Every dumped response with its step still AReaL's; a task's samples go with its sessions in their order."""
    for path in _dumps(files):
        for line in read_jsonl(path, notes):
            task, sample = line.whole("task_id"), line.whole("sample_idx")
            length, prompt, version = line.whole("seqlen"), line.whole("prompt_len"), line.whole("tail_version")
            if task is None or sample is None or length is None or prompt is None or version is None:
                raise ConfigurationError(
                    "a response lacks task_id, sample_idx, seqlen, prompt_len or tail_version",
                    where=line.where,
                    remedy=MEND,
                )
            if not 0 <= prompt <= length:
                raise ConfigurationError(
                    "seqlen must be at least prompt_len", found=(length, prompt), where=line.where, remedy=MEND
                )
            of_task = sessions.get(task, ())
            session = of_task[sample] if sample < len(of_task) else None
            yield Rollout(
                step=version,
                prompt=str(task),
                response_tokens=length - prompt,
                prompt_tokens=prompt,
                start=None if session is None else session.start,
                end=None if session is None else session.end,
                reward=line.number("reward"),
                version=version,
            )


def _shifted(one: Rollout, origin: float) -> Rollout:
    return replace(
        one,
        start=None if one.start is None else one.start - origin,
        end=None if one.end is None else one.end - origin,
    )


def _step(number: int, line: Line, source: str | None, ends: Mapping[int, float], at: int, notes: list[str]) -> Step:
    def seconds(name: str) -> float | None:
        return line.number(_TIMES + name)

    line.refuse_negative(_TIMES, _WAITED, *_waits(line))
    parts = [line.number(key) or 0.0 for key in line.data if key.startswith(_TIMES)]
    whole = ends[at] - ends[at - 1] if at - 1 in ends else sum(parts)  # the first one's beginning isn't recorded
    if whole < 0.0:
        raise ConfigurationError(
            "a step was logged before the one before it", found=f"{whole:.3f} s", where=line.where, remedy=MEND
        )
    waited, training = line.number(_WAITED, *_waits(line)), seconds("train_step")
    gathering = seconds("rollout")
    if source == "periodic":
        training = None if training is None or waited is None else training - waited  # groups arrive within it
    response = None
    mean, prompt = line.number("ppo_actor/seq_len/avg"), line.number("ppo_actor/prompt_len/avg")
    if mean is not None and prompt is not None:
        response = mean - prompt
    return Step(
        number=number,
        seconds=whole,
        generation=gathering if source in IN_TURNS else None,
        waiting=gathering if waited is None else waited,
        training=training,
        old_log_probs=seconds("recompute_logp"),
        reference=seconds("ref_logp"),
        publication=seconds("update_weights"),
        prompt_tokens=prompt,
        response_tokens=response,
        reward=line.number("ppo_actor/task_reward/avg"),
        metrics=host_metrics(line.data, notes, line.where),
    )


def _waits(line: Line) -> list[str]:
    return [key for key in line.data if key.endswith(_WAITED)]


def _with_rollouts(step: Step, rollouts: Sequence[Rollout]) -> Step:
    prompts = len({one.prompt for one in rollouts})
    if not prompts:
        return step
    return replace(
        step,
        prompts=prompts,
        group_size=len(rollouts) // prompts if len(rollouts) % prompts == 0 else None,
        response_tokens_max=float(max(one.response_tokens for one in rollouts)),
    )


def _config(files: Inventory) -> Mapping[str, Any]:
    """The trial's config.yaml, which AReaL writes beside its logs; empty where it isn't there."""
    for path in files.files:
        if path.name == "config.yaml":
            config = parse_yaml(read_text(path), str(path))
            if isinstance(config, dict) and "gconfig" in config:
                return config
    return {}


def _at(config: Mapping[str, Any], *keys: str) -> Any:
    value: Any = config
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _source(metrics: Mapping[int, Line], config: Mapping[str, Any]) -> str | None:
    keys = {key for line in metrics.values() for key in line.data}
    for name in ("periodic", "bounded"):
        if any(f"metronome/{name}/" in key for key in keys):
            return name
    bound = _at(config, "rollout", "max_head_offpolicyness")
    if bound is None:
        return None
    return "bounded" if bound > 0 else "synchronous"


def _settings(config: Mapping[str, Any]) -> dict[str, object]:
    found = {
        "staleness": _at(config, "rollout", "max_head_offpolicyness"),
        "group_size": _at(config, "gconfig", "n_samples"),
        "max_tokens": _at(config, "gconfig", "max_new_tokens"),
        "prompts": _at(config, "train_dataset", "batch_size"),
    }
    return {key: value for key, value in found.items() if isinstance(value, int)}


def _missing(
    metrics: Mapping[int, Line], rollouts: Sequence[Rollout], sessions: Mapping[int, object], source: str | None
) -> list[str]:
    notes = []
    if not metrics:
        notes.append("No metrics: run AReaL with stats_logger.tensorboard.path=FOLDER.")
    if not rollouts:
        notes.append("No rollout dump, so nothing is known of single responses: set rollout.dump_to_file=true.")
    if not sessions:
        notes.append(
            "No session traces, so responses have no clock times: set perf_tracer.enabled=true and "
            "perf_tracer.session_tracer.enabled=true."
        )
    if source is None:
        notes.append("Neither metrics of ours nor a config.yaml tell the schedule: give source=... and staleness=....")
    return notes
