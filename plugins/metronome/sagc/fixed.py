"""The group controller that never moves: one G for the whole run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import field_validator

from metronome.contracts import StepStats
from metronome.errors import ConfigurationError
from metronome.sagc import budget, events
from metronome.settings import Options


class FixedOptions(Options):
    """Options of ``fixed``.

    Attributes:
        size: G, rollouts per prompt, at least 2.
    """

    size: int = 8

    @field_validator("size")
    @classmethod
    def _at_least_two(cls, size: int) -> int:
        if size < 2:
            raise ValueError("size: 2 or more, since a group-relative advantage needs at least 2 rollouts")
        return size


class Fixed:
    """The same G at every step; logs the stragglers that a moving G would have seen.

    Validation keeps its own number of samples: this G is for training rollouts.
    """

    name = "fixed"

    def __init__(self, options: FixedOptions) -> None:
        self._size = options.size

    def size(self) -> int:
        """G."""
        return self._size

    def largest(self) -> int:
        """G."""
        return self._size

    def prompts(self, rollout_budget: int, multiple: int = 1) -> int:
        """``floor(R / G)`` rounded down to ``multiple``, at least ``multiple`` (``sagc.budget``)."""
        return budget.prompts("fixed_rollouts", rollout_budget, multiple, size=self._size, largest=self._size)

    def observe(self, stats: StepStats) -> Mapping[str, float]:
        """Metrics of the step: straggler_ratio, truncation_rate (absent without responses), group_size."""
        metrics = {"group_size": float(self._size)}
        groups = events.with_responses(stats.groups)
        if groups:
            metrics["straggler_ratio"] = events.ratio_event(groups, tau=1.0).value
            metrics["truncation_rate"] = events.truncation_rate(groups)
        return metrics

    def explain(self) -> str:
        """One sentence."""
        return f"G {self._size}: fixed by the settings"

    def state_dict(self) -> dict[str, Any]:
        """``{"size": G}``."""
        return {"size": self._size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Checks that the state was saved with this G; raises ConfigurationError otherwise."""
        if state.get("size") != self._size:
            raise ConfigurationError(
                f"the checkpoint was written with another group size than {self._size}",
                found=state.get("size"),
                where="state of group controller 'fixed'",
                remedy=f"fixed: {{size: {state.get('size')}}}, or start a new run",
            )
