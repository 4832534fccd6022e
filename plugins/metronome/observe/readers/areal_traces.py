"""AReaL's tracers: sessions-rN.jsonl on the clock of time.time, traces-rN.jsonl in microseconds from a start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from metronome.errors import ConfigurationError
from metronome.observe.readers.files import MEND, Line, read_jsonl
from metronome.observe.readers.inventory import Inventory
from metronome.observe.records import Span

_KINDS = {
    "train.ref_logp": "reference",
    "train.recompute_logp": "old_log_probs",
    "train.compute_values": "other",
    "train.compute_advantage": "other",
    "train.ppo_update": "train",
    "train.critic_ppo_update": "train",
    "train.update_weights": "publish",
    "train.eval": "evaluate",
    "train.save": "save",
    "train.checkpoint": "save",
}
"""Scopes of AReaL's trainer (rl_trainer.py) and what they are here; its wait, ``train.rollout``, is no span."""

_INNER = {"ppo_actor.ppo_update": "train", "fsdp_engine.step": "step", "megatron_engine.step": "step"}
"""Under periodic asynchrony the update's scope has waits in it; these, within it, have none, and carry no step."""
_COMMIT, _UPDATE = "train.log_stats", "train.ppo_update"


@dataclass(frozen=True, slots=True)
class Session:
    """One response's generation, in seconds of time.time; ``end`` is that of its last turn."""

    number: int
    start: float
    end: float


def sessions_of(files: Inventory, notes: list[str]) -> dict[int, list[Session]]:
    """Task -> its sessions that generated to an end, by their number, which is the order in which they began."""
    result: dict[int, list[Session]] = {}
    for path in files.lines_with("session_id", "task_id", "submit_ts"):
        for line in read_jsonl(path, notes):
            task, number = line.whole("task_id"), line.whole("session_id")
            phases = line.data.get("phases")
            turns = phases.get("generate") if isinstance(phases, dict) else None
            if task is None or number is None or not turns or line.data.get("role") in ("eval-rollout",):
                continue
            times = [Line(turn, line.where) for turn in turns]
            starts = [one for turn in times if (one := turn.number("start_ts")) is not None]
            ends = [one for turn in times if (one := turn.number("end_ts")) is not None]
            if starts and ends and max(ends) < min(starts):
                raise ConfigurationError(
                    "a session ends before it starts", found=(min(starts), max(ends)), where=line.where, remedy=MEND
                )
            if starts and ends:
                result.setdefault(task, []).append(Session(number, min(starts), max(ends)))
    return {task: sorted(found, key=lambda one: one.number) for task, found in result.items()}


def trainer_spans(
    files: Inventory, logged: Mapping[int, float], numbers: Mapping[int, int], periodic: bool, notes: list[str]
) -> list[Span]:
    """The trainer's spans, of its first rank, on the clock of time.time.

    The traces count from a start of their own. It is put where a step's scope ``train.log_stats`` meets the clock
    time at which TensorBoard got the step's first metric: the least difference over the steps, since that comes after
    the scope's beginning. Without metrics there is nothing to set it by, and no span.

    Args:
        logged: AReaL's step -> clock time of its first metric.
        numbers: AReaL's step -> its number here.
        periodic: whether the update's scope has waits in it, so that what it did stands in scopes within it.
    """
    lines = [
        line
        for path in sorted(files.lines_with("name", "ph", "pid"))
        for line in read_jsonl(path, notes)
        if line.data.get("ph") == "X" and _argument(line, "rank") <= 0
    ]
    begins = {_argument(line, "global_step"): line.number("ts") for line in lines if line.data["name"] == _COMMIT}
    offsets = [logged[step] - begin / 1e6 for step, begin in begins.items() if step in logged and begin is not None]
    if not offsets:
        if lines:
            notes.append("The performance traces can't be set to a clock without the run's TensorBoard metrics.")
        return []
    scopes = [_Scope(line, min(offsets)) for line in lines]
    updates = [one for one in scopes if one.name == _UPDATE and one.step in numbers]
    spans = []
    for one in scopes:
        kind, step = _KINDS.get(one.name), one.step
        if periodic and one.name == _UPDATE:
            kind = None
        elif periodic and one.name in _INNER:
            kind, step = _INNER[one.name], next((outer.step for outer in updates if outer.has(one)), -1)
        if kind is not None and step in numbers:
            spans.append(Span("trainer", kind, one.start, one.end, numbers[step]))
    return spans


class _Scope:
    """One scope of a trace in seconds of time.time; its step is -1 where it has none."""

    def __init__(self, line: Line, offset: float) -> None:
        line.refuse_negative("dur")
        self.name, self.step = str(line.data["name"]), _argument(line, "global_step")
        self.start = (line.number("ts") or 0.0) / 1e6 + offset
        self.end = self.start + (line.number("dur") or 0.0) / 1e6

    def has(self, other: _Scope) -> bool:
        """Whether ``other`` lies within this one."""
        return self.start <= other.start and other.end <= self.end


def _argument(line: Line, name: str) -> int:
    """An argument of the scope; -1 if it has none of that name."""
    arguments = line.data.get("args")
    value = arguments.get(name) if isinstance(arguments, dict) else None
    return value if isinstance(value, int) else -1
