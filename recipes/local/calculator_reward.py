"""The reward of calculator.yaml, in TRL's form: prompts, completions and the data file's columns."""

from __future__ import annotations

import re
from typing import Any


def right_number(prompts: list[Any], completions: list[Any], answer: list[int], **_: Any) -> list[float]:
    """1 if the last number of the completion is the answer, .2 more for having asked the calculator."""
    rewards = []
    for completion, right in zip(completions, answer, strict=True):
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        numbers = re.findall(r"-?\d+", text)
        rewards.append(float(bool(numbers) and int(numbers[-1]) == right) + 0.2 * ("<calc>" in text))
    return rewards
