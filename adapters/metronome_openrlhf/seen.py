"""What a run showed, from the metrics of its steps: one line at its end."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_STEP = re.compile(r"Global step \d+: (\{.*\})")
_NUMBER = re.compile(r"'([^']+)': (-?(?:\d[\d.e+-]*|inf|nan))")
_SIZES = 8  # how many steps' G are told one by one
_KEPT = (
    "periodic/parts",
    "loss/calls",
    "loss/staleness_max",
    "loss/off_behavior",
    "bounded/staleness_max",
    "attention/tokens_fed",
    "attention/tokens_separate",
    "group_controller/size",
)


class Seen:
    """What a run showed.

    Attributes:
        steps: what is told of the metrics of each step, under their names without ``metronome/``.
    """

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def __call__(self, line: str) -> None:
        """Reads a line of OpenRLHF's output."""
        if found := _STEP.search(line):
            self.add({name: float(value) for name, value in _NUMBER.findall(found[1])})

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Takes the metrics of a step."""
        self.steps.append({key: float(metrics[name]) for key in _KEPT if (name := f"metronome/{key}") in metrics})

    def told(self, loss: str | None = None) -> str:
        """The steps, and what showed that each technique was at work; ``loss`` is ours by name."""
        found = [f"{len(self.steps)} step{'' if len(self.steps) == 1 else 's'}"]
        if parts := self._of("periodic/parts"):
            found.append(f"batches trained in {_span(parts)} parts")
        if calls := self._of("loss/calls"):
            found.append(f"loss {loss or 'ours'}, {sum(calls):.0f} calls")
        if ages := self._of("loss/staleness_max") or self._of("bounded/staleness_max"):
            found.append(f"samples up to {max(ages):.0f} versions old" if max(ages) else "no sample of an old version")
        if max(shares := self._of("loss/off_behavior"), default=0.0):
            found.append(f"A-3PO's proximal policy wasn't the engines' for up to {max(shares):.0%} of the tokens")
        if fed := self._of("attention/tokens_fed"):
            found.append(f"{sum(fed):.0f} tokens fed for {sum(self._of('attention/tokens_separate')):.0f}")
        if sizes := self._of("group_controller/size"):
            each = ", ".join(f"{one:.0f}" for one in sizes)
            found.append(f"G {each}" if len(sizes) <= _SIZES else f"G {_span(sizes)}, at last {sizes[-1]:.0f}")
        return "; ".join(found)

    def _of(self, key: str) -> list[float]:
        return [step[key] for step in self.steps if key in step]


def _span(values: list[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.0f}" if low == high else f"{low:.0f} to {high:.0f}"
