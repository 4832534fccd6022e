"""The layout of one packed row ``[p_1 | r_11 .. r_1K | p_2 | ... | padding]``, built on the host.

Integers serve the backends that loop over parts; index tensors serve the model. Nothing here reads a tensor
back from the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from metronome.errors import ConfigurationError


@dataclass(frozen=True)
class Segment:
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
        span: the tokens they cover if they stand side by side, else None; counted from the group's first
        token.
        index: int64 ``[len(members) * length]``, their tokens, response after response, counted likewise.
    """

    length: int
    members: tuple[int, ...]
    span: Segment | None
    index: Tensor


@dataclass(frozen=True)
class Group:
    """A prompt, its responses right behind it, and the non-empty ones bucketed by length."""

    prompt: Segment
    responses: tuple[Segment, ...]
    buckets: tuple[Bucket, ...]

    @property
    def tail(self) -> Segment:
        """All responses as one run."""
        return Segment(self.prompt.end, self.end - self.prompt.end)

    @property
    def end(self) -> int:
        """One past the group's last token."""
        return self.responses[-1].end

    @property
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

    Attributes:
        groups: the groups, in packed order.
        padding: the padding at the end, or None.
        tokens: T, padding included.
        tokens_separate: tokens that K separate rows a group would hold, without padding.
        tokens_shared: tokens of the packed row, without padding.
        response_tokens: N, the sum of all response lengths.
        position_ids: int64 ``[T]``.
        label_rows: int64 ``[N]``, the packed row whose hidden state predicts each response token.
        response_index: int64 ``[N]``, the packed position of each response token, in packed order.
        unique_label_rows: int64 ``[U]``, the distinct values of ``label_rows``, ascending.
        label_inverse: int64 ``[N]``, ``unique_label_rows[label_inverse] == label_rows``.
        label_counts: how many response tokens each unique row predicts (host integers, length U).
        label_order: int64 ``[N]``, response tokens sorted by their unique row (stable).
    """

    groups: tuple[Group, ...]
    padding: Segment | None
    tokens: int
    tokens_separate: int
    tokens_shared: int
    response_tokens: int
    position_ids: Tensor
    label_rows: Tensor
    response_index: Tensor
    unique_label_rows: Tensor
    label_inverse: Tensor
    label_counts: tuple[int, ...]
    label_order: Tensor

    @classmethod
    def build(
        cls,
        groups: Sequence[tuple[int, Sequence[int]]],
        pad_to: int | None = None,
        device: torch.device | str = "cpu",
    ) -> SharedPromptPlan:
        """The plan of one row.

        Args:
            groups: ``(prompt_len, response_lens)`` of each group, in tokens; a response may be empty.
            pad_to: T of the padded row; None adds no padding.
            device: where the index tensors go.

        Raises ConfigurationError for no group, an empty prompt, a group without responses, a negative length,
        or a ``pad_to`` below the row's tokens.
        """
        target = torch.device(device)
        _check(groups)
        built: list[Group] = []
        positions: list[Tensor] = []
        start = separate = 0
        for prompt_len, response_lens in groups:
            prompt = Segment(start, prompt_len)
            positions.append(torch.arange(prompt_len))
            start += prompt_len
            responses = []
            for length in response_lens:
                responses.append(Segment(start, length))
                positions.append(torch.arange(prompt_len, prompt_len + length))
                start += length
                separate += prompt_len + length
            built.append(Group(prompt, tuple(responses), _buckets(responses, prompt.start, target)))
        labels = _label_rows(built)
        unique, inverse, counts = torch.unique(labels, return_inverse=True, return_counts=True)
        padding = _padding(start, pad_to)
        if padding is not None:
            positions.append(torch.arange(padding.length))
        return cls(
            groups=tuple(built),
            padding=padding,
            tokens=start if padding is None else padding.end,
            tokens_separate=separate,
            tokens_shared=start,
            position_ids=torch.cat(positions).to(target),
            response_tokens=labels.shape[0],
            label_rows=labels.to(target),
            response_index=_response_index(built).to(target),
            unique_label_rows=unique.to(target),
            label_inverse=inverse.to(target),
            label_counts=tuple(counts.tolist()),  # labels live on the host, this waits for no device
            label_order=torch.argsort(inverse, stable=True).to(target),
        )

    def alone(self, group: int) -> SharedPromptPlan:
        """The plan of one of the groups, standing in a row of its own."""
        one = self.groups[group]
        lengths = [response.length for response in one.responses]
        return SharedPromptPlan.build([(one.prompt.length, lengths)], device=self.position_ids.device)


def _label_rows(groups: Sequence[Group]) -> Tensor:
    """The row that predicts each response token; the prompt's last row predicts all first tokens."""
    rows = [torch.empty(0, dtype=torch.int64)]
    for group in groups:
        for response in group.responses:
            if response.length:
                rows += [torch.tensor([group.prompt.end - 1]), torch.arange(response.start, response.end - 1)]
    return torch.cat(rows)


def _response_index(groups: Sequence[Group]) -> Tensor:
    return torch.cat([torch.arange(group.tail.start, group.tail.end) for group in groups])


def _buckets(responses: Sequence[Segment], origin: int, device: torch.device) -> tuple[Bucket, ...]:
    members: dict[int, list[int]] = {}
    for number, response in enumerate(responses):
        if response.length:
            members.setdefault(response.length, []).append(number)
    buckets = []
    for length, numbers in members.items():
        starts = [responses[number].start - origin for number in numbers]
        side_by_side = all(after - before == length for before, after in pairwise(starts))
        span = Segment(starts[0], length * len(starts)) if side_by_side else None
        index = torch.cat([torch.arange(start, start + length) for start in starts]).to(device)
        buckets.append(Bucket(length, tuple(numbers), span, index))
    return tuple(buckets)


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


def _check(groups: Sequence[tuple[int, Sequence[int]]]) -> None:
    where = "SharedPromptPlan.build(groups)"
    if not groups:
        raise ConfigurationError("a plan needs at least one group", where=where, remedy="[(prompt_len, lens)]")
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
