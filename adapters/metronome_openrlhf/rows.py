"""OpenRLHF's micro-batch as one packed row in which every group's prompt stands once, and results back in its layout.

Everything behind a row's last action token, and every row without one, is left out: no trained token sees it, and
OpenRLHF's masks make its results zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from metronome.errors import ConfigurationError
from metronome.shared_prompt.plan import SharedPromptPlan

Ids: TypeAlias = "npt.NDArray[np.int64]"


@dataclass(frozen=True)
class Row:
    """A row with an action token.

    Attributes:
        place: its place in the micro-batch.
        ids: token ids up to its last action token.
        prompt: tokens before its first action token (>= 1).
    """

    place: int
    ids: Ids
    prompt: int


def read_groups(sequences: Tensor, action_mask: Tensor, attention_mask: Tensor) -> list[list[Row]]:
    """The rows of a micro-batch that have an action token, those with equal prompts together, in their order.

    A prompt is what comes before a row's first action token; later turns of a row, tools' included, are its own.

    Args:
        sequences: int64 ``[B,T]``.
        action_mask: ``[B,A]``, A < T, of the last A tokens.
        attention_mask: ``[B,T]``; padding is on the right.

    Raises ConfigurationError for rows that don't begin at their first column or have holes.
    """
    length = sequences.shape[1]
    sent = torch.cat([sequences, attention_mask.to(sequences.dtype), action_mask.to(sequences.dtype)], dim=1)
    ids, present, trained = np.split(sent.cpu().numpy(), [length, 2 * length], axis=1)
    groups: dict[bytes, list[Row]] = {}
    for place in range(len(ids)):
        found = np.flatnonzero(trained[place]) + length - trained.shape[1]
        if not len(found):
            continue
        first, end = int(found[0]), int(found[-1]) + 1
        if not present[place, :end].all():
            raise ConfigurationError(
                "a row's tokens aren't side by side from its first column on",
                found=f"row {place}, {int(present[place, :end].sum())} of {end} tokens present",
                where="attention_mask",
                remedy="rows that are padded on the right, as OpenRLHF's are",
            )
        row = Row(place, ids[place, :end], first)
        groups.setdefault(row.ids[:first].tobytes(), []).append(row)
    return list(groups.values())


def comparable(groups: Sequence[Sequence[Row]]) -> list[int]:
    """Places of one group's rows for a comparison with separate rows; [] if no group has two.

    Of the largest group: two rows at least, and more while separate rows don't hold more tokens than the packed row.
    """
    largest = max(groups, key=len, default=[])
    if len(largest) < 2:
        return []
    packed = sum(group[0].prompt + sum(len(row.ids) - row.prompt for row in group) for group in groups)
    chosen, tokens = 0, 0
    for row in largest:
        tokens += len(row.ids)
        if chosen >= 2 and tokens > packed:
            break
        chosen += 1
    return [row.place for row in largest[:chosen]]


@dataclass(frozen=True, eq=False)
class PackedRow:
    """One packed row on the device, and where its results go.

    Attributes:
        plan: its layout.
        tokens: int64 ``[T]``, its token ids.
        places: int64 ``[N]``, where each response token's result stands in a flat ``[B (T-1)]``: a column before it.
    """

    plan: SharedPromptPlan
    tokens: Tensor
    places: Tensor

    @classmethod
    def build(cls, groups: Sequence[Sequence[Row]], sequences: Tensor) -> PackedRow:
        """Packs ``groups``, from ``read_groups(sequences, ...)``; without any, the first token stands alone.

        So that a micro-batch of masked rows has a graph, and gradients of zero.
        """
        width = sequences.shape[1] - 1
        if not groups:
            plan = SharedPromptPlan.build([(1, [0])], device=sequences.device)
            return cls(plan, sequences[0, :1], sequences.new_zeros(0))
        segments, tokens, places = [], [], []
        for group in groups:
            prompt = group[0].prompt
            segments.append((prompt, [len(row.ids) - prompt for row in group]))
            tokens.append(group[0].ids[:prompt])
            for row in group:
                tokens.append(row.ids[prompt:])
                places.append(np.arange(prompt, len(row.ids)) + (row.place * width - 1))
        plan = SharedPromptPlan.build(segments, device=sequences.device)
        sent = torch.from_numpy(np.concatenate([*tokens, *places])).to(sequences.device, non_blocking=True)
        return cls(plan, sent[: plan.tokens], sent[plan.tokens :])

    def spread(self, values: Tensor, shape: torch.Size) -> Tensor:
        """``values [N]``, of the response tokens, as ``[B,T-1]`` with zeros elsewhere; ``shape`` is ``[B,T]``."""
        flat = values.new_zeros(shape[0] * (shape[1] - 1))
        if self.plan.response_tokens:
            flat = flat.index_copy(0, self.places, values)
        else:
            flat = flat + values.sum()  # zero, with the graph that backward() needs
        return flat.view(shape[0], shape[1] - 1)
