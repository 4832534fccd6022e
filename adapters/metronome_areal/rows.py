"""AReaL's padded batch as groups, groups as one packed row, and results back in AReaL's packed layout.

A row's prompt is what comes before its first trained token; later turns, tools' included, are its own. Everything
behind its last trained token, and every row without one, is left out: no trained token sees it, and AReaL's masks
take it out of losses and advantages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from metronome.errors import ConfigurationError
from metronome.shared_prompt.plan import SharedPromptPlan

Ids: TypeAlias = "npt.NDArray[np.int64]"


@dataclass(frozen=True, eq=False)
class Row:
    """A row, as far as it is computed.

    Attributes:
        place: its place in the batch.
        ids: token ids up to its last trained token; none if there is no such token.
        prompt: tokens before its first trained token (>= 1).
    """

    place: int
    ids: Ids
    prompt: int


Group: TypeAlias = "tuple[Row, ...]"
"""Rows with one prompt."""


def fed(group: Sequence[Row]) -> int:
    """Tokens that a packed row holds of a group: its prompt once, every row's remainder."""
    return group[0].prompt + sum(len(row.ids) - row.prompt for row in group)


def read_groups(data: dict[str, Any]) -> tuple[list[Group], list[Row]]:
    """The groups of a batch in the order of their first rows, and the rows without a trained token.

    Args:
        data: ``input_ids``, ``attention_mask`` and ``loss_mask``, ``[B,L]``, padded on the right. With ``advantages``
            beside them the mask is AReaL's ``compute_advantages``'s, which stands a token to the left.

    Raises ConfigurationError for a batch without a loss mask, rows with holes or padding on the left, and a trained
    token that has no token before it.
    """
    if "loss_mask" not in data:
        raise ConfigurationError(
            "shared prompts read a row's prompt off its loss mask",
            found=sorted(data),
            where="the workflow's result",
            remedy="loss_mask beside input_ids, as RLVRWorkflow returns it, or metronome.attention=host",
        )
    shift = int("advantages" in data)
    ids, present, trained = (
        data[name].detach().to(kind).cpu().numpy()
        for name, kind in (("input_ids", torch.int64), ("attention_mask", torch.bool), ("loss_mask", torch.bool))
    )
    groups: dict[bytes, list[Row]] = {}
    others: list[Row] = []
    for place in range(len(ids)):
        found = np.flatnonzero(trained[place]) + shift
        if not len(found):
            others.append(Row(place, ids[place, :0], 0))
            continue
        first, end = int(found[0]), int(found[-1]) + 1
        if not first or end > len(ids[place]):  # AReaL's shift carries a mask at the first token to the last
            raise ConfigurationError(
                "a row's first token is trained, which nothing predicts",
                found=f"row {place}",
                where="loss_mask",
                remedy="loss_mask 0 at a row's first token",
            )
        if not present[place, :end].all():
            raise ConfigurationError(
                "a row's tokens aren't side by side from its first column on",
                found=f"row {place}, {int(present[place, :end].sum())} of {end} tokens present",
                where="attention_mask",
                remedy="rows that are padded on the right, as AReaL's workflows return them",
            )
        row = Row(place, ids[place, :end], first)
        groups.setdefault(row.ids[:first].tobytes(), []).append(row)
    return [tuple(one) for one in groups.values()], others


def comparable(groups: Sequence[Group]) -> list[int]:
    """Places of one group's rows for a comparison with separate rows; [] if no group has two.

    Of the largest group: two rows at least, and more while separate rows don't hold more tokens than the groups do.
    """
    largest = max(groups, key=len, default=())
    if len(largest) < 2:
        return []
    most = sum(fed(group) for group in groups)
    chosen, tokens = 0, 0
    for row in largest:
        tokens += len(row.ids)
        if chosen >= 2 and tokens > most:
            break
        chosen += 1
    return [row.place for row in largest[:chosen]]


@dataclass(frozen=True, eq=False)
class PackedRow:
    """One packed row on the device, and where its results go.

    Attributes:
        plan: its layout.
        tokens: int64 ``[T]``, its token ids.
        places: int64 ``[N]``, where each response token's result stands among the micro-batch's packed tokens: at
            the token before it, as in AReaL.
        size: of the micro-batch in AReaL's packed layout, in tokens.
    """

    plan: SharedPromptPlan
    tokens: Tensor
    places: Tensor
    size: int

    @classmethod
    def build(cls, groups: Sequence[Group], starts: dict[int, int], size: int, device: torch.device) -> PackedRow:
        """Packs ``groups``; without any, one token stands alone, so that a masked micro-batch has a graph.

        Args:
            groups: of the micro-batch.
            starts: by a row's place in the batch, its first token in AReaL's packed layout.
            size: tokens of that layout.
            device: where the model is.
        """
        if not groups:
            plan = SharedPromptPlan.build([(1, [0])], device=device)
            none = torch.zeros(1, dtype=torch.int64, device=device)
            return cls(plan, none, none[:0], size)
        segments, tokens, places = [], [], []
        for group in groups:
            prompt = group[0].prompt
            segments.append((prompt, [len(row.ids) - prompt for row in group]))
            tokens.append(group[0].ids[:prompt])
            for row in group:
                tokens.append(row.ids[prompt:])
                places.append(np.arange(prompt, len(row.ids)) + (starts[row.place] - 1))
        plan = SharedPromptPlan.build(segments, device=device)
        sent = torch.from_numpy(np.concatenate([*tokens, *places])).to(device, non_blocking=True)
        return cls(plan, sent[: plan.tokens], sent[plan.tokens :], size)

    def spread(self, values: Tensor) -> Tensor:
        """``values [N]``, of the response tokens, in AReaL's packed layout, zeros elsewhere."""
        flat = values.new_zeros(self.size)
        if self.plan.response_tokens:
            return flat.index_copy(0, self.places, values)
        return flat + values.sum()  # zero, with the graph that backward() needs

    def spread_rows(self, values: Tensor) -> Tensor:
        """``values [U]``, of the distinct label rows, in that layout; elsewhere the response tokens' mean.

        AReaL's statistics of logits are over all tokens; so theirs are those over the response tokens.
        """
        own = values[self.plan.label_inverse]
        mean = own.mean() if len(own) else own.new_zeros(())
        return mean.expand(self.size).index_copy(0, self.places, own)
