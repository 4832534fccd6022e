"""A group controller that takes its sizes in turn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from metronome.contracts import StepStats


class Alternating:
    """G of step s is ``sizes[s % len(sizes)]``; P = R / G rounded down to a multiple."""

    name = "alternating"

    def __init__(self, sizes: tuple[int, ...] = (4, 8)) -> None:
        self.sizes = sizes
        self.steps = 0

    def size(self) -> int:
        """G for the next step."""
        return self.sizes[self.steps % len(self.sizes)]

    def largest(self) -> int:
        """The largest of the sizes."""
        return max(self.sizes)

    def prompts(self, rollout_budget: int, multiple: int = 1) -> int:
        """``rollout_budget`` / G, rounded down to ``multiple`` and at least ``multiple``."""
        return max(rollout_budget // self.size() // multiple, 1) * multiple

    def observe(self, stats: StepStats) -> Mapping[str, float]:
        """Moves to the next size, whatever the step's outcome was."""
        self.steps += 1
        return {"alternating/size": float(self.size())}

    def explain(self) -> str:
        """One sentence on the present size."""
        place = self.steps % len(self.sizes) + 1
        return f"G is {self.size()}: it is the turn of place {place} of {self.sizes}."

    def state_dict(self) -> dict[str, Any]:
        """The number of steps taken."""
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores ``state_dict``."""
        self.steps = int(state["steps"])
