"""Which prompts are out and which groups are trained, in bounded mode: over a resume, over ranks, in any order."""

import itertools
import random

import pytest

pytest.importorskip("areal", reason="the AReaL adapter's tests need AReaL (requirements/areal.txt)")

import areal_hand as hand
import areal_room as room
from torchdata.stateful_dataloader import StatefulDataLoader

from metronome.errors import ConfigurationError
from metronome.periodic.sources import Bounded
from metronome_areal.arrange import arrange
from metronome_areal.bounded import BoundedFlow, over_publications
from metronome_areal.config import read
from metronome_areal.flow import NEVER
from metronome_areal.prompts import Prompts
from metronome_areal.trainer import _submit_path


def data(shuffle=False):
    rows = [{"prompt": number} for number in range(400)]
    return Prompts(StatefulDataLoader(rows, batch_size=3, shuffle=shuffle, drop_last=True, collate_fn=list))


def run(bound, seed, periods, prompts, version=0, batch=3):
    """A run with groups that end in any order, under any weights since they went out; what it trained, and its flow."""
    draw, rollout = random.Random(seed), hand.Results()
    flow = BoundedFlow(rollout, Bounded(bound), prompts, 10, 5.0)
    flow.submit = rollout.submit
    prompts.out = flow.prompts_out
    born, trained, most = {}, [], 0
    for now in range(version, version + periods):
        flow.open(now, 2, batch)
        while not flow.complete():
            for number in rollout.out:
                born.setdefault(number, now)
            most = max(most, len(flow._running) + len(flow._queued) + flow.trained)
            if rollout.out:
                number = draw.choice(list(rollout.out)) if draw.random() < 0.7 else max(rollout.out)
                first = draw.randint(born[number], now)
                rollout.finish(number, [first, draw.randint(first, now)])
            for one in flow.take(99, block=False):
                trained.append((one.task.data["prompt"], now - min(one.versions)))
        assert most <= (bound + 1) * batch
    return trained, flow, rollout


@pytest.mark.parametrize("bound", [0, 1, 2, 3])
def test_nothing_is_lost_trained_twice_or_beyond_the_bound(bound):
    drops = 0
    for seed in range(6):
        prompts = data()
        trained, flow, rollout = run(bound, seed, 12, prompts)
        done = [prompt for prompt, _ in trained]
        out = [one["prompt"] for one in flow.prompts_out()]
        assert len(done) == 12 * 3
        assert sorted(done + out) == list(range(len(done + out)))  # each taken prompt once, and none is missing
        assert max(age for _, age in trained) <= bound
        drops += flow.dropped
        assert flow.dropped == len(rollout.sent) - len(set(rollout.sent)) + len(flow._again)
    assert drops if bound else not drops


def test_without_the_verdict_groups_are_trained_beyond_the_bound():
    class Credulous(Bounded):
        def verdict(self, versions, training_version):
            return super().verdict([training_version], training_version)

    rollout = hand.Results()
    flow = BoundedFlow(rollout, Credulous(1), ({"prompt": n} for n in itertools.count()), 10, 5.0)
    flow.submit = rollout.submit
    ages = []
    for now in range(4):
        flow.open(now, 2, 2)
        while not flow.complete():
            rollout.finish(max(rollout.out) if now < 3 else min(rollout.out), [0 if min(rollout.out) < 2 else now])
            ages += [now - min(one.versions) for one in flow.take(9, block=False)]
    assert max(ages) > 1


def test_a_dropped_prompt_goes_out_again_before_new_ones():
    rollout = hand.Results()
    flow = BoundedFlow(rollout, Bounded(1), ({"prompt": n} for n in itertools.count()), 10, 5.0)
    flow.submit = rollout.submit
    for now in range(3):
        flow.open(now, 2, 2)
        while not flow.complete():
            if now < 2:
                rollout.finish(max(rollout.out), [now])
            else:
                rollout.finish(min(rollout.out), [0])  # 0, then 1: two versions old
                rollout.finish(min(rollout.out), [2])
            flow.take(9, block=False)
        if now == 2:
            break
    assert flow.dropped >= 1
    first = rollout.sent.index(0)
    again = rollout.sent.index(0, first + 1)
    assert rollout.sent[again:] == [0, *rollout.sent[again + 1 :]]
    assert max(rollout.sent[:again]) == len(set(rollout.sent[:again])) - 1
    assert all(prompt > max(rollout.sent[:again]) for prompt in rollout.sent[again + 1 :] if prompt != 1)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("bound", [1, 3])
def test_a_resumed_run_goes_on_within_its_window_and_trains_each_prompt_once(bound, shuffle):
    import torch

    torch.manual_seed(1)
    prompts = data(shuffle)
    trained, flow, _ = run(bound, 0, 7, prompts)
    state = prompts.state_dict()
    out = [one["prompt"] for one in flow.prompts_out()]
    assert out
    again = data(shuffle)
    again.load_state_dict(state)
    more, other, rollout = run(bound, 1, 7, again, version=7)
    assert rollout.sent[: len(out)] == out  # first what was out, in the place of as many
    assert max(age for _, age in more) <= bound
    both = [prompt for prompt, _ in trained + more]
    assert len(both) == len(set(both)) == 2 * 7 * 3
    assert not set(both) & {one["prompt"] for one in other.prompts_out()}


@pytest.mark.parametrize("version", [0, 40])
def test_after_a_jump_of_the_version_a_window_goes_out_and_no_burst(version):
    workflow = hand.Hand()
    with hand.executor(hand.Engine(version), batch=2) as made:
        flow, _ = hand.flow_on(made, Bounded(2), workflow)
        flow.open(version, 1, 2)
        hand.until(lambda: len(workflow.begun) == 6)
        assert len(made.dispatcher._pending_inputs) == 0
        assert flow._started() == 6
        workflow.end(*range(6))


def test_areals_own_bound_at_that_jump_would_let_a_burst_out():
    with hand.executor(hand.Engine(40), bound=2, batch=2, concurrent=512) as made:
        assert made.get_capacity() == 43 * 2  # its trainer mends that by counting 40 batches as accepted
        made.staleness_manager.on_version_recovered(40)
        assert made.get_capacity() == 3 * 2
        made.staleness_manager.max_staleness = NEVER
        assert made.get_capacity() >= 500  # ours alone admits


def test_each_rank_has_the_window_of_its_own_batch():
    for ranks in (1, 2):
        workflow = hand.Hand()
        with hand.executor(batch=4, ranks=ranks) as made:
            flow, _ = hand.flow_on(made, Bounded(1), workflow)
            flow.open(0, 1, 4 // ranks)
            hand.until(lambda workflow=workflow, ranks=ranks: len(workflow.begun) == 8 // ranks)
            workflow.end(*range(8))


def test_over_publications_are_rows_whose_trained_tokens_have_several_versions():
    (group,) = room.random_groups([4], version=1, response=8)
    assert over_publications(group) == (4, 0)
    longest = int(group["loss_mask"].sum(1).argmax())
    group["versions"][longest, group["loss_mask"][longest].nonzero()[-1]] = 2
    group["versions"][:, 0] = 5  # a prompt's token counts for nothing
    assert over_publications(group) == (4, 1)


# --- the configuration --------------------------------------------------------------------------------


def arranged(folder, **keys):
    config = room.configuration(folder, {key.replace("__", "."): value for key, value in keys.items()})
    part = read(config)
    return config, part, arrange(config, part)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("admission")


def test_areals_bound_is_ours_where_ours_is_not_given(folder):
    bounded = {"metronome__rollout_source": "bounded"}
    config, part, notes = arranged(folder, **bounded, rollout__max_head_offpolicyness=3)
    assert part.selection.rollout_source.max_staleness == 3
    assert "metronome.bounded.max_staleness=3  (rollout.max_head_offpolicyness)" in notes
    assert config.rollout.max_head_offpolicyness == NEVER
    assert read(config).selection.rollout_source.max_staleness == 3  # read again, as a second trainer does
    _, part, notes = arranged(
        folder, **bounded, rollout__max_head_offpolicyness=3, metronome__bounded={"max_staleness": 1}
    )
    assert part.selection.rollout_source.max_staleness == 1
    assert not any("bounded.max_staleness" in line for line in notes)
    _, part, _ = arranged(folder, **bounded)  # AReaL's default of 0
    assert part.selection.rollout_source.max_staleness == 2


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"dynamic_bs": True}, "dynamic_bs=false"),
        ({"actor__offload": True}, "separation"),
        ({"rollout__agent": {"mode": "online"}}, "users' sessions"),
    ],
)
def test_what_a_bounded_batch_cannot_be_made_of_is_refused(folder, keys, match):
    with pytest.raises(ConfigurationError, match=match):
        arranged(folder, metronome__rollout_source="bounded", **keys)
    config, *_ = arranged(folder, metronome__loss="a3po", **keys)
    assert config.rollout.max_head_offpolicyness == 0  # the loop is AReaL's


def test_a_controllers_workers_restart_what_runs_over_a_publication_by_import_paths():
    from types import SimpleNamespace

    from metronome_areal.flow import Task
    from metronome_areal.in_flight import Anew
    from metronome_areal.members import Members

    calls = []
    controller = SimpleNamespace(
        _resolve_workflow_str=lambda workflow: f"{workflow.__module__}.{workflow.__name__}",
        submit=lambda *args: calls.append(args) or 1,
    )
    for anew in (True, False):
        _submit_path(controller, hand.Hand, {"turns": 2}, Task({}, 3, 0.0), anew=anew)
        (_, path, named) = calls[-1]
        members = Members(**named)
        assert path == "metronome_areal.members.Members"
        assert isinstance(members.workflow, Anew) == anew
        assert (members.workflow.workflow if anew else members.workflow).turns == 2
