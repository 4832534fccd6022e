"""Runs through PPOTrainer.train in the CPU room, with the hooks on."""

import contextlib
import itertools
import time
from collections import Counter

import pytest

pytest.importorskip("areal", reason="the AReaL adapter's tests need AReaL (requirements/areal.txt)")

import areal_room as room
from areal.utils import stats_tracker

from metronome.errors import ConfigurationError, MetronomeError
from metronome_areal.cpu.weights import gathered

A3PO = {"metronome.loss": "a3po", "actor.reward_norm": None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("end_to_end")


class Watched(room.PPOTrainer):
    """Notes each step's metrics, as AReaL's logger gets them, and each batch that our loss got."""

    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        stats_tracker.export_all()
        self.stats, self.batches, self.groups = [], [], []
        commit, compute = self.stats_logger.commit, self.actor.compute_advantages

        def keeping(*args):
            self.stats.append(args[-1])
            commit(*args)

        def noting(groups):
            self.groups.append((self.actor.get_version(), [{**one} for one in groups]))
            return compute(groups)

        self.stats_logger.commit, self.actor.compute_advantages = keeping, noting
        host = self.actor.loss
        if host is not None:
            inner = host.loss

            class Noting(type(inner)):
                def __call__(loss, batch):
                    self.batches.append((self.actor.get_version(), batch))
                    return inner(batch)

            host.loss = Noting(inner.options)

    def of(self, name):
        """A metric over the steps."""
        return [step[name] for step in self.stats]


def pairs_trained(batches):
    """Each trained token's log-prob and version, as the loss got them."""
    return Counter(
        (round(float(old), 4), version - int(stale))
        for version, batch in batches
        for old, stale in zip(batch.behavior_log_probs[batch.mask], batch.staleness[batch.mask], strict=True)
    )


def pairs_generated(groups):
    """The same, as the workflow gave them."""
    return Counter(
        (round(float(old), 4), int(version))
        for _, of_step in groups
        for one in of_step
        for old, version in zip(
            one["logprobs"][one["loss_mask"].bool()], one["versions"][one["loss_mask"].bool()], strict=True
        )
    )


def test_all_four_hooks_together_in_periodic_mode_and_g_moves(folder):
    keys = A3PO | {
        "metronome.rollout_source": "periodic",
        "metronome.attention": "shared_prompt",
        "metronome.group_controller": "sagc",
        "metronome.sagc": {
            "sizes": [2, 4, 8],
            "min_dwell": 1,
            "event": "step_idle",
            "idle_tau": 0.001,
            "eta": 4.0,
            "delta": 0.05,
        },
        "total_train_steps": 4,
    }
    with room.trainer(room.configuration(folder, keys), Watched) as one:
        one.train(workflow=room.workflow(one.config))
        sizes = [int(size) for size in one.of("metronome/group_controller/size")]
        assert sizes[0] == 8
        assert len(set(sizes)) > 1
        for step, size in enumerate(sizes):
            trained = [group for version, groups in one.groups if version == step for group in groups]
            assert [len(group["rewards"]) for group in trained] == [size] * (4 * 8 // size)
            assert one.of("metronome/rollout_source/prompts")[step] == 4 * 8 / size
        assert one.of("metronome/group_controller/straggler_rate") != [0.0] * 4
        assert all(calls > 0 for calls in one.of("metronome/loss/calls"))
        assert one.of("metronome/loss/staleness_max") == [0.0] * 4
        assert all(
            fed < separate
            for fed, separate in zip(
                one.of("metronome/attention/tokens_fed"), one.of("metronome/attention/tokens_separate"), strict=True
            )
        )
        assert one.of("metronome/weights/changed") == [1.0] * 4
        assert pairs_trained(one.batches) == pairs_generated(one.groups)


def interrupt(one):
    """What is generated during an update is slow, and has a token at least and not all when it is published."""
    generator, update, pause, resume = (
        one.rollout.generator,
        one.actor.ppo_update,
        one.rollout.pause,
        one.rollout.resume,
    )

    def slowly(batch):
        generator.least_seconds = 0.2
        update(batch)

    def with_tokens():
        last = time.monotonic() + 10
        flow = one.train_dataloader.out.__self__
        while flow._running and not any(row.tokens for row in generator._batch.rows) and time.monotonic() < last:
            time.sleep(0.01)
        pause()

    def quickly():
        generator.least_seconds = 0.0
        resume()

    one.actor.ppo_update, one.rollout.pause, one.rollout.resume = slowly, with_tokens, quickly


def test_bounded_a3po_trains_stale_and_interrupted_responses_with_a_version_a_token(folder):
    keys = A3PO | {
        "metronome.rollout_source": "bounded",
        "metronome.bounded.max_staleness": 2,
        "gconfig.max_new_tokens": 24,
        "gconfig.min_new_tokens": 20,
        "total_train_steps": 6,
    }
    with room.trainer(room.configuration(folder, keys), Watched) as one:
        interrupt(one)
        one.train(workflow=room.workflow(one.config))
        assert len(one.stats) == 6
        staleness = one.of("metronome/loss/staleness_max")
        assert max(staleness) == 2
        assert staleness[0] == 0
        assert max(one.of("metronome/loss/off_behavior")) > 0
        assert one.of("metronome/loss/version_unknown") == [0.0] * 6
        assert pairs_trained(one.batches) == pairs_generated(one.groups)
        rows = [
            versions[mask.bool()]
            for _, groups in one.groups
            for group in groups
            for versions, mask in zip(group["versions"], group["loss_mask"], strict=True)
        ]
        assert any(len(set(row.tolist())) > 1 for row in rows)  # a publication in the middle of a response
        assert all((row.diff() >= 0).all() for row in rows)
        # A token of two versions back is interpolated; with one or none the proximal policy is the engine's.
        for version, batch in one.batches:
            assert int(batch.staleness[batch.mask].max()) <= 2
            assert (version - batch.staleness[batch.mask] >= 0).all()


def test_generation_goes_on_while_a_bounded_batch_is_trained(folder):
    keys = {
        "metronome.rollout_source": "bounded",
        "metronome.bounded.max_staleness": 1,
        "total_train_steps": 3,
    }
    with room.trainer(room.configuration(folder, keys), Watched) as one:
        out, update = [], one.actor.ppo_update

        def noting(batch):
            flow = one.train_dataloader.out.__self__
            out.append(len(flow._running) + len(flow._queued))
            update(batch)

        one.actor.ppo_update = noting
        one.train(workflow=room.workflow(one.config))
        assert out == [4, 4, 4]
        assert not one.rollout.workflow_executor.is_paused()


@pytest.mark.parametrize("loss", ["ppo", "a3po"])
def test_a_loss_alone_leaves_the_loop_to_areal(folder, loss):
    keys = {"metronome.loss": loss, "actor.ppo_n_minibatches": 2, "rollout.max_head_offpolicyness": 2}
    with room.trainer(room.configuration(folder, keys), Watched) as one:
        one.train(workflow=room.workflow(one.config))
        assert one.config.rollout.max_head_offpolicyness == 2
        assert all(calls >= 2 for calls in one.of("metronome/loss/calls"))
        assert one.of("metronome/weights/changed") == [1.0, 1.0]
        assert {batch.step_fraction for _, batch in one.batches} == {0.0, 0.5}
        assert pairs_trained(one.batches) == pairs_generated(one.groups)


def test_without_a_block_the_run_is_areals_with_its_traps_mended(folder):
    with room.trainer(room.configuration(folder), Watched) as one:
        one.train(workflow=room.workflow(one.config))
        assert one.of("metronome/weights/changed") == [1.0, 1.0]
        assert "metronome/loss/calls" not in one.stats[0]


def test_a_critic_learns_in_synchronous_mode_and_periodic_mode_refuses_one(folder):
    critic = {
        name: room.settings(folder)["actor"][name] for name in ("experiment_name", "trial_name", "path", "mb_spec")
    }
    critic |= {"backend": "fsdp:d1", "is_critic": True, "optimizer": room.settings(folder)["actor"]["optimizer"]}
    keys = A3PO | {"critic": critic, "actor.adv_norm": {"mean_level": "batch", "std_level": "batch"}}
    with room.trainer(room.configuration(folder, keys), Watched) as one:
        assert type(one.critic).__name__ == "MetronomeCritic"
        one.train(workflow=room.workflow(one.config))
        assert min(one.of("ppo_critic/grad_norm")) > 0
        assert pairs_trained(one.batches) == pairs_generated(one.groups)
    config = room.configuration(folder, {"critic": critic, "metronome.rollout_source": "periodic"})
    with pytest.raises(ConfigurationError, match="critic=null"), contextlib.ExitStack() as stack:
        stack.enter_context(room.trainer(config))


def test_lora_moves_in_parts_and_servers_keep_as_many_adapters_as_the_bound_needs(folder):
    lora = {"actor.use_lora": True, "actor.lora_rank": 4, "actor.lora_alpha": 8, "rollout.use_lora": True}
    with room.trainer(room.configuration(folder, lora | {"metronome.rollout_source": "periodic"}), Watched) as one:
        assert one.weight_update_meta.lora_keep_versions == 2
        before = gathered(one.actor)
        one.train(workflow=room.workflow(one.config))
        assert one.of("metronome/weights/changed") == [1.0, 1.0]
        after, theirs = gathered(one.actor), one.rollout.generator._model.state_dict()
        assert any(not after[name].equal(value) for name, value in before.items())
        assert all(after[name].equal(theirs[name]) for name in after)


class Failing(room.Direct):
    """Members whose reward raises: ``every``-th of all."""

    every = 1

    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        self.count = itertools.count(1)

    async def _compute_rewards(self, response, prompt, data):
        if next(self.count) % self.every == 0:
            raise ZeroDivisionError("no digits in it")
        return await super()._compute_rewards(response, prompt, data)


class SometimesFailing(Failing):
    """One in five."""

    every = 5


@pytest.mark.parametrize("mode", ["periodic", "bounded", "synchronous"])
def test_a_members_failing_reward_leaves_its_group_smaller(folder, mode):
    with room.trainer(room.configuration(folder, {"metronome.rollout_source": mode}), Watched) as one:
        one.train(workflow=room.workflow(one.config, SometimesFailing))
        sizes = [len(group["rewards"]) for _, groups in one.groups for group in groups]
        assert len(sizes) == 8
        assert 1 <= min(sizes) < 4
        assert max(sizes) == 4
        assert max(one.of("ppo_actor/advantages/max")) < 10  # stock: 1e5
        assert min(one.of("ppo_actor/advantages/min")) > -10


@pytest.mark.parametrize("mode", ["periodic", "bounded"])
def test_a_reward_that_always_fails_is_one_error_and_the_trainer_closes(folder, mode):
    with room.trainer(room.configuration(folder, {"metronome.rollout_source": mode}), Watched) as one:
        with pytest.raises(MetronomeError, match="every group fails: ZeroDivisionError: no digits in it"):
            one.train(workflow=room.workflow(one.config, Failing))
        assert type(one.actor).__name__ == "MetronomeActor"  # what stood in for it is gone
