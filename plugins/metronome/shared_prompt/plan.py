"""The layout of one packed row ``[p_1 | r_11 .. r_1K | p_2 | ... | padding]``, built on the host.

Integers serve the backends that loop over parts; index tensors serve the model, and reach the device in one
transfer. Nothing here reads a tensor back from the device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from metronome.errors import ConfigurationError
from metronome.shared_prompt.labels import label_arrays, position_array

Value = TypeVar("Value")


class Segment(NamedTuple):
    """A run of packed tokens: ``start .. start + length - 1``."""

    start: int
    length: int

    @property
    def end(self) -> int:
        """One past the last token."""
        return self.start + self.length


@dataclass(frozen=True)
class Bucket:
    """Responses of one group that have the same length, so that a kernel takes them as a batch.

    Attributes:
        length: their common length (>= 1).
        members: their numbers within the group.
        starts: where each begins, counted from the group's first token.
    """

    length: int
    members: tuple[int, ...]
    starts: tuple[int, ...]

    @cached_property
    def span(self) -> Segment | None:
        """The tokens they cover if they stand side by side, else None; counted from the group's first token."""
        side_by_side = all(after - before == self.length for before, after in pairwise(self.starts))
        return Segment(self.starts[0], self.length * len(self.starts)) if side_by_side else None

    @cached_property
    def index(self) -> Tensor:
        """int64 ``[len(members) * length]`` on the host: their tokens, response after response."""
        places = np.asarray(self.starts)[:, None] + np.arange(self.length)
        return torch.from_numpy(places.reshape(-1))


@dataclass(frozen=True)
class Group:
    """A prompt and its responses right behind it."""

    prompt: Segment
    responses: tuple[Segment, ...]

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """The responses that aren't empty, by length."""
        members: dict[int, list[int]] = {}
        for number, response in enumerate(self.responses):
            if response.length:
                members.setdefault(response.length, []).append(number)
        origin = self.prompt.start
        return tuple(
            Bucket(length, tuple(numbers), tuple(self.responses[number].start - origin for number in numbers))
            for length, numbers in members.items()
        )

    @property
    def tail(self) -> Segment:
        """All responses as one run."""
        return Segment(self.prompt.end, self.end - self.prompt.end)

    @property
    def end(self) -> int:
        """One past the group's last token."""
        return self.responses[-1].end

    @cached_property
    def reach(self) -> int:
        """The longest sequence that a separate row would hold: ``Lp + max Lr``."""
        return self.prompt.length + max(response.length for response in self.responses)


@dataclass(frozen=True, eq=False)
class SharedPromptPlan:
    """Where every token of a packed row belongs, and which row predicts which response token.

    Token j of a response sees its group's whole prompt and its own response up to j, nothing else; position
    ids of every response restart at the prompt's length. The first token of all K responses is predicted by
    the *same* row, the last of the prompt, so labels are gathered, never shifted. Padding is a segment of its
    own.

    With a *cached prompt* (``reuse.py``) the prompt's keys and values come from an earlier pass: keys and
    values have T rows, queries and hidden states only those of the responses and the padding behind them.

    Attributes:
        groups: the groups, in packed order.
        padding: the padding at the end, or None.
        tokens: T, rows of keys and values, padding included.
        first_query: the first of them that is a query too: 0, or the prompt's length with a cached prompt.
        tokens_separate: tokens that K separate rows a group would hold, without padding.
        tokens_shared: tokens of the packed row, without padding.
        response_tokens: N, the sum of all response lengths.
        position_ids: int64 ``[Q]``, Q = T - first_query.
        label_rows: int64 ``[N]``, the row whose hidden state predicts each response token. With a cached
            prompt, row 0 is the prompt's last hidden state and the row's own hidden states follow.
        response_index: int64 ``[N]``, each response token's place among the queries, in packed order.
        unique_label_rows: int64 ``[U]``, the distinct values of ``label_rows``, ascending.
        label_inverse: int64 ``[N]``, ``unique_label_rows[label_inverse] == label_rows``.
        label_bounds: host integers ``[U + 1]``; unique row u predicts the response tokens
            ``label_order[label_bounds[u] : label_bounds[u + 1]]``.
        label_order: int64 ``[N]``, response tokens sorted by their unique row (stable).
    """

    groups: tuple[Group, ...]
    padding: Segment | None
    tokens: int
    first_query: int
    tokens_separate: int
    tokens_shared: int
    response_tokens: int
    position_ids: Tensor
    label_rows: Tensor
    response_index: Tensor
    unique_label_rows: Tensor
    label_inverse: Tensor
    label_bounds: np.ndarray
    label_order: Tensor
    _made: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def build(
        cls,
        groups: Sequence[tuple[int, Sequence[int]]],
        pad_to: int | None = None,
        device: torch.device | str = "cpu",
        cached_prompt: bool = False,
    ) -> SharedPromptPlan:
        """The plan of one row.

        Args:
            groups: ``(prompt_len, response_lens)`` of each group, in tokens; a response may be empty.
            pad_to: T of the padded row; None adds no padding.
            device: where the index tensors go.
            cached_prompt: the prompt's keys and values come from an earlier pass; one group only.

        Raises ConfigurationError for no group, an empty prompt, a group without responses, a negative length,
        a ``pad_to`` below the row's tokens, or a cached prompt with several groups.
        """
        _check(groups, cached_prompt)
        built: list[Group] = []
        start = separate = 0
        for prompt_len, response_lens in groups:
            prompt = Segment(start, prompt_len)
            start += prompt_len
            responses = []
            for length in response_lens:
                responses.append(Segment(start, length))
                start += length
            separate += prompt_len * len(responses) + start - prompt.end
            built.append(Group(prompt, tuple(responses)))
        padding = _padding(start, pad_to)
        tokens = start if padding is None else padding.end
        first_query = built[0].prompt.end if cached_prompt else 0
        segments = [(one.prompt, one.responses) for one in built]
        arrays, bounds = label_arrays(segments, first_query)
        arrays["position_ids"] = position_array(segments, 0 if padding is None else padding.length, first_query)
        return cls(
            groups=tuple(built),
            padding=padding,
            tokens=tokens,
            first_query=first_query,
            tokens_separate=separate,
            tokens_shared=start,
            response_tokens=len(arrays["label_rows"]),
            label_bounds=bounds,
            **_on_device(arrays, torch.device(device)),
        )

    @property
    def queries(self) -> int:
        """Q, the rows of queries, hidden states and token ids."""
        return self.tokens - self.first_query

    @property
    def device(self) -> torch.device:
        """Where the index tensors are."""
        return self.position_ids.device

    @property
    def segment_ids(self) -> tuple[Tensor, Tensor]:
        """int32 ``[T]`` twice: the group of each token (padding: one more), and 0 in its prompt, k in response k."""

        def build() -> tuple[Tensor, Tensor]:
            lengths, numbers, members = [], [], []
            for number, group in enumerate(self.groups):
                for member, segment in enumerate((group.prompt, *group.responses)):
                    lengths.append(segment.length)
                    numbers.append(number)
                    members.append(member)
            if self.padding is not None:
                lengths.append(self.padding.length)
                numbers.append(len(self.groups))
                members.append(0)
            both = np.repeat(np.array([numbers, members], dtype=np.int32), lengths, axis=1)
            group, segment = torch.from_numpy(both).to(self.device)
            return group, segment

        return self.once("segment_ids", build)

    @property
    def key_positions(self) -> Tensor:
        """int64 ``[T]``, the position of every key; ``position_ids`` unless the prompt is cached."""
        if not self.first_query:
            return self.position_ids

        def build() -> Tensor:
            return torch.cat([torch.arange(self.first_query, device=self.device), self.position_ids])

        return self.once("key_positions", build)

    def once(self, key: Hashable, build: Callable[[], Value]) -> Value:
        """What ``build`` makes of this plan, made at the first call with ``key`` and kept for all layers."""
        if key not in self._made:
            self._made[key] = build()
        made: Value = self._made[key]
        return made

    def alone(self, group: int) -> SharedPromptPlan:
        """The plan of one of the groups, standing in a row of its own."""
        one = self.groups[group]
        lengths = [response.length for response in one.responses]
        return SharedPromptPlan.build([(one.prompt.length, lengths)], device=self.device)


def _on_device(arrays: dict[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """All arrays as views of one tensor that is sent once."""
    sent = torch.from_numpy(np.concatenate(list(arrays.values()))).to(device, non_blocking=True)
    return dict(zip(arrays, torch.split(sent, [len(array) for array in arrays.values()]), strict=True))


def _padding(used: int, pad_to: int | None) -> Segment | None:
    if pad_to is None or pad_to == used:
        return None
    if pad_to < used:
        raise ConfigurationError(
            "the padded row is shorter than its tokens",
            found=pad_to,
            where="SharedPromptPlan.build(pad_to)",
            remedy=f"pad_to >= {used}",
        )
    return Segment(used, pad_to - used)


def _check(groups: Sequence[tuple[int, Sequence[int]]], cached_prompt: bool) -> None:
    where = "SharedPromptPlan.build(groups)"
    if not groups:
        raise ConfigurationError("a plan needs at least one group", where=where, remedy="[(prompt_len, lens)]")
    if cached_prompt and len(groups) > 1:
        raise ConfigurationError(
            "a cached prompt belongs to one group", found=len(groups), where=where, remedy="one plan a group"
        )
    for number, (prompt_len, response_lens) in enumerate(groups):
        place = f"{where}, group {number}"
        if prompt_len < 1:
            raise ConfigurationError(
                "an empty prompt: nothing predicts the first token of its responses",
                found=prompt_len,
                where=place,
                remedy="start the prompt with at least one token (BOS)",
            )
        if not response_lens:
            raise ConfigurationError(
                "a group without responses", found=[], where=place, remedy="leave the group out of the row"
            )
        if min(response_lens) < 0:
            raise ConfigurationError(
                "a negative response length", found=list(response_lens), where=place, remedy="lengths >= 0"
            )
