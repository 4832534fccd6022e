"""What kernels for packed sequences of different lengths are told: which rows, and where each sequence ends.

Two ways to compute shared-prompt attention with them:

- *gathered*: one causal call, aligned at the lower right. Queries ``[p, r_1 .. r_K]``, keys gathered to
  ``[p, p r_1, .. p r_K]``, so that every sequence is what a separate row would hold.
- *cascade*: an own part (every prompt and response to itself, causal) and a far part (all responses of a group
  to its prompt, no mask), to be joined by log-sum-exp.

Sequences stand on their own, so a call that would exceed a kernel's limits is split. Empty responses are left
out, padding is a sequence of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from metronome.errors import ConfigurationError
from metronome.shared_prompt.plan import Segment, SharedPromptPlan


@dataclass(frozen=True)
class Limits:
    """The most that one call may hold; None: no limit."""

    sequences: int | None = None
    keys: int | None = None  # rows of keys, as of queries


NO_LIMITS = Limits()


@dataclass(frozen=True, eq=False)
class Call:
    """One call: its sequences' queries and keys, and where each sequence ends among them.

    Attributes:
        query_rows: rows of q ``[Q]``, a slice or an int64 index.
        key_rows: rows of k and v ``[T]``, a slice or an int64 index.
        query_ends, key_ends: cumulative lengths as host integers, no leading 0.
        longest_query, longest_key: lengths of the longest sequences.
    """

    query_rows: slice | Tensor
    key_rows: slice | Tensor
    query_ends: tuple[int, ...]
    key_ends: tuple[int, ...]
    longest_query: int
    longest_key: int
    _offsets: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    def offsets(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """``query_ends`` and ``key_ends`` behind a leading 0 as int32 tensors (``cu_seqlens``), made once."""
        if device not in self._offsets:
            both = torch.tensor([(0, *self.query_ends), (0, *self.key_ends)], dtype=torch.int32)
            query, key = both.to(device, non_blocking=True)
            self._offsets[device] = query, key
        return self._offsets[device]


@dataclass(frozen=True)
class _Sequence:
    """One sequence: its rows of queries, and the runs of keys that it sees, in order."""

    queries: tuple[Segment, ...]
    keys: tuple[Segment, ...]

    @property
    def query_length(self) -> int:
        """Rows of queries."""
        return sum(segment.length for segment in self.queries)

    @property
    def key_length(self) -> int:
        """Rows of keys."""
        return sum(segment.length for segment in self.keys)


def gathered(plan: SharedPromptPlan, limits: Limits = NO_LIMITS) -> tuple[Call, ...]:
    """The calls of the gathered way; together they cover every query row once."""

    def sequences() -> Iterable[_Sequence]:
        for group in plan.groups:
            if not plan.first_query:
                yield _Sequence((group.prompt,), (group.prompt,))
            for response in group.responses:
                yield _Sequence((response,), (group.prompt, response))
        if plan.padding is not None:
            yield _Sequence((plan.padding,), (plan.padding,))

    return plan.once(("gathered", limits), lambda: _calls(plan, sequences(), limits))


def own(plan: SharedPromptPlan, limits: Limits = NO_LIMITS) -> tuple[Call, ...]:
    """The calls of the cascade's own part; together they cover every query row once."""

    def sequences() -> Iterable[_Sequence]:
        for group in plan.groups:
            for segment in group.responses if plan.first_query else (group.prompt, *group.responses):
                yield _Sequence((segment,), (segment,))
        if plan.padding is not None:
            yield _Sequence((plan.padding,), (plan.padding,))

    return plan.once(("own", limits), lambda: _calls(plan, sequences(), limits))


def far(plan: SharedPromptPlan, limits: Limits = NO_LIMITS) -> tuple[Call, ...]:
    """The calls of the cascade's far part; together they cover every response row once."""

    def sequences() -> Iterable[_Sequence]:
        for group in plan.groups:
            most = limits.keys or max(1, group.tail.length)  # without a mask, queries may be cut anywhere
            for start in range(group.tail.start, group.tail.end, most):
                yield _Sequence((Segment(start, min(most, group.tail.end - start)),), (group.prompt,))

    return plan.once(("far", limits), lambda: _calls(plan, sequences(), limits))


def _calls(plan: SharedPromptPlan, sequences: Iterable[_Sequence], limits: Limits) -> tuple[Call, ...]:
    calls, batch, queries, keys = [], list[_Sequence](), 0, 0
    for sequence in sequences:
        if not sequence.query_length:
            continue
        longest = max(sequence.query_length, sequence.key_length)
        if limits.keys is not None and longest > limits.keys:
            raise ConfigurationError(
                "one sequence is longer than the attention kernel takes",
                found=longest,
                where="metronome.shared_prompt.backend",
                remedy=f"sequences of at most {limits.keys} tokens, or backend: reference",
            )
        full = limits.sequences is not None and len(batch) == limits.sequences
        long = limits.keys is not None and (
            queries + sequence.query_length > limits.keys or keys + sequence.key_length > limits.keys
        )
        if batch and (full or long):
            calls.append(_call(plan, batch))
            batch, queries, keys = [], 0, 0
        batch.append(sequence)
        queries, keys = queries + sequence.query_length, keys + sequence.key_length
    if batch:
        calls.append(_call(plan, batch))
    return tuple(calls)


def _call(plan: SharedPromptPlan, sequences: list[_Sequence]) -> Call:
    query_lengths = [sequence.query_length for sequence in sequences]
    key_lengths = [sequence.key_length for sequence in sequences]
    return Call(
        query_rows=_rows([s for one in sequences for s in one.queries], plan.first_query, plan.device),
        key_rows=_rows([s for one in sequences for s in one.keys], 0, plan.device),
        query_ends=tuple(np.cumsum(query_lengths).tolist()),
        key_ends=tuple(np.cumsum(key_lengths).tolist()),
        longest_query=max(query_lengths),
        longest_key=max(key_lengths),
    )


def _rows(segments: list[Segment], origin: int, device: torch.device) -> slice | Tensor:
    """A slice if the segments stand side by side, else an index."""
    starts, lengths = np.array(segments, dtype=np.int64).T
    starts = starts - origin
    if (starts[1:] == (starts + lengths)[:-1]).all():
        return slice(int(starts[0]), int(starts[-1] + lengths[-1]))
    shift = starts - (np.cumsum(lengths) - lengths)
    index = np.arange(int(lengths.sum())) + np.repeat(shift, lengths)
    return torch.from_numpy(index).to(device, non_blocking=True)
