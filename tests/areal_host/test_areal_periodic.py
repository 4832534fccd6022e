"""Periodic mode through AReaL's own training loop, beside AReaL's own synchronous trainer on the same prompts."""

import asyncio
import contextlib
import re

import pytest

pytest.importorskip("areal", reason="the AReaL adapter's tests need AReaL (requirements/areal.txt)")

import areal_room as room
from areal.trainer.rl_trainer import PPOTrainer as HostTrainer
from areal.utils import stats_tracker
from areal_engines import StockApart, apart, gradients

from metronome.errors import ConfigurationError
from metronome_areal.config import read
from metronome_areal.cpu import engine as room_engine
from metronome_areal.cpu.arguments import enter

PERIODIC = {"metronome.rollout_source": "periodic"}


class Watching:
    """A trainer that keeps each step's gradient, batch and metrics."""

    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        self.gradients, self.stats = [], []
        step, commit = self.actor.optimizer_step, self.stats_logger.commit

        def noting():
            self.gradients.append(gradients(self.actor))
            return step()

        def keeping(*args):
            self.stats.append(args[-1])
            commit(*args)

        self.actor.optimizer_step, self.stats_logger.commit = noting, keeping


class Stock(Watching, HostTrainer):
    """AReaL's own trainer in the room: its loop, actor, advantages and loss; packs mended."""

    def __init__(self, config, *args, **named):
        self.part = read(config)
        enter(config)
        super().__init__(config, *args, **named)

    def _create_train_engine(self, actor_config, alloc):
        made = StockApart(actor_config)
        made.create_process_group(parallel_strategy=alloc.parallel)
        made._update_weights_from_disk = lambda meta: made.rollout_engine.take_weights(made, meta.version)
        return made

    def _init_rollout(self, rollout_config, is_eval=False, lora_path=None):
        return room_engine.make(self, rollout_config, is_eval)


class Ours(Watching, room.PPOTrainer):
    """Our trainer."""


def trained(folder, kind, keys, workflow=None, **named):
    """A run's gradients and metrics."""
    config = room.configuration(folder, {"total_train_steps": 1} | keys)
    stats_tracker.export_all()
    with room.trainer(config, kind) as one:
        one.train(workflow=workflow or room.workflow(config), **named)
        return one.gradients, one.stats


def reference(folder):
    """AReaL's section of a reference model, which learns nothing."""
    found = room.settings(folder)["actor"]
    return {key: found[key] for key in ("experiment_name", "trial_name", "backend", "path", "mb_spec")} | {
        "optimizer": None
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("periodic")


def more_than_two_tokens(group):
    """A filter by content; imported by its path, too."""
    return bool((group["loss_mask"].sum(1) > 3).all())


OTHERWISE = re.compile("count|num_micro_batches|no_eos_ratios|version_stats|compute_logp")
"""Metrics of AReaL's that say how a batch is cut, or that its unshifted versions go into."""

CASES = {
    "grpo": ({}, {}),
    "a reference's kl in the reward": ({"actor.kl_ctl": 0.1, "ref": reference}, {}),
    "dapo": (
        {
            "actor.eps_clip_higher": 0.28,
            "actor.overlong_reward_penalty": True,
            "actor.overlong_tokens": 4,
            "actor.overlong_penalty_factor": 0.5,
        },
        {"dynamic_filter_fn": more_than_two_tokens},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_period_has_the_gradient_of_areals_own_synchronous_batch(folder, name):
    keys, named = CASES[name]
    keys = {key: value(folder) if callable(value) else value for key, value in keys.items()}
    (right,), (theirs,) = trained(folder, Stock, keys, **named)
    (found,), (stats,) = trained(folder, Ours, keys | PERIODIC, **named)
    # Log-probs are the engine's, which batches the prompts of a period as they come: 1e-6 each.
    assert apart(found, right) < 1e-4
    assert stats["metronome/periodic/parts"] >= 1
    shared = {key for key in set(theirs) & set(stats) if key.startswith("ppo_actor/") and not OTHERWISE.search(key)}
    assert {"ppo_actor/update/grad_norm", "ppo_actor/task_reward/avg", "ppo_actor/update/actor_loss/avg"} <= shared
    for key in shared:
        assert stats[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-5), key
    if named:
        assert stats["metronome/rollout_source/refused"] > 0
        assert stats["metronome/rollout_source/prompts"] == 4 + stats["metronome/rollout_source/refused"]


def test_the_filter_may_be_a_path(folder):
    path = f"{__name__}.more_than_two_tokens"
    (found,), _ = trained(folder, Ours, PERIODIC, dynamic_filter_fn=path)
    (right,), _ = trained(folder, Ours, PERIODIC, dynamic_filter_fn=more_than_two_tokens)
    assert apart(found, right) < 1e-4
    (other,), _ = trained(folder, Ours, PERIODIC)
    assert apart(other, right) > 1e-2


class Slow(room.Direct):
    """The prompts of a period finish one after another."""

    async def arun_episode(self, engine, data):
        found = await super().arun_episode(engine, data)
        await asyncio.sleep(0.15 * (int(data["answer"]) % 4))
        return found


def test_groups_are_trained_while_others_are_generated_and_each_period_has_one_step(folder):
    config = room.configuration(folder, PERIODIC | {"total_train_steps": 3})
    with room.trainer(config, Ours) as one:
        versions, parts, part = [], [], one.actor.metronome_part

        def noting(groups):
            flow = one.train_dataloader.out.__self__
            parts.append((one.actor.get_version(), len(groups), len(flow._running)))
            versions.append({int(v) for group in groups for v in group["versions"][group["loss_mask"].bool()]})
            return part(groups)

        one.actor.metronome_part = noting
        one.train(workflow=room.workflow(config, Slow))
        assert len(one.gradients) == 3
        assert any(running for *_, running in parts)  # trained while others are out
        assert [sum(count for version, count, _ in parts if version == step) for step in range(3)] == [4, 4, 4]
        assert versions == [{version} for version, *_ in parts]
        for stats in one.stats:
            assert stats["metronome/weights/changed"] == 1
            assert 0 < stats["metronome/periodic/idle"] <= 1
            assert stats["metronome/periodic/tokens"] == stats["ppo_actor/n_valid_tokens"]


@pytest.mark.parametrize(
    ("keys", "where"),
    [
        ({"actor.adv_norm": {"mean_level": "batch", "std_level": "batch"}}, "actor.adv_norm"),
        ({"dynamic_bs": True}, "dynamic_bs"),
        ({"actor.mask_no_eos_with_zero": True}, "actor.mask_no_eos_with_zero"),
        ({"actor.mb_spec.granularity": 4}, "actor.mb_spec.granularity"),
        ({"metronome.periodic.audit_every": 1}, "metronome.periodic.audit_every"),
        ({"metronome.in_flight": "resume"}, "in_flight"),
    ],
)
def test_what_periodic_mode_cant_keep_is_refused_before_an_engine_is_made(folder, keys, where):
    with pytest.raises(ConfigurationError) as refused, contextlib.ExitStack() as stack:
        stack.enter_context(room.trainer(room.configuration(folder, PERIODIC | keys)))
    assert where in str(refused.value)
