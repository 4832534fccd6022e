"""Three traps of AReaL 1.0.4: each test shows the stock engine in it, and ours out of it."""

import copy
import functools

import pytest

pytest.importorskip("areal", reason="the AReaL adapter's tests need AReaL (requirements/areal.txt)")

import areal_room as room
import torch
from areal.api import FinetuneSpec
from areal.api.cli_args import NormConfig
from areal.engine import FSDPPPOActor, FSDPPPOCritic
from areal.trainer.ppo import actor as host
from areal.utils.data import Normalization
from areal_engines import apart, fresh, in_parts, near, ours, stock, whole
from transformers import AutoModelForCausalLM

from metronome.errors import ConfigurationError
from metronome_areal.actor import MetronomeCritic
from metronome_areal.advantages import TrueGroups
from metronome_areal.packing import RowsApart, needs_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("traps")


# --- packing ------------------------------------------------------------------------------------------


@torch.no_grad()
def alone(folder, groups):
    """The model's log-probs of every row by itself, each at the place of the token before."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, attn_implementation="sdpa")
    found = []
    for group in groups:
        rows = torch.zeros(group["logprobs"].shape)
        for row, mask in enumerate(group["attention_mask"]):
            ids = group["input_ids"][row, mask].long()[None]
            scores = torch.log_softmax(model(ids).logits[0, :-1], -1)
            rows[row, : ids.shape[1] - 1] = scores.gather(1, ids[0, 1:, None])[:, 0]
        found.append(rows)
    return found


def worst(found, right, groups):
    """The largest difference over trained tokens."""
    return max(
        float((one - other)[torch.roll(group["loss_mask"], -1, -1).bool()].abs().max())
        for one, other, group in zip(found, right, groups, strict=True)
    )


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flex_attention"])
def test_packed_rows_see_each_other_in_the_stock_engine_and_not_in_ours(folder, attention):
    config = room.configuration(folder, {"actor.attn_impl": attention})
    groups = room.random_groups([4, 3, 4])
    right = alone(folder, groups)
    with stock(config, FSDPPPOActor) as engine:
        assert worst(engine.compute_logp(copy.deepcopy(groups)), right, groups) > 0.05
    with ours(room.configuration(folder, {"actor.attn_impl": attention})) as engine:
        assert worst(engine.compute_logp(copy.deepcopy(groups)), right, groups) < 1e-5


def test_a_packed_gradient_is_that_of_rows_by_themselves(folder):
    wide = {"actor.mb_spec.max_tokens_per_mb": 4096}
    single = {"actor.mb_spec.max_tokens_per_mb": 16}  # a row a micro-batch
    with ours(room.configuration(folder, wide)) as engine:
        groups = near(engine, fresh([4, 3]))
        packed = whole(engine, groups)
    with ours(room.configuration(folder, single)) as engine:
        right = whole(engine, groups)
    with stock(room.configuration(folder, single | {"actor.adv_norm": None}), FSDPPPOActor) as engine:
        lone = whole(engine, groups)
    with stock(room.configuration(folder, wide | {"actor.adv_norm": None}), FSDPPPOActor) as engine:
        mixed = whole(engine, groups)
    assert apart(packed, right) < 1e-6
    assert apart(mixed, lone) > 1e-2


CRITIC = {
    "critic": {
        "experiment_name": "room",
        "trial_name": "t0",
        "backend": "fsdp:d1",
        "is_critic": True,
        "optimizer": {"type": "adam", "lr": 1e-2, "warmup_steps_proportion": 0.0},
    }
}


@pytest.mark.parametrize("kind", [FSDPPPOCritic, MetronomeCritic], ids=["stock", "ours"])
def test_a_critics_packed_rows_too(folder, kind):
    config = room.configuration(folder, CRITIC)
    config.critic.path = config.actor.path
    room.enter(config)
    room._another_port()
    engine = kind(config.critic)
    engine.create_process_group()
    engine.initialize(None, FinetuneSpec(1, 64, 4))
    groups = room.random_groups([4, 3])
    packed = engine.compute_values(copy.deepcopy(groups))
    engine.config.mb_spec.max_tokens_per_mb = 16  # a row a micro-batch
    right = engine.compute_values(copy.deepcopy(groups))
    engine.destroy()
    assert (worst(packed, right, groups) > 1e-2) == (kind is FSDPPPOCritic)
    assert (worst(packed, right, groups) < 1e-5) == (kind is MetronomeCritic)


def test_flash_attention_and_tree_training_keep_areals_masks_and_a_slice_of_rows_is_refused():
    assert needs_rows("sdpa", False)
    assert needs_rows("eager", False)
    assert not needs_rows("flash_attention_2", False)
    assert not needs_rows("sdpa", True)

    class Base:
        def _prepare_mb_list(self, input_):
            return input_

    class Sliced(RowsApart, Base):
        config = type("Config", (), {"attn_impl": "sdpa"})
        parallel_helper = type("Parallel", (), {"sp_size": 2})
        enable_tree_training = False

    with pytest.raises(ConfigurationError, match="flash_attention_2"):
        Sliced()._prepare_mb_list({})


# --- versions -----------------------------------------------------------------------------------------


def interpolated(monkeypatch):
    """What AReaL's loss interpolates with: 1 - alpha of every trained token, as it goes."""
    seen, resolve = [], host._resolve_proximal_logp

    @functools.wraps(resolve)
    def noting(**named):
        found = resolve(**named)
        share = (found - named["old_logp"]) / (named["logprobs"] - named["old_logp"])
        seen.append((named["versions"], share))
        return found

    monkeypatch.setattr(host, "_resolve_proximal_logp", noting)
    return seen


@pytest.mark.parametrize("kind", ["stock", "ours"])
def test_versions_stand_a_token_beside_their_log_probs_in_the_stock_engine_and_not_in_ours(folder, kind, monkeypatch):
    seen = interpolated(monkeypatch)
    group = {
        "input_ids": torch.randint(2, 97, (1, 8), generator=torch.Generator().manual_seed(0)).int(),
        "attention_mask": torch.ones(1, 8, dtype=torch.bool),
        "loss_mask": torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]]).int(),
        "logprobs": -9.0 * torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]]),
        "versions": torch.tensor([[-1, -1, -1, 0, 0, 0, 3, 3]]).int(),
        "rewards": torch.ones(1),
    }
    config = room.configuration(folder, {"actor.adv_norm": None})
    with stock(config, FSDPPPOActor) if kind == "stock" else ours(config) as engine:
        engine.set_version(4)
        advantages = engine.compute_advantages([group])
        assert advantages[0]["loss_mask"].tolist() == [[0, 0, 1, 1, 1, 1, 1, 0]]
        engine.ppo_update(advantages)
    ((versions, share),) = seen
    right = [0.75, 0.75, 0.75, 0.0, 0.0]  # staleness 4, 4, 4, 1, 1
    found = share[2:7].tolist()
    if kind == "stock":
        assert versions[2:7].tolist() == [-1, 0, 0, 0, 3]
        assert found == pytest.approx([0.0, 0.75, 0.75, 0.75, 0.0], abs=1e-5)
    else:
        assert versions[2:7].tolist() == [0, 0, 0, 3, 3]
        assert found == pytest.approx(right, abs=1e-5)


# --- groups -------------------------------------------------------------------------------------------


def expected(rewards):
    """GRPO's advantages of one group."""
    return (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-5)


GROUPS = {"mean_level": "group", "std_level": "group", "group_size": 8, "std_unbiased": False}


def test_g_that_goes_from_8_to_4_to_6_with_a_failed_member_keeps_its_own_statistics(folder):
    sizes = [8, 8, 4, 4, 6, 5]  # the last lost a member
    groups = room.random_groups(sizes)
    keys = {"actor.adv_norm": None, "actor.reward_norm": GROUPS}
    with stock(room.configuration(folder, keys), FSDPPPOActor) as engine:
        wrong = engine.compute_advantages(copy.deepcopy(groups))
    with ours(room.configuration(folder, keys)) as engine:
        found = engine.compute_advantages(copy.deepcopy(groups))
        # Whatever arrives beside it, a group's advantages are its own.
        for place in (5, 0, 3):
            (lone,) = engine.compute_advantages([copy.deepcopy(groups[place])])
            torch.testing.assert_close(lone["advantages"], found[place]["advantages"], atol=1e-6, rtol=0)
    for group, ours_, theirs in zip(groups, found, wrong, strict=True):
        right = expected(group["rewards"])
        for row, reward in enumerate(right):
            mask = ours_["loss_mask"][row].bool()
            assert (ours_["advantages"][row][mask] - reward).abs().max() < 1e-5
        if group is groups[-1]:
            # Rows that fill no group of 8 get mean 0 and deviation 0, and are divided by eps.
            assert theirs["advantages"].abs().max() > 1e4
    assert max(one["advantages"].abs().max() for one in found) < 10


@pytest.mark.parametrize(
    "named",
    [
        {"mean_level": "group", "std_level": "group"},
        {"mean_level": "group", "std_level": None},
        {"mean_level": "group", "mean_leave1out": True, "std_level": None},
        {"mean_level": "group", "std_level": "batch"},
        {"mean_level": "batch", "std_level": "batch"},
        {"mean_level": None, "std_level": "group", "std_unbiased": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("tokens", [False, True], ids=["rewards", "tokens"])
def test_groups_of_one_size_get_what_areal_gives_them(named, tokens):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn((12, 7) if tokens else (12,), generator=draw)
    mask = (torch.rand(12, 7, generator=draw) > 0.4).float() if tokens else None
    config = NormConfig(group_size=4, **named)
    mine = TrueGroups(config)
    mine.sizes = [4, 4, 4]
    right = Normalization(config)(x, mask)
    torch.testing.assert_close(mine(x, mask), right, atol=1e-6, rtol=1e-6)
    mine.sizes = [4, 5, 3]
    assert torch.allclose(mine(x, mask), right, atol=1e-3) == (named["mean_level"] == "batch")
    mine.sizes = [4, 4]
    if named["mean_level"] != "batch":
        with pytest.raises(ValueError, match="12 rows"):
            mine(x, mask)


def test_leave_one_out_is_the_mean_of_the_others_and_a_member_left_alone_trains_nothing(folder):
    rloo = {"mean_level": "group", "mean_leave1out": True, "std_level": None, "group_size": 4}
    keys = {"actor.adv_norm": None, "actor.reward_norm": rloo}
    groups = room.random_groups([4, 1, 2])
    with ours(room.configuration(folder, keys)) as engine:
        found = engine.compute_advantages(copy.deepcopy(groups))
        for group, one in zip(groups, found, strict=True):
            rewards = group["rewards"]
            others = (rewards.sum() - rewards) / max(1, len(rewards) - 1)
            right = rewards - others if len(rewards) > 1 else torch.zeros(1)
            mask = one["loss_mask"].bool()
            assert ((one["advantages"] - right[:, None])[mask]).abs().max() < 1e-6
        assert in_parts(engine, [[copy.deepcopy(groups[1])]]).abs().max() == 0
    with stock(room.configuration(folder, keys), FSDPPPOActor) as engine:
        theirs = engine.compute_advantages(copy.deepcopy(groups))
    bare = groups[1]["rewards"]  # no baseline was taken off
    torch.testing.assert_close(theirs[1]["advantages"].max(), bare.max(), atol=1e-6, rtol=0)
    assert bare.max() > 0.01
