"""The prompts of a run one by one, with a state that knows which of them are out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

KEY = "metronome"


class Prompts:
    """AReaL's dataloader, without end, and what a checkpoint must know beside its position.

    AReaL's recovery saves ``state_dict`` of its dataloader, rank by rank; ours stands in for it there.

    Args:
        loader: AReaL's; iterating this object iterates it.

    Attributes:
        out: tells which prompts were taken and aren't trained; set by the flow.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._here: deque[dict[str, Any]] = deque()
        self._batches: Iterator[Any] | None = None
        self._epoch = 0
        self.out: Callable[[], list[dict[str, Any]]] = list

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> dict[str, Any]:
        while not self._here:
            if self._batches is None:
                sampler: Any = getattr(self._loader, "sampler", None)
                if hasattr(sampler, "set_epoch"):
                    sampler.set_epoch(self._epoch)
                self._batches = iter(self._loader)
            batch = next(self._batches, None)
            if batch is None:
                self._batches, self._epoch = None, self._epoch + 1
                continue
            self._here.extend(batch)
        return self._here.popleft()

    def state_dict(self) -> dict[str, Any]:
        """AReaL's, and ours under ``metronome``: prompts that are out, then those of a batch that was opened."""
        own = {"prompts": [*self.out(), *self._here], "epoch": self._epoch}
        return {**self._loader.state_dict(), KEY: own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores ``state_dict``; prompts that were out come first."""
        state = dict(state)
        own = state.pop(KEY, None)
        self._loader.load_state_dict(state)
        if own is None:
            return
        self._here = deque(own["prompts"])
        self._epoch = int(own["epoch"])
