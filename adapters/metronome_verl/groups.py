"""Rows that share a prompt stay together: over data-parallel ranks, and in micro-batches.

Everything here is host arithmetic on lengths and token ids. A group's *shared tokens* are what one packed row
holds of it: its common prefix once, and every row's remainder.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from metronome.errors import ConfigurationError
from metronome.shared_prompt.layout import longest_common_prefix

Ids: TypeAlias = "npt.NDArray[np.int64]"


@dataclass(frozen=True)
class RowGroup:
    """Rows of one batch that begin with the same ``prefix`` tokens.

    Attributes:
        rows: their places in the batch.
        prefix: leading tokens that stand once (>= 1).
    """

    rows: tuple[int, ...]
    prefix: int

    def tokens(self, lengths: Sequence[int]) -> int:
        """Shared tokens: ``prefix + sum(length - prefix)``, with the length of every row of the batch."""
        return self.prefix + sum(lengths[row] - self.prefix for row in self.rows)


def find_groups(
    ids: Sequence[Ids],
    prompt_lens: Sequence[int],
    uids: Sequence[Hashable] | None = None,
    apart: Sequence[Hashable] | None = None,
) -> list[RowGroup]:
    """The groups of a batch, in the order of their first rows.

    Rows with equal prompts form a group. Rows with one uid whose prompts differ (several agents, or a rollout
    that gives several rows) form one group behind their longest common prefix if that holds fewer tokens than
    the groups of equal prompts do. A prefix never reaches past a prompt, so every response token keeps a
    log-prob of its own, trained or not (verl's masks never train a prompt token).

    Args:
        ids: token ids of each row, prompt and response.
        prompt_lens: length of each row's prompt.
        uids: of each row, or None where the data carries none.
        apart: rows that differ here are never grouped (their temperatures).
    """
    count = len(ids)
    keys = [(uids[row] if uids else None, apart[row] if apart else None) for row in range(count)]
    clusters: dict[Hashable, dict[bytes, list[int]]] = {}
    for row in range(count):
        prompt = ids[row][: prompt_lens[row]].tobytes()
        clusters.setdefault(keys[row], {}).setdefault(prompt, []).append(row)
    lengths = [len(one) for one in ids]
    groups: list[RowGroup] = []
    for cluster in clusters.values():
        equal = [RowGroup(tuple(rows), prompt_lens[rows[0]]) for rows in cluster.values()]
        groups += _together(equal, ids, lengths) if uids and len(equal) > 1 else equal
    return sorted(groups, key=lambda group: group.rows)


def micro_batches(
    groups: Sequence[RowGroup], lengths: Sequence[int], budget: int, at_least: int = 1
) -> list[list[RowGroup]]:
    """Cuts a rank's batch into micro-batches of at most ``budget`` shared tokens, groups whole where they fit.

    A group above the budget is cut into parts that each hold its prefix. The number of micro-batches is the
    smallest for which the longest-first rule stays within the budget, or ``at_least`` (what another rank
    needs), for which groups are halved if there are too few.

    Args:
        groups: of the batch; together they hold every row once.
        lengths: of each row, in tokens.
        budget: shared tokens that a micro-batch may hold.
        at_least: micro-batches to make.

    Raises ConfigurationError if a single row is longer than the budget, or for more micro-batches than rows.
    """
    parts = [part for group in groups for part in _within(group, lengths, budget)]
    while len(parts) < at_least:
        largest = max((part for part in parts if len(part.rows) > 1), key=lambda p: p.tokens(lengths), default=None)
        if largest is None:
            raise ConfigurationError(
                "more micro-batches than rows: another data-parallel rank needs them",
                found=f"{at_least} micro-batches, {len(parts)} rows",
                where="dynamic batches (use_dynamic_bsz)",
                remedy="a larger ppo_max_token_len_per_gpu, or the same number of rows on every rank",
            )
        parts.remove(largest)
        half = len(largest.rows) // 2
        parts += [RowGroup(rows, largest.prefix) for rows in (largest.rows[:half], largest.rows[half:])]
    costs = [part.tokens(lengths) for part in parts]
    number = max(at_least, -(-sum(costs) // budget))
    while True:
        bins = _longest_first(costs, number)
        if all(sum(costs[part] for part in one) <= budget for one in bins) or number >= len(parts):
            return [[parts[part] for part in one] for one in bins]
        number += 1


def group_order(
    uids: Sequence[Hashable], prompt_lens: Sequence[int], response_lens: Sequence[int], dp_size: int
) -> list[int]:
    """A permutation of the rows after which ``dp_size`` equal slices hold whole groups and similar shared tokens.

    The heaviest group goes first, to the rank with the fewest shared tokens among those with room for all its
    rows. Groups that fit nowhere whole (sizes that don't fill the ranks evenly) are cut over the ranks with
    most room. Within a slice groups
    stand in the order of their first rows, and a group's rows side by side, in the order they had.

    Args:
        uids: of each row; equal uids share a prompt.
        prompt_lens, response_lens: of each row, in tokens.
        dp_size: slices; divides the number of rows.

    Raises ConfigurationError if it doesn't.
    """
    count = len(uids)
    if dp_size < 1 or count % dp_size:
        raise ConfigurationError(
            "rows don't divide into equal slices for the data-parallel ranks",
            found=f"{count} rows, {dp_size} ranks",
            where="metronome_verl.groups.group_order",
            remedy="pad the batch to a multiple of the ranks first, as verl's _balance_batch does",
        )
    lengths = [prompt + response for prompt, response in zip(prompt_lens, response_lens, strict=True)]
    members: dict[Hashable, list[int]] = {}
    for row, uid in enumerate(uids):
        members.setdefault(uid, []).append(row)
    groups = [RowGroup(tuple(rows), min(prompt_lens[row] for row in rows)) for rows in members.values()]
    groups.sort(key=lambda group: group.tokens(lengths), reverse=True)
    room, load = [count // dp_size] * dp_size, [0] * dp_size
    slices: list[list[tuple[int, ...]]] = [[] for _ in range(dp_size)]

    def place(group: RowGroup, rank: int) -> None:
        slices[rank].append(group.rows)
        room[rank] -= len(group.rows)
        load[rank] += group.tokens(lengths)

    homeless = []
    for group in groups:
        ranks = [rank for rank in range(dp_size) if room[rank] >= len(group.rows)]
        if ranks:
            place(group, min(ranks, key=lambda rank: load[rank]))
        else:
            homeless.append(group)
    for group in homeless:
        rows = group.rows
        while rows:
            rank = max(range(dp_size), key=lambda one: (room[one], -load[one]))
            fitting, rows = rows[: room[rank]], rows[room[rank] :]
            place(RowGroup(fitting, group.prefix), rank)
    # In a slice groups stand as they came: longest first would give every first mini-batch the longest responses.
    return [row for one in slices for rows in sorted(one) for row in rows]


def _together(equal: list[RowGroup], ids: Sequence[Ids], lengths: Sequence[int]) -> list[RowGroup]:
    """One group behind what all of them share, or the groups as they are: whichever holds fewer tokens."""
    shared = longest_common_prefix([ids[group.rows[0]][: group.prefix].tolist() for group in equal])
    if shared < 1:
        return equal
    one = RowGroup(tuple(sorted(row for group in equal for row in group.rows)), shared)
    return [one] if one.tokens(lengths) < sum(group.tokens(lengths) for group in equal) else equal


def _within(group: RowGroup, lengths: Sequence[int], budget: int) -> list[RowGroup]:
    """The group, or parts of it in its order that each stay within the budget."""
    parts: list[list[int]] = []
    used = budget + 1
    for row in group.rows:
        if lengths[row] > budget:
            raise ConfigurationError(
                "a row is longer than a micro-batch may be",
                found=f"{lengths[row]} tokens, at most {budget}",
                where="max_token_len_per_gpu",
                remedy="a larger ppo_max_token_len_per_gpu (log_prob_max_token_len_per_gpu), or shorter responses",
            )
        own = lengths[row] - group.prefix
        if used + own > budget:
            parts.append([])
            used = group.prefix
        parts[-1].append(row)
        used += own
    return [RowGroup(tuple(rows), group.prefix) for rows in parts]


def _longest_first(costs: Sequence[int], number: int) -> list[list[int]]:
    """``number`` bins, each item to the lightest so far, heaviest items first; the heaviest bin leads."""
    bins: list[list[int]] = [[] for _ in range(number)]
    load = [0] * number
    for item in sorted(range(len(costs)), key=lambda item: costs[item], reverse=True):
        lightest = min(range(number), key=lambda one: load[one])
        bins[lightest].append(item)
        load[lightest] += costs[item]
    return [bins[one] for one in sorted(range(number), key=lambda one: load[one], reverse=True)]
