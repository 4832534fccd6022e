"""Micro-batches of whole groups: as many rows as OpenRLHF's, each once, groups apart only where they don't fit."""

import random

import pytest

pytest.importorskip("openrlhf", reason="the OpenRLHF adapter's tests need openrlhf (requirements/openrlhf.txt)")

import workers
from openrlhf.trainer.ppo_utils import NaiveReplayBuffer
from torch.utils.data import DataLoader

from metronome_openrlhf.batches import GroupBuffer, prompt_of, whole_groups


@pytest.mark.parametrize("seed", range(200))
def test_every_row_once_and_micro_batches_full(seed):
    draw = random.Random(seed)
    groups = [number for number in range(draw.randint(1, 9)) for _ in range(draw.randint(1, 9))]
    rows = draw.randint(1, 8)
    batches = whole_groups(groups, rows)
    placed = [row for one in batches for row in one]
    assert all(len(one) == rows for one in batches)
    assert len(batches) == len(groups) // rows
    assert len(set(placed)) == len(placed)


@pytest.mark.parametrize(
    ("sizes", "rows", "prompts"),
    [
        ((4, 4, 4, 4), 4, 4),
        ((4, 4, 4, 4), 8, 4),
        ((4, 4, 4, 4), 2, 8),  # a group over two micro-batches
        ((3, 4, 4, 1), 4, 4),  # a rank that begins and ends within a group
        ((2, 4, 6), 4, 4),
        ((8, 8, 8), 6, 6),
    ],
)
def test_groups_stay_together_where_they_fit(sizes, rows, prompts):
    groups = [number for number, size in enumerate(sizes) for _ in range(size)]
    batches = whole_groups(groups, rows)
    assert sum(len({groups[row] for row in one}) for one in batches) == prompts
    in_order = [groups[at : at + rows] for at in range(0, len(groups), rows)]
    assert prompts <= sum(len(set(one)) for one in in_order)


def filled(buffer, batch):
    for row in (row for group in batch for row in group):
        buffer.append(workers.together([row]))
    return buffer


def loaded(buffer):
    return list(
        DataLoader(
            buffer, buffer.sample_batch_size, shuffle=True, drop_last=True, collate_fn=buffer.collate_fn, num_workers=0
        )
    )


def test_openrlhfs_loader_draws_whole_groups_where_it_drew_single_rows():
    batch = workers.groups((4,) * 6)
    rows = sorted(tuple(row.sequences[0].tolist()) for group in batch for row in group)
    drawn = {}
    for made in (GroupBuffer(4), NaiveReplayBuffer(4)):
        buffer = filled(made, batch)
        micro_batches = loaded(buffer)
        assert len(micro_batches) == 6
        assert all(one.sequences.shape[0] == 4 for one in micro_batches)
        trained = [
            tuple(tokens[kept.bool()].tolist())
            for one in micro_batches
            for tokens, kept in zip(one.sequences, one.attention_mask, strict=True)
        ]
        assert sorted(trained) == rows
        drawn[type(made)] = [{prompt_of(row) for row in workers_rows(one)} for one in micro_batches]
    assert all(len(one) == 1 for one in drawn[GroupBuffer])
    assert any(len(one) > 1 for one in drawn[NaiveReplayBuffer])


def workers_rows(batch):
    from openrlhf.trainer.ppo_utils.experience import remove_padding_in_sequences, split_experience_batch

    return remove_padding_in_sequences(split_experience_batch(batch))


def test_micro_batches_are_drawn_at_random_and_cut_anew_after_more_rows():
    batch = workers.groups((4,) * 6)
    buffer = filled(GroupBuffer(4), batch[:5])
    assert len(buffer) == 5
    filled(buffer, batch[5:])
    assert len(buffer) == 6
    orders = [tuple(len(one.sequences[0]) for one in loaded(buffer)) for _ in range(8)]
    assert len(set(orders)) > 1
    buffer.clear()
    assert len(buffer) == 0
