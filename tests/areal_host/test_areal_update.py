"""Parts of a batch in AReaL's real FSDP engine: the gradient of the stock batch, in any order and any split."""

import copy

import pytest

pytest.importorskip("areal", reason="the AReaL adapter's tests need AReaL (requirements/areal.txt)")

import areal_room as room
import torch
from areal_engines import apart, fresh, full, gradients, in_parts, near, ours, split, stepless, stock, whole

from metronome.errors import MetronomeError
from metronome_areal.levelling import levelled, micro_batches

SIZES = [4, 4, 2, 3]
DR_GRPO = {"actor.adv_norm": {"mean_level": "group", "std_level": None, "group_size": 4}}
RLOO = {
    "actor.adv_norm": None,
    "actor.reward_norm": {"mean_level": "group", "mean_leave1out": True, "std_level": None, "group_size": 4},
}
DAPO = {
    "actor.eps_clip": 0.2,
    "actor.eps_clip_higher": 0.28,
    "actor.overlong_reward_penalty": True,
    "actor.overlong_tokens": 4,
    "actor.overlong_penalty_factor": 1.0,
    "actor.max_new_tokens": 10,
}


NARROW = {"actor.mb_spec.max_tokens_per_mb": 48}
"""Several micro-batches a part."""

ORDERS = (((2,), (0,), (3,), (1,)), ((3, 1), (0, 2)), ((0, 1, 2, 3),))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("update")


ALGORITHMS = {
    "grpo": {},
    "grpo, kl in the reward": {"actor.kl_ctl": 0.1},
    "dr.grpo": DR_GRPO,
    "rloo": RLOO,
    "dapo": DAPO,
    "recomputed proximal policy": {"actor.prox_logp_method": "recompute"},
    "a3po": {"metronome.loss": "a3po"},
    "a3po, recomputed": {
        "metronome.loss": "a3po",
        "metronome.a3po.proximal": "recompute",
        "actor.prox_logp_method": "recompute",
    },
    "dual clip": {"actor.c_clip": 1.01, "actor.eps_clip": 0.9},
}


@pytest.fixture(scope="module")
def plain(folder):
    """Groups, and GRPO's gradient of them in one batch."""
    with ours(room.configuration(folder, NARROW)) as engine:
        groups = near(engine, fresh([4, 4, 4, 4], references=True))
        return groups, whole(engine, groups)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_parts_in_any_order_and_split_give_the_gradient_of_the_stock_batch(folder, plain, name):
    groups, of_grpo = plain
    keys, own_loss = NARROW | ALGORITHMS[name], name.startswith("a3po")
    if own_loss:
        draw = torch.Generator().manual_seed(0)
        groups = [{**one, "versions": torch.randint(0, 4, one["versions"].shape, generator=draw)} for one in groups]
    with ours(room.configuration(folder, keys)) as engine:
        engine.set_version(3 * own_loss)
        found = [in_parts(engine, split(groups, *order)) for order in ORDERS]
        own = whole(engine, groups)
        if own_loss:
            assert engine.found["metronome/loss/staleness_max"] == 3
            assert engine.found["metronome/loss/off_behavior"] > 0
    if not own_loss:  # theirs has no importance weight: parts are held to our own batch
        with stock(room.configuration(folder, keys)) as engine:
            assert apart(own, whole(engine, groups)) < 1e-6
    for gradient in found:
        assert apart(gradient, own) < 1e-6
    assert (apart(own, of_grpo) > 1e-3) == (name != "grpo")


def test_without_the_rescale_and_with_another_groups_statistics_the_gradient_is_another(folder):
    with ours(room.configuration(folder)) as engine:
        groups = near(engine, fresh(SIZES))
        right = whole(engine, groups)
        assert apart(in_parts(engine, split(groups, *ORDERS[0])), right) < 1e-6
        with stepless(engine):
            engine.metronome_begin()
            for part in copy.deepcopy(split(groups, *ORDERS[0])):
                engine.metronome_part(part)
            assert apart(gradients(engine), right) > 1  # tokens times too large
            engine._accumulation.period = None
        joined = [
            *groups[:2],
            {k: torch.cat([pad(groups[2], groups[3])[k], pad(groups[3], groups[2])[k]]) for k in groups[2]},
        ]
        assert apart(in_parts(engine, [joined]), right) > 1e-2


def pad(group, other):
    """``group`` as wide as ``other``."""
    more = max(0, other["input_ids"].shape[1] - group["input_ids"].shape[1])
    return {key: torch.nn.functional.pad(value, (0, more)) if value.ndim > 1 else value for key, value in group.items()}


def test_a_step_of_parts_moves_the_weights_as_the_stock_step(folder):
    config = room.configuration(folder)
    weights = []
    with stock(config) as engine:
        groups = near(engine, fresh([4, 4, 4, 4]))
        engine.ppo_update(engine.compute_advantages(copy.deepcopy(groups)))
        weights.append(full(engine))
    with ours(room.configuration(folder)) as engine:
        before = full(engine)
        engine.metronome_begin()
        for part in split(copy.deepcopy(groups), *ORDERS[0]):
            engine.metronome_part(part)
        found = engine.metronome_step()
        weights.append(full(engine))
    assert found["update_successful"] == 1
    assert found["metronome/weights/changed"] == 1
    assert found["metronome/periodic/tokens"] == sum(int(group["loss_mask"].sum()) for group in groups)
    assert found["metronome/periodic/rescale"] == pytest.approx(1 / found["metronome/periodic/tokens"])
    moved = (weights[0] - before).abs().max()
    assert moved > 1e-3
    # Adam's first step is a sign, which rounding turns where a gradient is nearly zero.
    assert ((weights[0] - weights[1]).abs() > 1e-3 * moved).float().mean() < 1e-2


def test_a_period_without_a_trained_token_and_one_with_an_error_say_so(folder):
    with ours(room.configuration(folder)) as engine:
        with pytest.raises(MetronomeError, match="no period is open"):
            engine.metronome_step()
        engine.metronome_begin()
        (group,) = fresh([4])
        engine.metronome_part([{**group, "loss_mask": torch.zeros_like(group["loss_mask"])}])
        with pytest.raises(MetronomeError, match="without a trained token"):
            engine.metronome_step()
        engine.metronome_begin()
        engine.metronome_part(fresh([4], seed=1))
        with pytest.raises(KeyError):
            engine.metronome_part([{key: value for key, value in group.items() if key != "rewards"}])
        engine._accumulation.period = None
        right = whole(engine, near(engine, fresh([4, 4])))
        assert right.norm() > 0  # an open period isn't in the way


@pytest.mark.parametrize("parts", [True, False], ids=["parts", "whole"])
def test_a_step_that_moves_nothing_stops_the_run(folder, parts):
    with ours(room.configuration(folder)) as engine:
        groups = near(engine, fresh([4, 4]))
        engine.optimizer.step = lambda: None
        with pytest.raises(MetronomeError, match="changed no weight"):
            update(engine, groups, parts)
        assert engine.found["metronome/weights/changed"] == 0
        for one in engine.optimizer.param_groups:
            one["lr"] = 0.0
        update(engine, groups, parts)  # as in a warm-up's first step
        assert engine.found["metronome/weights/changed"] == 0


def update(engine, groups, parts):
    groups = copy.deepcopy(groups)
    if not parts:
        engine.ppo_update(engine.compute_advantages(groups))
        return
    engine.metronome_begin()
    engine.metronome_part(groups)
    engine.metronome_step()


@pytest.mark.parametrize("parts", [True, False], ids=["parts", "whole"])
def test_a_loss_that_is_set_and_isnt_called_stops_the_run(folder, parts, monkeypatch):
    with ours(room.configuration(folder, {"metronome.loss": "ppo"})) as engine:
        groups = near(engine, fresh([4, 4]))
        update(engine, groups, parts)
        assert engine.found["metronome/loss/calls"] > 0
        monkeypatch.setattr(engine, "_compute_logprobs_and_loss", lambda logits, *_, **__: logits.mean() * 0)
        with pytest.raises(MetronomeError, match=r"metronome\.loss is set and wasn't called"):
            update(engine, groups, parts)


def test_a_step_whose_gradient_isnt_a_number_is_left_out_as_by_areal(folder):
    with ours(room.configuration(folder)) as engine:
        groups = near(engine, fresh([4, 4]))
        groups[0]["rewards"][0] = float("nan")
        update(engine, groups, False)
        assert engine.found["metronome/weights/changed"] == 0


def test_a_rank_without_enough_rows_gets_masked_ones(folder):
    config = room.configuration(folder, {"actor.mb_spec.n_mbs": 3})
    with ours(config) as engine:
        groups = near(engine, fresh([4, 4]))
        (small,) = fresh([1], seed=3)
        filled = engine.metronome_level([small])
        assert [len(one["attention_mask"]) for one in filled] == [1, 2]
        assert not filled[1]["loss_mask"].any()
        assert set(filled[1]) == set(small)
        assert levelled([], config.actor.mb_spec, None) == []
        right = whole(engine, [*groups, *filled])
        assert apart(in_parts(engine, [[small], groups]), right) < 1e-6
    assert micro_batches([5, 5, 5], config.actor.mb_spec) == 3
    assert micro_batches([200, 200, 200, 200], config.actor.mb_spec) == 4
    assert micro_batches([], config.actor.mb_spec) == 0
