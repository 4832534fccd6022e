"""What a publication does to running episodes: they go on, end first, or begin anew."""

import contextlib
import threading
import time
import uuid

import pytest

pytest.importorskip("areal", reason="the AReaL adapter's tests need AReaL (requirements/areal.txt)")

import areal_hand as hand
import areal_room as room
import torch
from areal.api import ModelRequest
from areal.utils import stats_tracker

from metronome.errors import ConfigurationError, MetronomeError, WaitTimeout
from metronome.periodic.sources import Bounded
from metronome_areal import in_flight
from metronome_areal.config import read
from metronome_areal.flow import NEVER
from metronome_areal.in_flight import Anew, Finishing
from metronome_areal.parts import Ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("in_flight")


# --- abort --------------------------------------------------------------------------------------------


def over_a_publication(workflow, wrapped):
    """Prompt 0 ends before it, 1 has had one of its two turns, 2 none; their rows."""
    engine = hand.Engine()
    with hand.executor(engine) as made:
        numbers = [made.submit({"prompt": number}, workflow=wrapped) for number in range(3)]
        hand.until(lambda: len(workflow.begun) == 3)
        workflow.end(0)
        workflow._may[1] = 1
        hand.until(lambda: workflow.ended == [0] and not workflow._may[1])
        engine.version = 1
        time.sleep(0.3)
        workflow.end(1, 2)
        rows = [made.wait_for_task(number, timeout=20) for number in numbers]
    return [sorted(set(row["versions"][row["loss_mask"].bool()].tolist())) for row in rows]


def test_with_abort_episodes_that_run_begin_anew_with_all_their_turns():
    workflow = hand.Hand(turns=2)
    assert over_a_publication(workflow, Anew(workflow)) == [[0], [1], [1]]
    assert workflow.begun == [0, 1, 2, 1, 2]


def test_without_it_their_turns_are_of_several_versions():
    workflow = hand.Hand(turns=2)
    assert over_a_publication(workflow, workflow)[1] == [0, 1]
    assert workflow.begun == [0, 1, 2]


def test_an_episode_that_ends_before_anyone_looked_begins_anew_too(monkeypatch):
    monkeypatch.setattr(in_flight, "_LOOK", 60.0)
    workflow = hand.Hand(turns=2)
    engine = hand.Engine()
    with hand.executor(engine) as made:
        number = made.submit({"prompt": 0}, workflow=Anew(workflow))
        hand.until(lambda: workflow.begun == [0])
        workflow._may[0] = 1
        hand.until(lambda: not workflow._may[0])
        engine.version = 1
        workflow._may[0] = 1
        hand.until(lambda: workflow.begun == [0, 0])
        workflow.end(0)
        row = made.wait_for_task(number, timeout=20)
    assert set(row["versions"][row["loss_mask"].bool()].tolist()) == {1}


def test_an_episodes_own_error_comes_through_and_one_of_before_the_publication_does_not():
    class Broken(hand.Hand):
        async def arun_episode(self, engine, data):
            await super().arun_episode(engine, data)
            if engine.get_version() < 2:
                raise ZeroDivisionError("no digits")
            return room.random_groups([1], version=2)[0]

    workflow, engine = Broken(), hand.Engine()
    with hand.executor(engine) as made:
        number = made.submit({"prompt": 0}, workflow=Anew(workflow))
        workflow.end(0)
        assert made.wait_for_task(number, timeout=20) is None  # AReaL's None for an episode that raised
        number = made.submit({"prompt": 1}, workflow=Anew(workflow))
        hand.until(lambda: workflow.begun == [0, 1])
        engine.version = 2
        workflow.end(1, 1)
        assert made.wait_for_task(number, timeout=20) is not None


def test_an_engine_that_is_destroyed_takes_its_episodes_with_it():
    workflow = hand.Hand()
    with hand.executor() as made:
        made.submit({"prompt": 0}, workflow=Anew(workflow))
        hand.until(lambda: workflow.begun == [0])
        start = time.monotonic()
    assert time.monotonic() - start < 3


# --- finish -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def three_out(seconds=20.0, ranks=None):
    """Two groups that run and one that AReaL keeps back; the rollout whose pause waits."""
    workflow = hand.Hand()
    with hand.executor(concurrent=2) as made:
        flow, rollout = hand.flow_on(made, Bounded(0), workflow, seconds)
        flow.open(0, 1, 3)
        hand.until(lambda: len(workflow.begun) == 2)
        yield workflow, made, flow, Finishing(rollout, flow, ranks or Ranks())


def test_with_finish_a_publication_waits_for_running_groups_and_none_starts_meanwhile():
    with three_out() as (workflow, made, flow, rollout):
        publication = threading.Thread(target=rollout.pause)
        publication.start()
        time.sleep(0.3)
        assert publication.is_alive()
        assert not made.is_paused()
        workflow.end(0)
        time.sleep(0.3)
        assert publication.is_alive()
        assert workflow.begun == [0, 1]  # 2 could have had 0's place
        workflow.end(1)
        publication.join(20)
        assert made.is_paused()
        assert made.staleness_manager.max_staleness == NEVER
        time.sleep(0.2)
        assert workflow.begun == [0, 1]
        rollout.resume()
        hand.until(lambda: workflow.begun == [0, 1, 2])
        workflow.end(2)
        trained = []
        while not flow.complete():
            trained += [one.task.data["prompt"] for one in flow.take(9)]
        assert sorted(trained) == [0, 1, 2]


def test_areals_own_pause_does_not_wait():
    with three_out() as (workflow, made, _, rollout):
        rollout._rollout.pause()
        assert made.is_paused()
        assert workflow.ended == []
        made.resume()
        workflow.end(0, 1, 2)


def test_a_group_that_never_ends_is_one_error_that_says_what_was_waited_for():
    with three_out(seconds=0.4) as (workflow, made, _, rollout):
        with pytest.raises(WaitTimeout, match=r"a publication waits for running groups.*2 groups"):
            rollout.pause()
        assert not made.is_paused()
        workflow.end(0)
        hand.until(lambda: workflow.begun == [0, 1, 2])  # nothing is held any more
        workflow.end(1, 2)


def test_a_rank_on_which_nothing_ends_stops_the_others():
    class Other(Ranks):
        def everywhere(self, value):
            return [value, MetronomeError("rank 1 waits")]

    with three_out(ranks=Other()) as (workflow, made, _, rollout):
        workflow.end(0, 1, 2)
        with pytest.raises(MetronomeError, match="rank 1 waits"):
            rollout.pause()
        assert not made.is_paused()
    calls = []
    silent = type("Rollout", (), {"pause": lambda self: calls.append(1), "resume": lambda self: "its own"})()
    rollout = Finishing(silent, None, Ranks())  # a rank that doesn't generate
    rollout.pause()
    assert calls == [1]
    assert rollout.resume() == "its own"


# --- a run --------------------------------------------------------------------------------------------


class TwoTurns(room.Direct):
    """Two turns with a tool's answer between them, which isn't trained."""

    async def arun_episode(self, engine, data):
        self.begun = getattr(self, "begun", 0) + 1
        ids = self.get_input_ids_fn(data["messages"], self.tokenizer, False)
        row = {"input_ids": list(ids), "loss_mask": [0] * len(ids), "logprobs": [0.0] * len(ids)}
        row["versions"] = [-1] * len(ids)
        for turn in range(2):
            sampling = self.gconfig.new(n_samples=1)
            request = ModelRequest(rid=uuid.uuid4().hex, input_ids=row["input_ids"], gconfig=sampling)
            found = await engine.agenerate(request)
            tool = [] if turn else [7, 8, 9]
            row["input_ids"] = [*row["input_ids"], *found.output_tokens, *tool]
            row["loss_mask"] += [1] * found.output_len + [0] * len(tool)
            row["logprobs"] += [*found.output_logprobs, *[0.0] * len(tool)]
            row["versions"] += [*found.output_versions, *[-1] * len(tool)]
        made = {name: torch.tensor(value)[None] for name, value in row.items()}
        made["attention_mask"] = torch.ones_like(made["input_ids"], dtype=torch.bool)
        digits = sum(self.tokenizer.decode([one]).isdigit() for one in row["input_ids"])
        return made | {"rewards": torch.tensor([digits / 10])}


class Watched(room.PPOTrainer):
    """Notes each step's metrics and groups, and the requests that run when weights are taken."""

    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        stats_tracker.export_all()
        self.stats, self.groups, self.running = [], [], []
        commit, compute, take = self.stats_logger.commit, self.actor.compute_advantages, self.rollout.take_weights

        def keeping(*args):
            self.stats.append(args[-1])
            commit(*args)

        def noting(groups):
            self.groups += [(self.actor.get_version(), one) for one in groups]
            return compute(groups)

        def taking(*args):
            self.running.append(len(self.rollout.generator._batch.rows))
            take(*args)

        self.stats_logger.commit, self.actor.compute_advantages = keeping, noting
        self.rollout.take_weights = taking


@pytest.mark.parametrize("mode", ["resume", "finish", "abort", None])
def test_a_run_of_two_turns_over_publications(folder, mode):
    keys = {
        "metronome.rollout_source": "bounded",
        "metronome.loss": "a3po",
        "metronome.bounded.max_staleness": 2,
        "gconfig.max_new_tokens": 12,
        "gconfig.min_new_tokens": 8,
        "total_train_steps": 5,
    }
    if mode is not None:
        keys["metronome.in_flight"] = mode
    with room.trainer(room.configuration(folder, keys), Watched) as one:
        one.rollout.generator.least_seconds = 0.01
        workflow = room.workflow(one.config, TwoTurns)
        one.train(workflow=workflow)
        assert len(one.stats) == 5
        rows = [
            set(versions[mask.bool()].tolist())
            for _, group in one.groups
            for versions, mask in zip(group["versions"], group["loss_mask"], strict=True)
        ]
        groups = [set(group["versions"][group["loss_mask"].bool()].tolist()) for _, group in one.groups]
        over = [step["metronome/bounded/rows_over_publications"] for step in one.stats]
        several = sum(len(row) > 1 for row in rows)
        assert sum(over) / 5 == pytest.approx(several / len(rows))
        for version, group in one.groups:
            assert version - int(group["versions"][group["loss_mask"].bool()].min()) <= 2
        assert not one.rollout.workflow_executor.is_paused()
        if mode == "finish":
            assert several == 0
            assert all(len(group) == 1 for group in groups)
            assert one.running == [0] * 5
            assert workflow.begun >= len(rows)
        elif mode == "abort":
            assert several == 0
            assert max(one.running) > 0
        else:
            assert several > 0
            assert max(one.running) > 0
        assert max(step["metronome/loss/version_unknown"] for step in one.stats) == 0.0


def test_what_is_not_bounded_finishes_and_says_so(folder):
    for source in ("periodic", "synchronous"):
        for mode in ("abort", "resume"):
            keys = {"metronome.rollout_source": source, "metronome.in_flight": mode}
            with pytest.raises(ConfigurationError, match="nothing runs at a publication"):
                read(room.configuration(folder, keys))
    with pytest.raises(ConfigurationError, match="abort"):
        read(room.configuration(folder, {"metronome.rollout_source": "bounded", "metronome.in_flight": "abor"}))
