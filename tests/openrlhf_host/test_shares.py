"""How a part's rows are dealt to ranks: every row once, full micro-batches of whole groups, equal work."""

import random

import pytest

from metronome_openrlhf.shares import shares


def parts(count):
    """Groups of unequal sizes and lengths, numbers of ranks, and rows a micro-batch."""
    draw = random.Random(7)
    for _ in range(count):
        lengths = [[draw.randint(1, 50) for _ in range(draw.randint(1, 9))] for _ in range(draw.randint(1, 7))]
        yield lengths, draw.randint(1, 5), draw.randint(1, 8)


def test_every_row_is_dealt_once_and_no_micro_batch_is_too_large_or_empty():
    for lengths, ranks, rows in parts(300):
        dealt = shares(lengths, ranks, rows)
        assert len(dealt) == ranks
        batches = [batch for one in dealt for batch in one]
        assert all(0 < len(batch) <= rows for batch in batches)
        places = [place for batch in batches for place in batch]
        everything = [(group, member) for group, row in enumerate(lengths) for member in range(len(row))]
        assert sorted(places) == everything


def test_no_rank_idles_while_another_could_give_it_a_row():
    for lengths, ranks, _ in parts(300):
        if sum(map(len, lengths)) >= ranks:
            assert all(shares(lengths, ranks, 100))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_group_stays_whole_where_a_micro_batch_holds_it(ranks):
    dealt = shares([[5] * 4, [6] * 4, [7] * 4, [8] * 4], ranks, 4)
    batches = [batch for one in dealt for batch in one]
    assert all(len({group for group, _ in batch}) == 1 for batch in batches)
    assert len(batches) == 4


def test_heavy_groups_go_to_different_ranks():
    dealt = shares([[100] * 2, [10] * 2, [10] * 2, [100] * 2], 2, 2)
    assert [sorted(batch[0][0] for batch in one) for one in dealt] in ([[0, 1], [2, 3]], [[0, 2], [1, 3]])


def test_one_group_on_two_ranks_is_cut_in_two():
    assert [len(batch) for one in shares([[3] * 6], 2, 8) for batch in one] == [3, 3]
