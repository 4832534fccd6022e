"""Groups stay together in AReaL's mini- and micro-batches, and a run trains over them end to end."""

import pytest

pytest.importorskip("areal", reason="the AReaL adapter's tests need AReaL (requirements/areal.txt)")

import areal_room as room
import numpy as np
import torch
from areal.trainer.ppo import actor as host
from areal.utils import stats_tracker
from areal.utils.data import concat_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from metronome.errors import ConfigurationError
from metronome_areal.actor import MetronomeActor
from metronome_areal.batches import exactly, micro_batches, minibatches, packed, select, whole_groups
from metronome_areal.cpu import assets
from metronome_areal.rows import Row, comparable, fed, read_groups

SHARED = {"metronome.attention": "shared_prompt"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("groups")
    assets.make(found)
    return found


def groups_of(*layouts):
    """Groups of ``(prompt, responses)``, in tokens; rows are numbered in their order."""
    found, place = [], 0
    for prompt, responses in layouts:
        rows = []
        for length in responses:
            rows.append(Row(place, np.zeros(prompt + length, dtype=np.int64), prompt))
            place += 1
        found.append(tuple(rows))
    return found


def together(*args, **named):
    return concat_batch(room.random_groups(*args, **named))[0]


# --- micro-batches ----------------------------------------------------------------------------------

layouts = st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(1, 9), min_size=1, max_size=6)), max_size=6)


@settings(max_examples=60, deadline=None)
@given(layouts, st.integers(18, 60), st.integers(0, 6))
def test_micro_batches_hold_every_row_once_within_the_budget(drawn, budget, more):
    groups = groups_of(*drawn)
    bins = micro_batches(groups, budget)
    cut = exactly(bins, len(bins) + more)
    assert len(cut) == len(bins) + more
    for made in (bins, cut):
        rows = [row.place for one in made for group in one for row in group]
        assert sorted(rows) == list(range(sum(map(len, groups))))
        assert all(sum(map(fed, one)) <= budget for one in made)
        for group in (group for one in made for group in one):
            assert len({row.prompt for row in group}) == 1


def test_groups_that_fit_stay_whole():
    groups = groups_of((10, [5] * 4), (8, [4] * 4), (12, [2] * 4))  # 30, 24 and 20 tokens
    bins = micro_batches(groups, 44)
    assert sorted(len(group) for one in bins for group in one) == [4, 4, 4]
    assert sorted(len(one) for one in bins) == [1, 2]
    assert micro_batches(groups, None) == [groups]


def test_a_group_above_the_budget_is_cut_in_its_order():
    (one, two) = micro_batches(groups_of((10, [5] * 4)), 20)
    assert sorted(len(group) for group in (*one, *two)) == [2, 2]
    with pytest.raises(ConfigurationError, match="longer than a micro-batch"):
        micro_batches(groups_of((10, [11])), 20)


def test_more_micro_batches_cut_between_groups_first_and_are_empty_last():
    groups = groups_of((4, [4, 4]), (4, [4, 4]))
    assert exactly([groups], 2) == [[groups[0]], [groups[1]]]
    four = exactly([groups], 4)
    assert [len(group) for one in four for group in one] == [1] * 4
    assert sorted(len(one) for one in exactly([groups], 6)) == [0, 0, 1, 1, 1, 1]


def test_an_empty_micro_batch_has_areals_layout():
    data = together((2,))
    full, none = packed(data, [0, 1]), packed(data, [])
    assert set(full) == set(none)
    assert none["cu_seqlens"].tolist() == [0]
    assert len(none["loss_mask"]) == 0
    assert none["loss_mask"].dtype == full["loss_mask"].dtype


# --- reading rows -----------------------------------------------------------------------------------


def test_rows_are_read_the_same_before_and_after_areals_shift():
    """AReaL's ``compute_advantages`` moves the mask a token to the left."""
    data = together((3, 2), prompt=7, response=14)
    before = read_groups(data)
    shifted = {**data, "loss_mask": torch.roll(data["loss_mask"].float(), -1, -1), "advantages": data["logprobs"]}
    after = read_groups(shifted)
    for one, other in zip(before[0], after[0], strict=True):
        assert [(row.place, row.prompt, row.ids.tolist()) for row in one] == [
            (row.place, row.prompt, row.ids.tolist()) for row in other
        ]
    del shifted["advantages"]  # not told, the mask would be read a token too early
    assert {row.prompt for group in read_groups(shifted)[0] for row in group} == {6}


def test_tokens_behind_the_last_trained_one_are_left_out():
    data = together((2,), prompt=7, response=14)
    data["loss_mask"][0, 10:] = 0
    data["loss_mask"][1] = 0
    groups, others = read_groups(data)
    assert [len(row.ids) for group in groups for row in group] == [10]
    assert [row.place for row in others] == [1]


def test_a_comparison_takes_no_more_tokens_than_the_batch():
    groups = groups_of((4, [4] * 8), (4, [1]))
    chosen = comparable(groups)
    assert 2 <= len(chosen) < 8
    assert len(comparable(groups_of((40, [1] * 8)))) == 2
    assert comparable(groups_of((4, [4]), (4, [4]))) == []


# --- minibatches ------------------------------------------------------------------------------------


def test_minibatches_are_made_of_whole_groups():
    data = together((4, 4, 4, 4), seed=3)
    with whole_groups():
        ours = _prompts(data, 2)
    assert host.split_padded_tensor_dict_into_mb_list.__name__ == "split_padded_tensor_dict_into_mb_list"
    assert [len(one) for one in ours] == [2, 2]
    assert not ours[0] & ours[1]
    stock = _prompts(data, 2)
    assert stock[0] & stock[1]  # by length, which takes groups apart


def _prompts(data, number):
    from areal.api.cli_args import MicroBatchSpec

    found = host.split_padded_tensor_dict_into_mb_list(data, MicroBatchSpec(n_mbs=number)).mbs
    assert sum(len(one["input_ids"]) for one in found) == len(data["input_ids"])
    assert all(one["attention_mask"].shape[1] == data["attention_mask"].shape[1] for one in found)
    return [{tuple(row[:5].tolist()) for row in one["input_ids"]} for one in found]


def test_no_minibatch_is_empty():
    data = together((4, 1))
    assert sorted(map(len, minibatches(data, 2))) == [1, 4]
    assert sorted(map(len, minibatches(data, 5))) == [1] * 5
    assert sorted(place for one in minibatches(data, 3) for place in one) == list(range(5))
    with pytest.raises(ConfigurationError, match="fewer rows than minibatches"):
        minibatches(data, 6)
    data["loss_mask"][:] = 0
    assert sorted(map(len, minibatches(data, 2))) == [2, 3]
    data["loss_mask"][0, 5] = 1  # one row is trained, and goes with none of the others
    assert sorted(map(len, minibatches(data, 3))) == [1, 2, 2]


def test_what_isnt_a_tokens_stays_as_it_is():
    """As AReaL's own split does."""
    data = together((3,))
    some = select(data, [2, 0])
    assert some["input_ids"].tolist() == data["input_ids"][[2, 0]].tolist()
    assert some["rewards"] is data["rewards"]


class Seeing(MetronomeActor):
    """Notes what an optimiser step was given."""

    def train_batch(self, input_, loss_fn, loss_weight_fn):
        self.seen = [*getattr(self, "seen", []), {tuple(row[:5].tolist()) for row in input_["input_ids"]}]
        return super().train_batch(input_, loss_fn, loss_weight_fn)


def test_an_update_of_several_steps_takes_whole_groups(folder):
    with room.actor(room.configuration(folder, {**SHARED, "actor.ppo_n_minibatches": 2}), Seeing) as engine:
        stats_tracker.export_all()
        engine.set_version(1)
        groups = room.random_groups([4, 4, 4])
        engine.ppo_update(engine.compute_advantages(groups))
        told = stats_tracker.export_all()
        assert sorted(map(len, engine.seen)) == [1, 2]
        assert engine.found["metronome/attention/calls"] == 4  # two layers, two steps; the first-use check isn't told
        assert told["metronome/attention/tokens_fed"] == 3 * 5 + sum(int(one["loss_mask"].sum()) for one in groups)
        assert told["metronome/attention/tokens_separate"] == sum(int(one["attention_mask"].sum()) for one in groups)


# --- a run ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["synchronous", "periodic"])
def test_a_run_trains_over_shared_prompts_with_a_reference_model(tmp_path, source, monkeypatch):
    keys = {
        **SHARED,
        "metronome.rollout_source": source,
        "metronome.loss": "a3po",
        "actor.kl_ctl": 0.1,
        "ref": {**room.settings(tmp_path)["actor"], "optimizer": None},
    }
    config = room.configuration(tmp_path, keys)
    seen = []
    record = MetronomeActor._record
    monkeypatch.setattr(MetronomeActor, "_record", lambda self: (record(self), seen.append(dict(self.found)))[0])
    with room.trainer(config) as one:
        one.train(workflow=room.workflow(config))
        assert one.ref._sharing.checked
        assert one.ref._sharing.counts.tokens_separate > one.ref._sharing.counts.tokens_fed
    assert len(seen) == 2
    for found in seen:
        assert found["metronome/attention/calls"] > 0
        assert found["metronome/attention/tokens_separate"] > found["metronome/attention/tokens_fed"] > 0
        assert found["metronome/weights/changed"] == 1.0
