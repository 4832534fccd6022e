"""Rewards of a group, with the faults of a user's function kept apart, and group advantages."""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Sequence
from typing import Any

from metronome.errors import ConfigurationError
from metronome_local.rollouts import Group, Prompt
from metronome_local.tasks import Task


class ScorerWarning(UserWarning):
    """A reward function raised; the sample counts as zero."""


class Scorer:
    """Fills ``group.texts`` and ``group.rewards``; called from one thread at a time.

    A reward function that raises costs the sample that raised a zero and one counted warning; if every one of
    its first ``patience`` samples raises, or a reward isn't a finite number, the run stops.
    """

    def __init__(self, task: Task, tokenizer: Any, patience: int = 16) -> None:
        self._task, self._tokenizer, self._patience = task, tokenizer, patience
        self.raised = self.scored = 0

    def score(self, group: Group) -> Group:
        """Decodes and scores; raises ConfigurationError for rewards that can't be used."""
        texts = [self._tokenizer.decode(rows[-1].response, skip_special_tokens=True) for rows in group.rollouts]
        group.texts = texts
        group.rewards = self._rewards([group.prompt] * len(texts), texts)
        return group

    def _rewards(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[float]:
        try:
            rewards = self._task.rewards(prompts, texts)
            self.scored += len(texts)
        except Exception:  # the user's function: find out which samples it raises on
            rewards = [self._alone(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
        if not isinstance(rewards, list | tuple) or len(rewards) != len(texts):
            raise ConfigurationError(
                f"the reward function must return {len(texts)} rewards, one a completion",
                found=rewards if not isinstance(rewards, list | tuple) else f"{len(rewards)} rewards",
                where="task.reward",
                remedy="return a list of floats",
            )
        return [_finite(reward, text) for reward, text in zip(rewards, texts, strict=True)]

    def _alone(self, prompt: Prompt, text: str) -> Any:
        try:
            reward = self._task.rewards([prompt], [text])[0]
            self.scored += 1
            return reward
        except Exception as error:
            self.raised += 1
            if self.scored == 0 and self.raised >= self._patience:
                raise ConfigurationError(
                    f"the reward function raised on each of the first {self.raised} samples: "
                    f"{type(error).__name__}: {error}",
                    found=text[:40],
                    where="task.reward",
                    remedy="mend the function; the value found is the completion",
                ) from error
            if self.raised == 1:
                warnings.warn(
                    f"the reward function raised {type(error).__name__}: {error}; the sample counts as 0 "
                    f"(counted in the metric reward_raised)",
                    ScorerWarning,
                    stacklevel=2,
                )
            return 0.0


def _finite(reward: Any, text: str) -> float:
    try:
        value = math.nan if isinstance(reward, str) else float(reward)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor of several values
        value = math.nan
    if not math.isfinite(value):
        raise ConfigurationError(
            f"the reward of {text[:40]!r} isn't a finite number",
            found=reward,
            where="task.reward",
            remedy="return finite floats",
        )
    return value


def advantages(rewards: Sequence[float], kind: str) -> list[float]:
    """Group-relative advantages.

    group-std: (r - mean) / (std + 1e-4), std with n - 1 (GRPO); group-mean: r - mean (Dr.GRPO; also what
    ``batch`` whitens over the whole period).
    """
    mean = statistics.fmean(rewards)
    centred = [reward - mean for reward in rewards]
    if kind != "group-std":
        return centred
    deviation = statistics.stdev(rewards)
    return [value / (deviation + 1e-4) for value in centred]


def degenerate(rewards: Sequence[float]) -> bool:
    """Whether every rollout got the same reward, so that no group-relative advantage exists."""
    return max(rewards) - min(rewards) < 1e-9
