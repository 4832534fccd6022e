"""Groups stay together over ranks and micro-batches, whatever their sizes; every row is there once."""

from __future__ import annotations

import random

import numpy as np
import pytest

from metronome.errors import ConfigurationError
from metronome_verl.groups import RowGroup, find_groups, group_order, micro_batches


def random_rows(seed, ranks=1, even=False):
    draw = random.Random(seed)
    uids, prompts, responses = [], [], []
    for number in range(ranks * draw.randint(2, 5)):
        length = draw.randint(1, 400)
        for _ in range(4 if even else draw.randint(1, 7)):
            uids.append(number)
            prompts.append(length)
            responses.append(draw.randint(0, 300))
    while len(uids) % ranks:
        uids.append(len(uids) + 1000)
        prompts.append(8)
        responses.append(120)
    order = draw.sample(range(len(uids)), len(uids))
    return [[column[row] for row in order] for column in (uids, prompts, responses)]


def loads(order, ranks, uids, prompts, responses):
    size = len(order) // ranks
    slices = [order[start : start + size] for start in range(0, len(order), size)]
    return slices, [
        sum({uids[row]: prompts[row] for row in one}.values()) + sum(responses[row] for row in one) for one in slices
    ]


@pytest.mark.parametrize("seed", range(30))
def test_every_rank_gets_as_many_rows_and_groups_stand_together(seed):
    ranks = 1 + seed % 5
    uids, prompts, responses = random_rows(seed, ranks)
    order = group_order(uids, prompts, responses, ranks)
    assert sorted(order) == list(range(len(uids)))
    slices, _ = loads(order, ranks, uids, prompts, responses)
    for one in slices:
        seen = [uids[row] for row in one]
        runs = [uid for place, uid in enumerate(seen) if not place or seen[place - 1] != uid]
        assert len(runs) == len(set(runs))


@pytest.mark.parametrize("seed", range(20))
def test_groups_of_one_size_are_never_cut_and_tokens_are_balanced(seed):
    ranks = 2 + seed % 3
    columns = random_rows(seed, ranks, even=True)
    order = group_order(*columns, ranks)
    slices, found = loads(order, ranks, *columns)
    assert sum(len({columns[0][row] for row in one}) for one in slices) == len(set(columns[0]))
    largest = max(loads([r for r in order if columns[0][r] == uid], 1, *columns)[1][0] for uid in set(columns[0]))
    assert max(found) - min(found) <= largest  # longest first is never further apart
    _, unbalanced = loads(sorted(order, key=lambda row: -columns[1][row] - columns[2][row]), ranks, *columns)
    assert max(found) < max(unbalanced)


def test_only_a_group_that_fits_nowhere_is_cut():
    uids = [number for number in range(3) for _ in range(4)]
    order = group_order(uids, [10] * 12, [5] * 12, 2)
    assert [sorted({uids[row] for row in one}) for one in (order[:6], order[6:])] in (
        [[0, 2], [1, 2]],
        [[1, 2], [0, 2]],
    )


def test_rows_that_do_not_divide_over_ranks_are_refused():
    with pytest.raises(ConfigurationError, match="equal slices"):
        group_order([0, 0, 1], [1, 1, 1], [1, 1, 1], 2)


@pytest.mark.parametrize("seed", range(30))
def test_micro_batches_stay_within_the_budget_and_hold_every_row_once(seed):
    uids, prompts, responses = random_rows(seed)
    lengths = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    members = {uid: tuple(row for row, other in enumerate(uids) if other == uid) for uid in uids}
    groups = [RowGroup(rows, prompts[rows[0]]) for rows in members.values()]
    budget = 1000
    cut = micro_batches(groups, lengths, budget)
    assert sorted(row for one in cut for group in one for row in group.rows) == list(range(len(uids)))
    assert all(cut)
    assert all(sum(group.tokens(lengths) for group in one) <= budget for one in cut)
    whole = {group for group in groups if group.tokens(lengths) <= budget}
    assert whole <= {group for one in cut for group in one}
    for wanted in (len(cut) + 1, len(uids)):  # another rank needs more
        more = micro_batches(groups, lengths, budget, wanted)
        assert len(more) == wanted
        assert all(more)
        assert all(sum(group.tokens(lengths) for group in one) <= budget for one in more)
        assert sorted(row for one in more for group in one for row in group.rows) == list(range(len(uids)))
    with pytest.raises(ConfigurationError, match="more micro-batches than rows"):
        micro_batches(groups, lengths, budget, len(uids) + 1)


def test_rows_without_uids_are_grouped_by_equal_prompts_only():
    ids = [np.array(row) for row in ([5, 6, 7, 1], [5, 6, 8, 1], [5, 6, 7, 2], [5, 6])]
    assert find_groups(ids, [3, 3, 3, 2]) == [RowGroup((0, 2), 3), RowGroup((1,), 3), RowGroup((3,), 2)]


def test_a_prefix_never_reaches_into_a_response():
    ids = [np.array([5, 6, 9, 9, 1]), np.array([5, 6, 9, 9, 2])]  # responses that begin with the same words
    assert find_groups(ids, [2, 2]) == [RowGroup((0, 1), 2)]
    assert find_groups(ids, [2, 4], uids=["u", "u"]) == [RowGroup((0, 1), 2)]


def test_rows_of_different_temperatures_stay_apart():
    ids = [np.array([5, 6, 1]), np.array([5, 6, 2]), np.array([5, 6, 3])]
    assert find_groups(ids, [2, 2, 2], apart=[1.0, 0.5, 1.0]) == [RowGroup((0, 2), 2), RowGroup((1,), 2)]


def test_groups_of_a_slice_stay_in_the_order_in_which_they_came():
    lengths = [5, 40, 20, 30]  # heaviest first would put the second group before all others, in every batch
    assert group_order([0, 0, 1, 1, 2, 2, 3, 3], [4] * 8, [one for one in lengths for _ in range(2)], 1) == [*range(8)]
