"""Tasks: prompts by a fixed index, rewards, and a held-out set that is never trained on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from metronome_local.recipe import Arithmetic, Dataset, ReasoningGym
from metronome_local.rollouts import Prompt
from metronome_local.tasks.arithmetic import ArithmeticTask
from metronome_local.tasks.chat import encode
from metronome_local.tasks.dataset import DatasetTask
from metronome_local.tasks.reasoning_gym import ReasoningGymTask

__all__ = ["ArithmeticTask", "DatasetTask", "ReasoningGymTask", "Task", "encode", "load_task"]


class Task(Protocol):
    """A source of prompts and the judge of completions."""

    def prompt(self, index: int) -> Prompt:
        """Training prompt ``index``; the same index always gives the same prompt."""

    def held_out(self) -> list[Prompt]:
        """The held-out prompts."""

    def rewards(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Any]:
        """One reward a completion."""

    def accuracy(self, prompt: Prompt, text: str, reward: float) -> float:
        """1.0 for an exactly right answer, 0.0 otherwise; ``reward`` where a task has no other notion of it."""


def load_task(settings: Arithmetic | ReasoningGym | Dataset, tokenizer: Any, seed: int, base: Path) -> Task:
    """The task that ``settings`` describe; relative paths start at ``base``."""
    if isinstance(settings, Arithmetic):
        return ArithmeticTask(settings, tokenizer, seed)
    if isinstance(settings, ReasoningGym):
        return ReasoningGymTask(settings, tokenizer, seed)
    return DatasetTask(settings, tokenizer, seed, base)
