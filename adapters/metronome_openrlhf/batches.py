"""Micro-batches of whole groups in OpenRLHF's replay buffer, as many and as large as its own.

OpenRLHF draws single rows at random, which takes groups apart. Here rows with one prompt stay together where they
fit, and micro-batches are drawn at random. An optimiser step still takes as many rows; of several steps a batch, each
gets other rows than it would.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from openrlhf.trainer.ppo_utils import NaiveReplayBuffer


class GroupBuffer(NaiveReplayBuffer):
    """OpenRLHF's buffer, whose items are whole micro-batches: a ``DataLoader`` takes one at a time."""

    def __init__(self, sample_batch_size: int, *arguments: Any, **named: Any) -> None:
        super().__init__(1, *arguments, **named)
        self._rows = sample_batch_size
        self._cut: list[list[int]] | None = None

    def append(self, experience: Any) -> None:
        """OpenRLHF's."""
        super().append(experience)
        self._cut = None

    def clear(self) -> None:
        """OpenRLHF's."""
        super().clear()
        self._cut = None

    def __len__(self) -> int:
        """Whole micro-batches; what is left over is dropped, as OpenRLHF's loader does."""
        return len(self._batches())

    def __getitem__(self, place: int) -> list[Any]:
        """The rows of a micro-batch."""
        return [self.items[row] for row in self._batches()[place]]

    def collate_fn(self, batch: Any) -> Any:
        """OpenRLHF's, of the one micro-batch in ``batch``."""
        return super().collate_fn(batch[0])

    def _batches(self) -> list[list[int]]:
        if self._cut is None:
            self._cut = whole_groups([prompt_of(one) for one in self.items], self._rows)
        return self._cut


def prompt_of(row: Any) -> Hashable:
    """What a single row of OpenRLHF's buffer has before its first action token; all of it if it has none."""
    trained = row.action_mask.nonzero()
    end = int(trained[0]) + 1 if len(trained) else len(row.sequences)
    return row.sequences[:end].cpu().numpy().tobytes()


def whole_groups(groups: Sequence[Hashable], rows: int) -> list[list[int]]:
    """Cuts a batch into micro-batches of exactly ``rows`` rows; the last rows that fill none are left out.

    A group of at least ``rows`` rows fills micro-batches of its own first. What is left of the groups is put together
    largest first; where none fits whole, the smallest is cut. A group that is cut has its prompt in each part.

    Args:
        groups: of each row, what tells its group.
        rows: of a micro-batch (>= 1).
    """
    members: dict[Hashable, list[int]] = {}
    for place, group in enumerate(groups):
        members.setdefault(group, []).append(place)
    batches: list[list[int]] = []
    pieces: list[list[int]] = []
    for own in members.values():
        whole = len(own) - len(own) % rows
        batches += [own[at : at + rows] for at in range(0, whole, rows)]
        if whole < len(own):
            pieces.append(own[whole:])
    pieces.sort(key=len, reverse=True)
    while pieces:
        batch: list[int] = []
        while pieces and len(batch) < rows:
            room = rows - len(batch)
            fits = next((place for place, piece in enumerate(pieces) if len(piece) <= room), None)
            if fits is not None:
                batch += pieces.pop(fits)
            else:
                batch += pieces[-1][:room]
                pieces[-1] = pieces[-1][room:]
                pieces.sort(key=len, reverse=True)
        if len(batch) == rows:
            batches.append(batch)
    return batches
