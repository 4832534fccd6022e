"""Shared prompts in AReaL's real FSDP2 engine: its own separate rows, kept apart, give the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("areal", reason="the AReaL adapter's tests need AReaL (requirements/areal.txt)")

import areal_room as room
import areal_shared_ranks as ranks
import torch
from areal.utils import stats_tracker

from metronome.errors import ConfigurationError, EqualityViolated
from metronome.shared_prompt.plan import SharedPromptPlan
from metronome.shared_prompt.select import SharedPromptAttention
from metronome_areal.actor import MetronomeActor
from metronome_areal.config import read
from metronome_areal.cpu import assets
from metronome_areal.rows import read_groups
from metronome_areal.sharing import of_whole_groups, share_prompts

SHARED = {"metronome.attention": "shared_prompt"}
UNEQUAL = (4, 1, 3, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("shared")
    assets.make(found)
    return found


class Steady(MetronomeActor):
    """Doesn't step, so that gradients stay and every test has the same weights."""

    def optimizer_step(self):
        return {"update_successful": 1.0, "grad_norm": 0.0, "lr": 0.0}


class Half(Steady):
    """In AReaL's own dtype, which the CPU room replaces."""

    def __init__(self, config):
        config.dtype = "bfloat16"
        super().__init__(config)


@pytest.fixture(scope="module")
def pair(folder):
    """AReaL's engine with rows kept apart and ours, with the same weights."""
    with two(folder) as found:
        yield found


@pytest.fixture(autouse=True)
def forgotten():
    """AReaL collects statistics in the process."""
    stats_tracker.export_all()
    yield
    stats_tracker.export_all()


class two:
    """Both engines, or one of them twice, initialised; ``keys`` are of both."""

    def __init__(self, folder, keys=None, kind=Steady):
        keys = {"actor.temperature": 0.7, **(keys or {})}
        self.stock = room.actor(room.configuration(folder, keys), kind)
        self.shared = room.actor(room.configuration(folder, {**keys, **SHARED}), kind)

    def __enter__(self):
        return self.stock.__enter__(), self.shared.__enter__()

    def __exit__(self, *error):
        self.shared.__exit__(*error)
        self.stock.__exit__(*error)


def batch(sizes=UNEQUAL, seed=0):
    """Groups as a workflow returns them: one with two turns and a tool between, one row that failed."""
    found = room.random_groups(sizes, prompt=7, response=14, seed=seed)
    for one in found:
        one["loss_mask"][:, 9:11] = 0  # a tool's tokens, and of a short row its end
    found[-1]["loss_mask"][-1] = 0
    return found


def gradient(engine):
    return torch.cat([one.grad.full_tensor().flatten() for one in engine.model.parameters() if one.requires_grad])


def passed(engine, groups):
    """Log-probs of a forward pass, where trained."""
    groups = [dict(one) for one in groups]
    found = engine.compute_logp(groups)
    return torch.cat([one[:, :-1][group["loss_mask"][:, 1:].bool()] for one, group in zip(found, groups, strict=True)])


def update(engine, groups):
    """The gradient of AReaL's whole update, and its statistics."""
    engine.set_version(1)
    ready = engine.compute_advantages([{name: value.clone() for name, value in one.items()} for one in groups])
    stats_tracker.export_all()
    engine.actor.ppo_update(ready)
    return gradient(engine), stats_tracker.export_all()


def difference(one, other):
    return float((one - other).norm() / other.norm())


# --- equal to separate rows -------------------------------------------------------------------------


def test_log_probs_are_those_of_separate_rows(pair):
    stock, shared = pair
    shared.attention_found(None)
    groups = batch()
    wanted, found = passed(stock, groups), passed(shared, groups)
    assert len(wanted) > 40
    assert float((found - wanted).abs().max()) < 1e-5
    counts = shared.attention_found(None)
    assert counts["metronome/attention/calls"] == 2  # layers
    separate = sum(int(one["attention_mask"].sum()) for one in groups)
    assert counts["metronome/attention/tokens_separate"] == separate
    assert counts["metronome/attention/tokens_fed"] < 0.8 * separate
    assert set(shared.attention_found(None).values()) == {0.0}
    assert stock.attention_found(None) == {}


def test_an_updates_gradient_and_statistics_are_those_of_separate_rows(pair):
    stock, shared = pair
    (wanted, told), (found, ours) = update(stock, batch()), update(shared, batch())
    assert difference(found, wanted) < 5e-6
    assert set(told) == set(ours)
    approximate = ("vocab_min_logits", "vocab_max_logits")  # over response tokens, see below
    for name, value in told.items():
        if not any(one in name for one in approximate) and "timeperf" not in name:
            assert ours[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    for name in approximate:
        key = f"ppo_actor/update/{name}/avg"
        assert ours[key] == pytest.approx(told[key], abs=0.3)


def test_statistics_of_logits_are_those_of_the_response_tokens(pair, monkeypatch):
    """Their mean over all tokens, which AReaL takes, is the mean over response tokens."""
    stock, shared = pair
    seen = {}
    for engine in pair:
        compute = engine._get_vocab_min_max_logits

        def noted(logits, pad=0, compute=compute, engine=engine):
            seen[engine] = compute(logits, pad)
            return seen[engine]

        monkeypatch.setattr(engine, "_get_vocab_min_max_logits", noted)
        update(engine, batch())
    row = shared._sharing.call.row
    assert len(row.places) == row.plan.response_tokens > 40
    lengths = _together(batch())["attention_mask"].sum(1).tolist()
    starts = [sum(lengths[:place]) for place in range(len(lengths))]  # AReaL's single pack has the batch's order
    order = shared._prepare_mb_list(_together(batch())).forward_indices
    there = torch.cat([torch.arange(lengths[place]) + starts[place] for place in order])
    for ours, theirs in zip(seen[shared], seen[stock], strict=True):
        assert len(ours) == row.size
        assert float((ours - theirs[there])[row.places].abs().max()) < 1e-4
        assert float(ours.mean()) == pytest.approx(float(theirs[there][row.places].mean()), abs=1e-4)


@pytest.mark.parametrize("wrong", ["positions that run on", "no mask between siblings", "no temperature", "stock pack"])
def test_a_layout_that_is_wrong_gives_others(pair, monkeypatch, wrong):
    """And so does AReaL's pack without the mend, which is why it is the other side of no comparison."""
    stock, shared = pair
    passed(shared, batch())  # the first use is behind it
    wanted, expected = passed(stock, batch()), update(stock, batch())[0]
    if wrong == "positions that run on":
        monkeypatch.setattr(SharedPromptPlan, "build", _running(SharedPromptPlan.build))
    elif wrong == "no temperature":
        monkeypatch.setattr(shared.config, "temperature", 1.0)
    elif wrong == "stock pack":
        monkeypatch.setattr(stock.config, "attn_impl", "flash_attention_2")  # what the mend takes for row lengths
        shared = stock
    else:
        monkeypatch.setattr(shared._sharing, "attention", Causal())
    assert float((passed(shared, batch()) - wanted).abs().max()) > 1e-2
    assert difference(update(shared, batch())[0], expected) > 1e-2


def _running(build):
    def plan(*arguments, **named):
        made = build(*arguments, **named)
        made.position_ids.copy_(torch.arange(made.tokens))
        return made

    return plan


class Causal(SharedPromptAttention):
    """Sees the whole row before a token, its siblings included."""

    def attend(self, q, k, v, plan, scale, *, window=None, sinks=None):
        return super().attend(q, k, v, SharedPromptPlan.build([(plan.tokens, [0])]), scale)


def test_equal_prompts_of_two_groups_are_one(pair):
    stock, shared = pair
    groups = room.random_groups((3, 2), prompt=7, response=14)
    groups[1]["input_ids"][:, :7] = groups[0]["input_ids"][:1, :7]
    shared.attention_found(None)
    assert float((passed(shared, groups) - passed(stock, groups)).abs().max()) < 1e-5
    prompts = sum(int(one["loss_mask"].sum()) for one in groups) + 7
    assert shared.attention_found(None)["metronome/attention/tokens_fed"] == prompts
    assert difference(update(shared, groups)[0], update(stock, groups)[0]) < 5e-6


def test_an_answer_of_several_turns_keeps_its_tools_tokens(pair):
    """They stand in the context and have no part in the loss; an answer that ends in them is cut there."""
    _, shared = pair
    groups = room.random_groups((2,), prompt=7, response=14)
    whole = passed(shared, groups)
    groups[0]["loss_mask"][:, 9:11] = 0
    turns = groups[0]["loss_mask"].bool()
    assert read_groups(groups[0])[0][0][0].prompt == 7
    found = passed(shared, groups)
    kept = turns[room.random_groups((2,), prompt=7, response=14)[0]["loss_mask"].bool()]
    assert float((found - whole[kept]).abs().max()) < 1e-5


@pytest.mark.parametrize("budget", [30, 24])
def test_a_group_above_the_token_budget_is_cut_and_adds_up(pair, monkeypatch, budget):
    stock, shared = pair
    groups = batch()
    wanted, before = update(stock, groups)[0], passed(stock, groups)
    monkeypatch.setattr(shared.config.mb_spec, "max_tokens_per_mb", budget)
    shared._sharing._said.clear()
    shared.attention_found(None)
    said = []
    monkeypatch.setattr(shared.logger, "warning", said.append)
    found = update(shared, groups)[0]
    assert float((passed(shared, groups) - before).abs().max()) < 1e-5
    assert difference(found, wanted) < 5e-6
    assert sum("is cut into parts" in line for line in said) == 1
    mb_list = shared._prepare_mb_list({**_together(groups)})
    assert len(mb_list) > 2
    assert max(mb_list.group_lens) <= budget
    assert sorted(mb_list.forward_indices) == list(range(10))
    with monkeypatch.context() as patched:
        patched.setattr(shared.config.mb_spec, "max_tokens_per_mb", 8)
        with pytest.raises(ConfigurationError, match="longer than a micro-batch"):
            passed(shared, groups)


def _together(groups):
    from areal.utils.data import concat_batch

    return concat_batch(groups)[0]


def test_a_budget_counts_tokens_that_are_fed(pair):
    """Separate rows need more micro-batches."""
    stock, shared = pair
    groups = room.random_groups((8,), prompt=40, response=4)
    lists = [len(one._prepare_mb_list(_together(groups))) for one in pair]
    assert lists[0] > lists[1] == 1
    assert float((passed(shared, groups) - passed(stock, groups)).abs().max()) < 1e-5


def test_a_masked_group_is_left_out_and_gives_no_gradient(pair):
    stock, shared = pair
    groups = batch()
    masked = room.random_groups((2,), seed=5)[0]
    masked["loss_mask"] = torch.zeros_like(masked["loss_mask"])
    shared.attention_found(None)
    assert difference(update(shared, [*groups, masked])[0], update(stock, groups)[0]) < 5e-6
    alone = {name: value.clone() for name, value in masked.items()}
    assert float(shared.compute_logp([alone])[0].abs().max()) == 0.0


def test_more_micro_batches_than_rows_leave_one_empty(pair, monkeypatch):
    """Another rank may need them."""
    stock, shared = pair
    groups = room.random_groups((2,), prompt=7, response=14)
    wanted = update(stock, groups)[0]
    monkeypatch.setattr(shared.config.mb_spec, "n_mbs", 4)
    assert len(shared._prepare_mb_list(_together(groups))) == 4
    assert difference(update(shared, groups)[0], wanted) < 5e-6
    assert len(passed(shared, groups)) == int(groups[0]["loss_mask"].sum())


def test_our_loss_sees_the_same(folder):
    keys = {"metronome.loss": "a3po"}
    groups = batch()
    with two(folder, keys) as (stock, shared):
        found = [update(engine, groups)[0] for engine in (stock, shared)]
        assert shared.loss.gathered(None)["metronome/loss/calls"] >= 1
    assert difference(found[1], found[0]) < 5e-6


# --- FSDP2's and AReaL's options --------------------------------------------------------------------


def test_gradient_checkpointing_changes_nothing(folder):
    with two(folder, {"actor.gradient_checkpointing": True}) as (stock, shared):
        assert shared.model.is_gradient_checkpointing
        assert difference(update(shared, batch())[0], update(stock, batch())[0]) < 5e-6


def test_lora_trains_the_same_adapters(folder):
    keys = {"actor.use_lora": True, "actor.lora_rank": 4, "actor.target_modules": ["all-linear"]}
    with two(folder, keys) as engines:
        for engine in engines:
            draw = torch.Generator().manual_seed(2)
            for name, one in engine.model.named_parameters():
                if "lora_" in name:
                    one.data.to_local().copy_(0.1 * torch.randn(one.shape, generator=draw))
        stock, shared = engines
        trained = [name for name, one in shared.model.named_parameters() if one.requires_grad]
        assert trained
        assert all("lora_" in name for name in trained)
        assert float((passed(shared, batch()) - passed(stock, batch())).abs().max()) < 1e-5
        assert difference(update(shared, batch())[0], update(stock, batch())[0]) < 5e-6


def test_bfloat16_differs_no_more_than_its_rounding_does(folder, pair):
    """Within what separate rows in bfloat16 are off from fp32, times two."""
    exact, truth = passed(pair[0], batch()), update(pair[0], batch())[0]
    with two(folder, kind=Half) as (stock, shared):
        wanted, found = passed(stock, batch()), passed(shared, batch())
        off = float((wanted - exact).abs().max())
        assert 1e-4 < off < 0.2
        assert float((found - exact).abs().max()) < 2 * off
        rounding = difference(update(stock, batch())[0], truth)
        assert difference(update(shared, batch())[0], truth) < 2 * rounding
        assert 1e-4 < rounding < 0.05


def test_a_saved_model_has_nothing_of_ours(pair, tmp_path):
    pair[1]._save_model_to_hf(str(tmp_path), None, None)
    assert "metronome" not in (tmp_path / "config.json").read_text()
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen2"


# --- the first-use check ----------------------------------------------------------------------------


def unchecked(shared, monkeypatch):
    monkeypatch.setattr(shared._sharing, "checked", False)
    return shared._sharing


def test_the_first_use_stops_a_wrong_layout(pair, monkeypatch):
    _, shared = pair
    sharing = unchecked(shared, monkeypatch)
    with monkeypatch.context() as patched:
        patched.setattr(sharing, "attention", Causal())
        with pytest.raises(EqualityViolated, match="isn't shared-prompt attention"):
            passed(shared, batch())
    assert not sharing.checked
    with monkeypatch.context() as patched:
        patched.setattr(SharedPromptPlan, "build", _running(SharedPromptPlan.build))
        with pytest.raises(EqualityViolated, match="separate rows"):
            passed(shared, batch())
    assert not sharing.apart


def test_the_first_use_waits_for_a_group_and_happens_once(pair, monkeypatch):
    _, shared = pair
    sharing, seen = unchecked(shared, monkeypatch), []
    compare = sharing._compare
    monkeypatch.setattr(sharing, "_compare", lambda data: (seen.append(1), compare(data)))
    shared.attention_found(None)
    for groups, checks in ((room.random_groups((1, 1)), 0), (batch(), 1), (batch(seed=1), 1)):
        passed(shared, groups)
        assert len(seen) == checks
    assert shared.attention_found(None)["metronome/attention/calls"] == 6  # the comparison isn't counted
    sharing.checked = False
    shared.train()
    update(shared, batch())
    assert shared.model.training
    assert len(seen) == 2


# --- what can't be shared ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("actor.enable_tree_training", True, "a layout of its own"),
        ("actor.use_kernels", True, "kernels from the hub"),
        ("actor.backend", "fsdp:d1t2", "isn't cut over ranks"),
        ("actor.backend", "fsdp:d1c2", "isn't cut over ranks"),
    ],
)
def test_what_cant_share_is_refused_by_its_key(folder, key, value, why):
    config = room.configuration(folder, {**SHARED, key: value})
    with pytest.raises(ConfigurationError, match=why) as error:
        share_prompts(config, read(config), [])
    assert key in str(error.value)
    other = room.configuration(folder, {key: value})
    notes = []
    share_prompts(other, read(other), notes)
    assert notes == []


def test_what_is_set_is_said(folder):
    changes = {
        "actor.attn_impl": "flash_attention_2",
        "actor.pad_to_maximum": True,
        "actor.ppo_n_minibatches": 2,
        "actor.mb_spec.granularity": 4,
        "actor.mb_spec.packing_algorithm": "kk",
    }
    config, notes = room.configuration(folder, {**SHARED, **changes}), []
    share_prompts(config, read(config), notes)
    assert config.actor.attn_impl == "sdpa"
    assert not config.actor.pad_to_maximum
    assert [line.partition("=")[0] for line in notes] == [
        "actor.attn_impl",
        "actor.pad_to_maximum",
        "actor.mb_spec.granularity",
        "actor.mb_spec.packing_algorithm",
    ]
    assert [line.partition("=")[0] for line in of_whole_groups(config, read(config))] == ["actor.ppo_n_minibatches"]


def test_a_model_that_cant_share_is_refused_by_name(folder, tmp_path, monkeypatch):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config.from_pretrained(folder / "model", attention_dropout=0.1)
    made = assets.make(tmp_path)
    Qwen2ForCausalLM(config).save_pretrained(made.model)
    with (
        pytest.raises(ConfigurationError, match="Qwen2ForCausalLM can't read shared prompts: dropout"),
        room.actor(room.configuration(tmp_path, SHARED)),
    ):
        pass
    monkeypatch.setattr("areal.engine.fsdp_engine.is_valid_vision_model", lambda _: True)
    with (
        pytest.raises(ConfigurationError, match="several dimensions"),
        room.actor(room.configuration(folder, SHARED)),
    ):
        pass


def test_rows_that_cant_be_read_are_an_error(pair):
    _, shared = pair
    for change, match in (
        (lambda one: one.pop("loss_mask"), "off its loss mask"),
        (lambda one: one["loss_mask"][:, 0].fill_(1), "which nothing predicts"),
        (lambda one: one["attention_mask"][:, :2].fill_(False), "side by side"),
    ):
        group = room.random_groups((2,))[0]
        change(group)
        with pytest.raises(ConfigurationError, match=match):
            read_groups(group)
    group = room.random_groups((2,))[0]
    group["loss_mask"][:, 0] = 1
    with pytest.raises(ConfigurationError, match="which nothing predicts"):
        shared.actor.ppo_update(shared.compute_advantages([group]))


# --- two ranks --------------------------------------------------------------------------------------


def test_two_ranks_with_unequal_groups_give_one_ranks_gradient(folder, pair, tmp_path):
    """Of FSDP2's shards; the second rank has no group to compare at first, and needs other micro-batches."""
    wanted, _ = update(pair[0], ranks.batch())
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", ranks.__file__, str(folder), str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    told = [json.loads(Path(tmp_path, f"{rank}.json").read_text()) for rank in (0, 1)]
    assert told[0] == told[1]
    assert told[0]["checked"] == [False, True]
    assert told[0]["micro_batches"] > 1
    found = torch.load(tmp_path / "gradient.pt")
    assert difference(found, wanted) < 5e-6
