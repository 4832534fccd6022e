"""What the trainer's side of each recorded step took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from metronome.advise.given import Given
from metronome.advise.lengths import StepGroups
from metronome.errors import ConfigurationError
from metronome.observe.records import RunRecord, Step


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one step.

    Attributes:
        training: passes of every token: forward and backward, old log-probs and reference included.
        proximal: the pass for a recomputed proximal policy.
        optimizer: clip and optimiser step.
        unnamed: in no recorded part; taken as serial.
        publication: of the weights.
    """

    training: float
    proximal: float
    optimizer: float
    unnamed: float
    publication: float

    @property
    def serial(self) -> float:
        """Seconds after the last group is trained, but for publication."""
        return self.optimizer + self.unnamed


def trainer_times(
    run: RunRecord, source: str, steps: Sequence[StepGroups], given: Given, measured: list[str]
) -> list[Times]:
    """``[steps]`` times, what ``given`` says over what was recorded; appends to ``measured`` how they came about.

    Raises ConfigurationError where the seconds of training are neither recorded nor given.
    """
    turns = source in ("synchronous", "colocated")
    recorded = all(one.step.training is not None for one in steps)
    if given.training_seconds is None and recorded and any(_passes(one.step) for one in steps):
        measured.append("training includes the passes for old log-probs and the reference")
    between = given.training_seconds is None and not recorded and turns and run.host == "csv"
    if between:
        if len(run.steps) == 1:
            raise ConfigurationError(
                "one step can't show training: it is the time between a step's last response and the next one's first",
                found="1 step",
                where=run.name,
                remedy="give a CSV of more steps, or training_seconds=12.5, forward and backward passes of a step",
            )
        measured.append("training is the time between a step's last response and the next step's first")
    times = []
    for one in steps:
        step = one.step
        training = given.training_seconds
        if training is None and recorded:
            training = (step.training or 0.0) + _passes(step)
        elif training is None and between:
            training = step.seconds - (step.generation or 0.0)
        if training is None or training < 0.0:
            raise ConfigurationError(
                "the seconds of training aren't recorded",
                found=run.name,
                where=f"a {source} run of {run.host}",
                remedy="give training_seconds=12.5, forward and backward passes of a step",
            )
        optimizer = step.optimizer or 0.0 if given.optimizer_seconds is None else given.optimizer_seconds
        publication = step.publication or 0.0 if given.publication_seconds is None else given.publication_seconds
        proximal, unnamed = step.proximal or 0.0, 0.0
        waited = step.waiting if step.waiting is not None else step.generation if turns else None
        if waited is not None:
            unnamed = max(0.0, step.seconds - waited - training - proximal - optimizer - publication)
        times.append(Times(training, proximal, optimizer, unnamed, publication))
    if not sum(one.training for one in times):
        raise ConfigurationError(
            "no step trained for any time", found=run.name, where=f"a {source} run of {run.host}",
            remedy="give training_seconds=12.5, forward and backward passes of a step",
        )  # fmt: skip
    return times


def _passes(step: Step) -> float:
    return (step.old_log_probs or 0.0) + (step.reference or 0.0)
