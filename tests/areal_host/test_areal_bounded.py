"""Bounded runs through PPOTrainer.train in the CPU room: what is trained, what is recorded, and G that moves."""

import asyncio
from collections import Counter

import pytest

pytest.importorskip("areal", reason="the AReaL adapter's tests need AReaL (requirements/areal.txt)")

import areal_room as room
from areal.utils import stats_tracker

from metronome.errors import MetronomeError
from metronome_areal.cpu import generator
from metronome_areal.cpu.weights import gathered

BOUNDED = {"metronome.rollout_source": "bounded", "metronome.loss": "a3po"}
SAGC = {
    "metronome.group_controller": "sagc",
    "metronome.sagc": {
        "sizes": [2, 4, 8],
        "min_dwell": 1,
        "event": "step_idle",
        "idle_tau": 0.001,
        "eta": 4.0,
        "delta": 0.05,
    },
}
LONG = {"gconfig.max_new_tokens": 24, "gconfig.min_new_tokens": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("bounded")


class Watched(room.PPOTrainer):
    """Notes each step's metrics, the groups that it trained, and every prompt that a member was generated for."""

    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        stats_tracker.export_all()
        self.stats, self.groups = [], []
        commit, compute = self.stats_logger.commit, self.actor.compute_advantages

        def keeping(*args):
            self.stats.append(args[-1])
            commit(*args)

        def noting(groups):
            found = compute(groups)
            self.groups += [(self.actor.get_version(), group, made) for group, made in zip(groups, found, strict=True)]
            return found

        self.stats_logger.commit, self.actor.compute_advantages = keeping, noting

    def of(self, name):
        """A metric over the steps."""
        return [step[f"metronome/bounded/{name}"] for step in self.stats]

    def ages(self):
        """Staleness of each group's oldest token, step by step."""
        found = {}
        for version, group, _ in self.groups:
            oldest = int(group["versions"][group["loss_mask"].bool()].min())
            found.setdefault(version, []).append(version - oldest)
        return found

    def prompts(self):
        """How often each prompt's tokens were trained on, in groups."""
        keys = Counter()
        for _, group, _ in self.groups:
            start = int(group["loss_mask"][0].nonzero()[0])
            keys[tuple(group["input_ids"][0, :start].tolist())] += 1
        return keys


class Uneven(room.Direct):
    """Every fifth prompt takes until three batches are trained, the first time."""

    batches = 3

    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        self.seen = Counter()

    async def arun_episode(self, engine, data):
        began, prompt = engine.get_version(), data["messages"][0]["content"]
        self.seen[prompt] += 1
        slow = self.seen[prompt] <= 4 and list(self.seen).index(prompt) % 5 == 0
        found = await super().arun_episode(engine, data)
        while slow and engine.get_version() < began + self.batches:
            await asyncio.sleep(0.01)
        return found


class Late(Uneven):
    """Every fifth prompt comes a batch later."""

    batches = 1


def test_what_is_too_stale_is_dropped_generated_again_and_trained_once(folder):
    keys = BOUNDED | {"metronome.bounded.max_staleness": 1, "total_train_steps": 8}
    with room.trainer(room.configuration(folder, keys), Watched) as one:
        one.train(workflow=room.workflow(one.config, Uneven))
        assert len(one.stats) == 8
        ages = one.ages()
        assert max(max(step) for step in ages.values()) == 1
        for step in range(8):
            assert one.of("staleness_max")[step] == max(ages[step])
            assert one.of("staleness_mean")[step] == pytest.approx(sum(ages[step]) / len(ages[step]))
        dropped = one.of("dropped_groups")
        assert sum(dropped) >= 1
        assert one.of("dropped_groups_total")[-1] == sum(dropped)
        assert all(step["metronome/loss/staleness_max"] <= 1 for step in one.stats)
        assert all(len(step) == 4 for step in ages.values())
        flow = one.train_dataloader.out.__self__
        assert len(one.prompts()) == 8 * 4  # each prompt once, the dropped ones too, if they came back
        assert set(one.prompts().values()) == {1}
        assert len(flow.prompts_out()) == 4
        assert min(one.of("waiting_groups")) >= 0


def test_sagc_in_bounded_mode_trains_batches_of_several_g(folder):
    # G begins at the largest size. When it falls to 4, four groups of 8 are out and the batch wants eight, so it is
    # mixed whenever that happens; with a bound of 2 eight would be out, which may fill a batch of their own.
    keys = BOUNDED | SAGC | LONG | {"metronome.bounded.max_staleness": 1, "total_train_steps": 8}
    keys |= {"metronome.attention": "shared_prompt", "actor.reward_norm": None}
    with room.trainer(room.configuration(folder, keys), Watched) as one:
        one.rollout.generator.least_seconds = 0.005
        one.train(workflow=room.workflow(one.config, Late))
        sizes = [int(step["metronome/group_controller/size"]) for step in one.stats]
        assert sizes[0] == 8
        assert len(set(sizes)) > 1
        batches = {}
        for version, group, made in one.groups:
            batches.setdefault(version, []).append(len(group["rewards"]))
            # AReaL's are relative to the tokens of the true group, whatever its size.
            mask = made["loss_mask"].bool()
            assert abs(float(made["advantages"][mask].mean())) < 1e-4
            assert float(made["advantages"][mask].abs().max()) < 10
        assert any(len(set(batch)) > 1 for batch in batches.values())
        assert {size for batch in batches.values() for size in batch} <= {2, 4, 8}
        for step, size in enumerate(sizes):
            assert len(batches[step]) == 4 * 8 // size
        assert max(one.of("staleness_max")) >= 1
        assert all(step["metronome/attention/calls"] > 0 for step in one.stats)
        assert all(step["metronome/weights/changed"] == 1.0 for step in one.stats)


def test_a_bound_of_zero_trains_on_policy_and_goes_on(folder):
    keys = BOUNDED | {"metronome.bounded.max_staleness": 0, "total_train_steps": 3}
    with room.trainer(room.configuration(folder, keys), Watched) as one:
        one.train(workflow=room.workflow(one.config))
        assert one.of("staleness_max") == [0.0] * 3
        assert one.of("dropped_groups_total") == [0.0] * 3


def test_areals_bound_is_kept_by_ours(folder):
    keys = {"metronome.rollout_source": "bounded", "rollout.max_head_offpolicyness": 3, "total_train_steps": 6}
    with room.trainer(room.configuration(folder, keys), Watched) as one:
        one.train(workflow=room.workflow(one.config))
        assert max(one.of("staleness_max")) == 3


def test_weights_that_never_reach_the_engine_stop_the_run(folder, monkeypatch):
    with room.trainer(room.configuration(folder, BOUNDED), Watched) as one:
        monkeypatch.setattr(generator, "replace_weights", lambda *args, **named: None)
        with pytest.raises(MetronomeError, match="didn't reach the rollout engine"):
            one.train(workflow=room.workflow(one.config))


def test_an_engine_whose_trainer_did_not_move_is_left_alone(folder):
    keys = BOUNDED | {"actor.optimizer.lr": 0.0}
    with room.trainer(room.configuration(folder, keys), Watched) as one:
        before = {name: value.clone() for name, value in gathered(one.actor).items()}
        one.train(workflow=room.workflow(one.config))
        assert [step["metronome/weights/changed"] for step in one.stats] == [0.0, 0.0]
        assert all(value.equal(before[name]) for name, value in gathered(one.actor).items())
