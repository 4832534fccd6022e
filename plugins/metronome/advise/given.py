"""``KEY=VALUE`` of the command line: what the records lack; some keys are the readers', others the model's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from metronome.errors import ConfigurationError, nearest
from metronome.observe.readers import SETTINGS
from metronome.recipes import override


@dataclass(frozen=True, slots=True)
class Given:
    """What a user says about a run beyond its records; None: nothing.

    Attributes:
        prompt_tokens: tokens of a prompt.
        training_seconds: of forward and backward passes in a step.
        optimizer_seconds, publication_seconds: in a step.
        attention_share: part of the training seconds spent on attention between tokens, 0..1.
        half: sequences on one engine at which each decodes half as fast as one alone would.
        sigma: of the lengths' logarithm, where single responses aren't recorded.
    """

    prompt_tokens: float | None = None
    training_seconds: float | None = None
    optimizer_seconds: float | None = None
    publication_seconds: float | None = None
    attention_share: float | None = None
    half: float | None = None
    sigma: float | None = None


_ZERO = {"optimizer_seconds", "publication_seconds", "attention_share", "sigma"}
_OWN = tuple(Given.__dataclass_fields__)


def split(overrides: Sequence[str]) -> tuple[Given, list[str]]:
    """The model's own values, and the rest for ``metronome.observe.readers.read_run``.

    Raises ConfigurationError for a key that neither knows, and for a value that isn't a number in its range.
    """
    own: dict[str, float] = {}
    rest = []
    for one in overrides:
        key, value = next(iter(override({}, one, "the command line").items()))
        if key in SETTINGS:
            rest.append(one)
        elif key in _OWN:
            own[key] = _number(key, value)
        else:
            raise ConfigurationError(
                "no such setting of a run", found=key, where="the command line", remedy=nearest(key, [*SETTINGS, *_OWN])
            )
    return Given(**own), rest


def _number(key: str, value: object) -> float:
    least = "0 or more" if key in _ZERO else "above 0"
    fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if isinstance(value, int | float) and fits:
        fits = (value >= 0 if key in _ZERO else value > 0) and not (key == "attention_share" and value > 1)
    if not fits or not isinstance(value, int | float):
        remedy = f"{key}=0.2 (0 to 1)" if key == "attention_share" else f"{key}=12.5 (a number {least})"
        raise ConfigurationError(f"{key} can't be this", found=value, where="the command line", remedy=remedy)
    return float(value)
