"""Labels and positions of a packed row, by arithmetic over all its responses at once: numpy, no torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Segments = tuple[tuple[int, int], Sequence[tuple[int, int]]]
"""A group: ``(start, length)`` of its prompt, and of each response."""


def label_arrays(groups: Sequence[Segments], first_query: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """``label_rows`` and its kin of a ``SharedPromptPlan``, and ``label_bounds``.

    A response's first token is predicted by its prompt's last row, token j by the row of token j - 1. Sorted by
    predicting row, a group's first tokens come first, all from one row, and then the others, one row each.
    """
    table = np.array(
        [(*response, number) for number, (_, responses) in enumerate(groups) for response in responses],
        dtype=np.int64,
    )
    starts, lengths, numbers = table[table[:, 1] > 0].T
    total = int(lengths.sum())
    offset = np.arange(total) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    packed = np.repeat(starts, lengths) + offset
    group = np.repeat(numbers, lengths)
    first = offset == 0
    prompt_end = np.array([start + length for (start, length), _ in groups])
    rows = np.where(first, prompt_end[group] - 1, packed - 1)
    firsts = np.bincount(numbers, minlength=len(groups))  # responses that aren't empty, a group
    others = np.bincount(group, minlength=len(groups)) - firsts
    h: np.ndarray = np.cumsum(firsts > 0) - (firsts > 0)  # unique rows that are a prompt's last, before this group's
    inverse = np.where(
        first, (h + np.cumsum(others) - others)[group], np.cumsum(~first) - 1 + np.cumsum(firsts > 0)[group]
    )
    unique = np.empty(int((firsts > 0).sum() + others.sum()), dtype=np.int64)
    unique[inverse] = rows
    c_first = np.cumsum(first) - first + (np.cumsum(others) - others)[group]
    c_other = np.cumsum(~first) - 1 + np.cumsum(firsts)[group]
    order = np.empty(total, dtype=np.int64)
    order[np.where(first, c_first, c_other)] = np.arange(total)
    bounds = np.concatenate([[0], np.cumsum(np.bincount(inverse, minlength=len(unique)))])
    if first_query:
        rows, unique = rows - (first_query - 1), unique - (first_query - 1)
    return {
        "label_rows": rows,
        "response_index": packed - first_query,
        "unique_label_rows": unique,
        "label_inverse": inverse,
        "label_order": order,
    }, bounds


def position_array(groups: Sequence[Segments], padding: int, first_query: int) -> np.ndarray:
    """``position_ids``: every response restarts at its prompt's length, padding at 0."""
    lengths, origins = [], []
    for prompt, responses in groups:
        lengths += [prompt[1], *(response[1] for response in responses)]
        origins += [0, *([prompt[1]] * len(responses))]
    lengths.append(padding)
    origins.append(0)
    shift = np.array(origins) - (np.cumsum(lengths) - lengths)
    positions: np.ndarray = (np.arange(sum(lengths)) + np.repeat(shift, lengths))[first_query:]
    return positions
