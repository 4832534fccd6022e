"""Odd batches: rows without trained tokens, groups all alike or all refused, agents, critics, evaluation, signals."""

import asyncio
import os
import signal
import threading
import time

import pytest

pytest.importorskip("areal", reason="the AReaL adapter's tests need AReaL (requirements/areal.txt)")

import areal_room as room
import torch
from areal.api import ModelRequest, RolloutWorkflow
from areal.experimental.openai.types import InteractionWithTokenLogpReward
from areal.utils import stats_tracker
from areal.utils.hf_utils import load_hf_tokenizer
from areal.workflow.multi_turn import MultiTurnWorkflow
from areal_engines import apart, fresh, in_parts, near, ours, split, stock, whole

from metronome_areal import flow as flow_module
from metronome_areal.levelling import micro_batches
from metronome_areal.members import Members

PERIODIC = {"metronome.rollout_source": "periodic"}
BOUNDED = {"metronome.rollout_source": "bounded", "metronome.bounded.max_staleness": 1}
MODES = {"periodic": PERIODIC, "bounded": BOUNDED, "synchronous": {"metronome.rollout_source": "synchronous"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("edges")


class Watched(room.PPOTrainer):
    """A trainer that keeps each step's metrics, and each part's or batch's groups."""

    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        self.stats, self.groups = [], []
        commit, part, update = self.stats_logger.commit, self.actor.metronome_part, self.actor.ppo_update

        def kept(*args):
            self.stats.append(args[-1])
            commit(*args)

        def noted(inner):
            def call(groups):
                self.groups += groups
                return inner(groups)

            return call

        self.stats_logger.commit = kept
        self.actor.metronome_part, self.actor.ppo_update = noted(part), noted(update)


def run(folder, keys, workflow=room.Direct, reward=room.reward, make=None, datasets=None, **named):
    """A run's metrics and groups."""
    stats_tracker.export_all()
    config = room.configuration(folder, {"rollout.request_timeout": 20} | keys)
    with room.trainer(config, Watched, **(datasets or {})) as one:
        one.train(workflow=make(config) if make else room.workflow(config, workflow, reward), **named)
        return one.stats, one.groups


# ---- keys of AReaL's that change the objective -----------------------------------------------------------------------

NARROW = {"actor.mb_spec.max_tokens_per_mb": 48}
SEQUENCE = {"level": "sequence", "action": "mask", "metric": "ratio", "upper": 1.01, "lower": 0.99}
RECOMPUTED = {"actor.prox_logp_method": "recompute"}
PLAIN = {"actor.use_decoupled_loss": False}

KEYS = {
    "sapo": PLAIN | {"actor.use_sapo_loss": True, "actor.recompute_logprob": False},
    "gspo": {"actor.importance_sampling_level": "sequence"},
    "rejection of rows": RECOMPUTED | {"actor.rejection_sampling": SEQUENCE},
    "recomputed, not decoupled": PLAIN | {"actor.recompute_logprob": True},
    "discount and lambda": {"actor.discount": 0.9, "actor.gae_lambda": 0.8},
    "temperature": {"actor.temperature": 0.7},
    "k3": {"actor.kl_ctl": 0.1, "actor.kl_estimator": "k3"},
    "bias, scaling, clip": {"actor.reward_bias": -0.5, "actor.reward_scaling": 3.0, "actor.reward_clip": 0.6},
    "a deviation without a mean": {"actor.adv_norm": {"mean_level": None, "std_level": "group", "group_size": 4}},
}


@pytest.fixture(scope="module")
def plain(folder):
    """Groups, and GRPO's gradient of them."""
    with ours(room.configuration(folder, NARROW)) as engine:
        groups = near(engine, fresh([4, 4, 4, 4], references=True))
        return groups, whole(engine, groups)


@pytest.mark.parametrize("name", KEYS)
def test_a_key_of_areals_moves_the_gradient_of_parts_as_it_moves_areals(folder, plain, name):
    groups, of_grpo = plain
    with ours(room.configuration(folder, NARROW | KEYS[name])) as engine:
        parts = in_parts(engine, split(groups, (2,), (0,), (3,), (1,)))
    with stock(room.configuration(folder, NARROW | KEYS[name])) as engine:
        right = whole(engine, groups)
    assert apart(parts, right) < 5e-6
    assert apart(right, of_grpo) > 1e-3


def test_what_periodic_mode_refuses_of_them_does_depend_on_the_parts(folder, plain):
    groups, _ = plain
    keys = NARROW | RECOMPUTED | {"actor.m2_threshold": 1e-3}
    with ours(room.configuration(folder, keys)) as engine:
        assert apart(in_parts(engine, split(groups, (2,), (0,), (3,), (1,))), whole(engine, groups)) > 0.1


# ---- how many passes -------------------------------------------------------------------------------------------------


def test_a_reference_model_may_ask_for_more_micro_batches_than_a_part_has_rows(folder):
    section = room.settings(folder)["actor"]
    names = ("experiment_name", "trial_name", "backend", "path")
    reference = {name: section[name] for name in names} | {"optimizer": None, "mb_spec": {"n_mbs": 6}}
    keys = {"gconfig.n_samples": 2, "actor.kl_ctl": 0.1, "ref": reference}
    keys |= {"actor.adv_norm": None, "total_train_steps": 1}
    (found,), groups = run(folder, PERIODIC | keys)
    assert [len(group["rewards"]) for group in groups] == [2] * 4
    (right,), _ = run(folder, MODES["synchronous"] | keys)
    assert found["ppo_actor/update/grad_norm"] == pytest.approx(right["ppo_actor/update/grad_norm"], rel=1e-3)
    (without,), _ = run(folder, PERIODIC | keys | {"ref": None})
    assert without["ppo_actor/update/grad_norm"] != pytest.approx(right["ppo_actor/update/grad_norm"], rel=1e-3)


@pytest.mark.parametrize(
    ("rows", "least", "divisor", "wanted"), [(4, 1, 3, 6), (2, 1, 3, 3), (1, 4, 3, 6), (3, 1, 1, 3)]
)
def test_as_many_passes_as_areal_makes_are_a_multiple_of_the_divisor(folder, rows, least, divisor, wanted):
    keys = {"actor.mb_spec": {"max_tokens_per_mb": 21, "n_mbs": least, "n_mbs_divisor": divisor}}
    with ours(room.configuration(folder, keys)) as engine:
        assert micro_batches([15] * rows, engine.config.mb_spec) == wanted
        groups = room.random_groups([rows], prompt=10, response=5)
        engine.compute_logp(groups)  # AReaL's own would raise: fewer rows than micro-batches
        if wanted > rows:
            with pytest.raises(RuntimeError, match=r"min_groups|Cannot allocate"):
                engine.actor.compute_logp(groups)


# ---- rows and rewards ------------------------------------------------------------------------------------------------


class Untrained(room.Direct):
    """Every other prompt's rows train nothing, and weren't sampled from this model."""

    async def arun_episode(self, engine, data):
        found = await super().arun_episode(engine, data)
        if int(data["answer"]) % 2 == 0:
            found |= {"loss_mask": found["loss_mask"] * 0, "versions": found["versions"] * 0 - 1}
        return found


@pytest.mark.parametrize("mode", MODES)
def test_a_group_without_a_trained_token_is_trained_as_areal_does(folder, mode):
    stats, groups = run(folder, MODES[mode], Untrained)
    assert [bool(group["loss_mask"].any()) for group in groups].count(False) > 0
    assert min(step["ppo_actor/update/grad_norm"] for step in stats) > 0
    assert max(step["ppo_actor/advantages/max"] for step in stats) < 10


@pytest.mark.parametrize("mode", MODES)
def test_rewards_that_are_all_alike_train_nothing_and_the_run_goes_on(folder, mode):
    stats, _ = run(folder, MODES[mode] | {"metronome.loss": "a3po"}, reward=lambda *args, **named: 1.0)
    assert [step["metronome/weights/changed"] for step in stats] == [0, 0]
    assert [step["ppo_actor/update/grad_norm"] for step in stats] == [0, 0]


class Twice(room.Direct):
    """An episode gives two rows."""

    async def arun_episode(self, engine, data):
        found = await super().arun_episode(engine, data)
        return {name: torch.cat([value, value]) for name, value in found.items()}


@pytest.mark.parametrize("mode", ["periodic", "bounded"])
def test_several_rows_an_episode_are_one_group_under_every_hook(folder, mode):
    keys = {
        "metronome.loss": "a3po",
        "metronome.attention": "shared_prompt",
        "metronome.group_controller": "sagc",
        "metronome.sagc.sizes": [2, 4],
    }
    stats, groups = run(folder, MODES[mode] | keys, Twice)
    assert all(len(group["rewards"]) == 2 * stats[0]["metronome/group_controller/size"] for group in groups[:4])
    assert stats[0]["metronome/attention/tokens_fed"] < stats[0]["metronome/attention/tokens_separate"]


# ---- agents ----------------------------------------------------------------------------------------------------------


def attempts(config, turns=3):
    """AReaL's MultiTurnWorkflow, without a process pool for its reward."""

    def right(prompt, completions, prompt_ids, completion_ids, **others):
        return float(sum(completion_ids) % 3 == 0)

    async def asked(*args, **named):
        return right(*args, **named)

    made = MultiTurnWorkflow(right, config.gconfig, load_hf_tokenizer(config.tokenizer_path), turns, 0.9)
    made.async_reward_fn = asked
    return made


SEVERAL = {"actor.mb_spec.max_tokens_per_mb": 2048, "gconfig.max_new_tokens": 6, "total_train_steps": 3}


@pytest.mark.parametrize("attention", ["host", "shared_prompt"])
@pytest.mark.parametrize("mode", ["periodic", "bounded"])
def test_areals_own_workflow_of_several_turns_keeps_tool_tokens_out_of_the_loss(folder, mode, attention):
    keys = {"metronome.loss": "a3po", "metronome.attention": attention}
    stats, groups = run(folder, MODES[mode] | SEVERAL | keys, make=attempts)
    before = [group for group in groups if "advantages" not in group] or groups
    tools = 0
    for group in before:
        for mask, versions in zip(group["loss_mask"].bool(), group["versions"], strict=True):
            first, last = mask.nonzero()[0], mask.nonzero()[-1]
            between = ~mask[first:last]
            tools += int(between.sum())
            assert (versions[first:last][between] == -1).all()
            assert (versions[mask] >= 0).all()
    assert tools > 50
    assert all(step["metronome/loss/version_unknown"] == 0 for step in stats)
    trained = sum(step["ppo_actor/n_valid_tokens"] for step in stats)
    assert trained == sum(int(group["loss_mask"].sum()) for group in before)


class Agent(RolloutWorkflow):
    """An agent's episode: two interactions under names that every episode uses."""

    def __init__(self, config):
        tokenizer = load_hf_tokenizer(config.tokenizer_path)
        self.gconfig = config.gconfig.new_with_stop_and_pad_token_ids(tokenizer).new(n_samples=1)

    async def arun_episode(self, engine, data):
        found = {}
        for name in ("first", "second"):
            request = ModelRequest(rid=name, input_ids=[5, 6, 7, int(data["answer"]) + 8], gconfig=self.gconfig)
            response = await engine.agenerate(request)
            found[name] = InteractionWithTokenLogpReward(
                model_response=response, reward=float(response.output_tokens[0])
            )
        return found


@pytest.mark.parametrize("mode", ["periodic", "bounded"])
def test_an_agents_interactions_are_rows_of_its_group_and_none_is_lost(folder, mode):
    stats, groups = run(folder, MODES[mode] | {"metronome.attention": "shared_prompt"}, make=Agent)
    assert {len(group["rewards"]) for group in groups} == {8}  # four episodes of two
    assert min(step["ppo_actor/update/grad_norm"] for step in stats) > 0


def test_interactions_under_one_name_stay_apart():
    class Named(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            return {"a": object(), "b": object()}

    found = asyncio.run(Members(Named(), 3).arun_episode(None, {}))
    assert len(set(found.values())) == 6


# ---- other models ----------------------------------------------------------------------------------------------------


def section(folder, **others):
    """A model's section of AReaL's configuration."""
    found = room.settings(folder)["actor"]
    names = ("experiment_name", "trial_name", "backend", "path", "mb_spec", "optimizer")
    return {name: found[name] for name in names} | others


@pytest.mark.parametrize("keys", [{}, {"metronome.loss": "a3po", "metronome.attention": "shared_prompt"}], ids=str)
@pytest.mark.parametrize("mode", ["bounded", "synchronous"])
def test_a_critic_learns_from_batches_of_our_groups(folder, mode, keys):
    critic = {"critic": section(folder, is_critic=True, ppo_n_minibatches=1)}
    stats, _ = run(folder, MODES[mode] | keys | critic)
    assert min(step["ppo_critic/grad_norm"] for step in stats) > 0
    (first, *_), _ = run(folder, MODES[mode] | keys)  # its values are in the advantages
    assert stats[0]["ppo_actor/update/grad_norm"] != pytest.approx(first["ppo_actor/update/grad_norm"], rel=1e-3)


@pytest.mark.parametrize("mode", ["bounded", "synchronous"])
def test_a_teacher_is_areals_where_its_loss_is(folder, mode):
    train = section(folder, optimizer=None)
    keys = {"engine_type": "train", "path": str(folder / "model"), "train": train, "distill_loss_weight": 0.5}
    keys = {f"teacher.{name}": value for name, value in keys.items()}
    stats, _ = run(folder, MODES[mode] | keys)
    assert all("ppo_actor/update/rkl_loss/avg" in step for step in stats)


# ---- the loop --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_two_epochs_of_data_that_no_batch_divides_train_each_prompt_at_least_twice(folder, mode):
    room.configuration(folder)  # makes the prompts
    rows, seen = room.dataset(folder)[:6], []

    class Noting(room.Direct):
        async def arun_episode(self, engine, data):
            seen.append(data["answer"])
            return await super().arun_episode(engine, data)

    keys = MODES[mode] | {"total_train_epochs": 2, "total_train_steps": None, "train_dataset.drop_last": False}
    config = room.configuration(folder, keys)
    room._another_port()
    one = Watched(config, train_dataset=rows)
    try:
        one.train(workflow=room.workflow(config, Noting))
        assert len(one.stats) == 4  # two steps an epoch
    finally:
        one.close()
    count = {answer: seen.count(answer) // 4 for answer in {row["answer"] for row in rows}}
    assert min(count.values()) >= 2


@pytest.mark.parametrize("mode", MODES)
def test_an_evaluation_runs_under_what_was_published_with_its_own_number_of_samples(folder, mode):
    seen = []

    class Evaluating(room.Direct):
        async def arun_episode(self, engine, data):
            seen.append(engine.get_version())
            return await super().arun_episode(engine, data)

    keys = {"evaluator.freq_steps": 1, "eval_gconfig.n_samples": 2, "gconfig.max_new_tokens": 12}
    keys["valid_dataset"] = {"batch_size": 2, "path": "none", "type": "rl", "num_workers": 0}
    config = room.configuration(folder, MODES[mode] | keys)
    with room.trainer(config, Watched, valid_dataset=room.dataset(folder)[:4]) as one:
        one.train(workflow=room.workflow(config), eval_workflow=room.workflow(config, Evaluating))
        assert sorted(seen) == [1] * 8 + [2] * 8
        assert all(step["eval-rollout/reward__count"] == 8 for step in one.stats)
        assert [len(group["rewards"]) for group in one.groups] == [4] * 8  # training's have their own


def test_a_filter_that_refuses_everything_says_so(folder, monkeypatch):
    said = []

    class Enough(Exception):
        pass

    def warning(text, *args):
        said.append(text % args)
        if len(said) == 2:
            raise Enough

    monkeypatch.setattr(flow_module._log, "warning", warning)
    with pytest.raises(Enough):
        run(folder, PERIODIC, dynamic_filter_fn=lambda group: False)
    assert said == [f"metronome: dynamic_filter_fn refused the last {number} groups" for number in (16, 32)]


@pytest.mark.parametrize("keys", [PERIODIC, BOUNDED, BOUNDED | {"metronome.in_flight": "finish"}], ids=str)
def test_an_interrupt_ends_the_run_and_the_trainer_closes(folder, keys):
    class Long(room.Direct):
        async def arun_episode(self, engine, data):
            started.set()
            await asyncio.sleep(60)
            return await super().arun_episode(engine, data)

    started = threading.Event()

    def interrupt():
        started.wait(60)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run(folder, keys | {"rollout.request_timeout": 120}, Long)
    assert time.monotonic() - begun < 30
