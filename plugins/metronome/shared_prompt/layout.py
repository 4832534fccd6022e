"""From a group's rows to one shared row: their longest common prefix once, then each row's remainder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from metronome.errors import ConfigurationError


@dataclass(frozen=True)
class SharedRow:
    """One group packed: ``tokens = prefix + remainder_1 + ... + remainder_K``.

    Attributes:
        tokens: token ids of the packed row.
        prompt_len: length of the shared prefix (>= 1).
        response_lens: length of each row's remainder (>= 0), in the order of the rows.
    """

    tokens: tuple[int, ...]
    prompt_len: int
    response_lens: tuple[int, ...]


def longest_common_prefix(rows: Sequence[Sequence[int]], untrained: Sequence[int] | None = None) -> int:
    """Number of leading tokens that all ``rows`` have in common.

    Args:
        rows: token ids of each row, prompt and response together.
        untrained: per row, how many leading tokens carry no loss (the index of its first trained token). The
            prefix stops there: a trained token inside the prefix would lose its own log-prob, and responses
            of one prompt often begin with the same words. None: rows are compared to their ends.
    """
    if not rows:
        return 0
    lengths = [len(row) for row in rows]
    bound = min(lengths if untrained is None else [*lengths, *untrained])
    first = rows[0]
    for index in range(bound):
        if any(row[index] != first[index] for row in rows):
            return index
    return bound


def share_rows(rows: Sequence[Sequence[int]], untrained: Sequence[int]) -> SharedRow:
    """Packs one group's rows behind their longest common prefix.

    Rows may have different prompts (several agents): what isn't shared belongs to a row's remainder, where
    context tokens stay in the context and are left to the loss mask. A row that is the prefix itself gives an
    empty response.

    Args:
        rows: token ids of each row.
        untrained: per row, the index of its first trained token (``len(row)`` if it has none).

    Raises ConfigurationError if there are no rows, or if the rows share no first token.
    """
    if len(untrained) != len(rows):
        raise ConfigurationError(
            "every row needs the index of its first trained token",
            found=f"{len(rows)} rows, {len(untrained)} indices",
            where="shared_prompt layout",
            remedy="pass one index a row",
        )
    prefix = longest_common_prefix(rows, untrained)
    if prefix < 1:
        raise ConfigurationError(
            "the rows of a group share no prompt token, so nothing predicts their first tokens together",
            found=[list(row[:3]) for row in rows[:4]],
            where="shared_prompt layout",
            remedy="start rows with the same token (BOS, chat template), or make each row a group of its own",
        )
    tokens = [*rows[0][:prefix], *(token for row in rows for token in row[prefix:])]
    return SharedRow(tuple(tokens), prefix, tuple(len(row) - prefix for row in rows))
