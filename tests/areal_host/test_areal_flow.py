"""Prompts out and groups in: admission, failures and filters, and what several ranks agree on."""

import asyncio
import itertools
import threading
from collections import Counter
from types import SimpleNamespace

import pytest

pytest.importorskip("areal", reason="the AReaL adapter's tests need AReaL (requirements/areal.txt)")

import areal_room as room
import torch
from areal.api import RolloutWorkflow
from torchdata.stateful_dataloader import StatefulDataLoader

from metronome.contracts import StepStats
from metronome.errors import MetronomeError, VersionMismatch, WaitTimeout
from metronome.periodic.sources import Bounded, Periodic, Synchronous
from metronome.sagc.controller import SagcController
from metronome.sagc.options import SagcOptions
from metronome_areal.controller import MetronomeController
from metronome_areal.flow import PromptFlow, Task, stats_of, versions_of
from metronome_areal.levelling import MASKED
from metronome_areal.members import Members
from metronome_areal.parts import Parts, Ranks
from metronome_areal.periodic import FlowActor
from metronome_areal.prompts import Prompts
from metronome_areal.trainer import _submit_path


class Dispatcher:
    """AReaL's, as far as the flow looks into it: finished tasks by their ids."""

    def __init__(self):
        self._result_cv = threading.Condition()
        self._pending_results = {}
        self._active_task_ids = set()
        self.broken = None

    def _check_thread_exception(self):
        if self.broken is not None:
            raise self.broken


class Rollout:
    """What was submitted, and a hand that finishes it."""

    def __init__(self):
        self.dispatcher = Dispatcher()
        self.out, self.numbers = {}, itertools.count()

    def submit(self, task):
        number = next(self.numbers)
        self.out[number] = task
        self.dispatcher._active_task_ids.add(number)
        return number

    def finish(self, *prompts, version=0, failed=False):
        for prompt in prompts:
            number = next(number for number, task in self.out.items() if task.data["prompt"] == prompt)
            task = self.out.pop(number)
            task.done()
            (group,) = room.random_groups([task.size], version=version, seed=prompt)
            result = None if failed else SimpleNamespace(trajectory=group | {"prompt": prompt})
            with self.dispatcher._result_cv:
                self.dispatcher._pending_results[number] = SimpleNamespace(task_id=number, data=result)
                self.dispatcher._result_cv.notify_all()

    def prompts(self):
        return [task.data["prompt"] for task in self.out.values()]


def flow_of(source, seconds=5.0):
    rollout = Rollout()
    flow = PromptFlow(rollout, source, ({"prompt": number} for number in itertools.count()), 10, seconds)
    flow.submit = rollout.submit
    return flow, rollout


def taken(flow, most=99):
    return [one.task.data["prompt"] for one in flow.take(most, block=False)]


def test_a_period_trains_what_finishes_in_the_order_of_arrival():
    flow, rollout = flow_of(Periodic())
    flow.open(0, 4, 4)
    assert rollout.prompts() == [0, 1, 2, 3]
    assert taken(flow) == []
    rollout.finish(2)
    assert taken(flow) == [2]
    rollout.finish(3, 0)
    assert taken(flow, most=1) == [3]
    assert taken(flow) == [0]
    assert not flow.complete()
    rollout.finish(1)
    assert taken(flow) == [1]
    assert flow.complete()
    assert rollout.prompts() == []  # nothing is out over a publication
    flow.open(1, 2, 2)
    assert rollout.prompts() == [4, 5]
    assert [task.size for task in rollout.out.values()] == [2, 2]
    assert flow.prompts_out() == [{"prompt": 4}, {"prompt": 5}]


def test_failed_and_refused_groups_are_replaced_by_the_next_prompts():
    flow, rollout = flow_of(Periodic())
    flow.accept = lambda group: group["prompt"] != 1
    flow.open(0, 4, 3)
    rollout.finish(0, failed=True)
    rollout.finish(1, 2)
    assert taken(flow) == [2]
    assert rollout.prompts() == [3, 4]
    rollout.finish(3, 4)
    assert taken(flow) == [3, 4]
    assert flow.complete()
    assert (flow.failed, flow.refused) == (1, 1)
    assert len(flow.generated) == 4  # a refused group was generated, for the group controller


def test_which_prompts_are_trained_depends_on_the_filter_and_not_on_arrival():
    for order in itertools.permutations(range(4)):
        flow, rollout = flow_of(Periodic())
        flow.accept = lambda group: group["prompt"] not in (1, 2, 5)
        flow.open(0, 2, 4)
        trained = []
        for prompt in order:
            rollout.finish(prompt)
            trained += taken(flow)
        while not flow.complete():
            rollout.finish(rollout.prompts()[-1])
            trained += taken(flow)
        assert sorted(trained) == [0, 3, 4, 6]


def test_a_synchronous_batch_comes_whole():
    flow, rollout = flow_of(Synchronous())
    flow.open(0, 4, 3)
    rollout.finish(0, 2)
    assert taken(flow) == []
    rollout.finish(1)
    assert taken(flow) == [0, 2, 1]
    assert flow.complete()


def test_a_group_of_another_version_stops_a_period():
    flow, rollout = flow_of(Periodic())
    flow.open(3, 4, 2)
    rollout.finish(0, version=2)
    with pytest.raises(VersionMismatch):
        taken(flow)


def test_bounded_keeps_a_window_out_and_sends_stale_prompts_again():
    flow, rollout = flow_of(Bounded(max_staleness=1))
    flow.open(0, 4, 2)
    assert rollout.prompts() == [0, 1, 2, 3]
    rollout.finish(0, 1)
    assert taken(flow) == [0, 1]
    assert flow.complete()
    assert rollout.prompts() == [2, 3]  # what is generated while the batch is trained
    flow.open(1, 4, 2)
    assert rollout.prompts() == [2, 3, 4, 5]
    rollout.finish(4, 5, version=1)
    assert taken(flow) == [4, 5]
    flow.open(2, 4, 2)
    rollout.finish(2, version=0)
    rollout.finish(3, version=1)
    assert taken(flow) == [3]  # 2 is two versions old
    assert flow.dropped == 1
    assert 2 not in rollout.prompts()
    assert taken(flow) == []
    assert 2 in rollout.prompts()


def test_silence_is_an_error_and_arrivals_put_it_off():
    flow, rollout = flow_of(Periodic(), seconds=0.2)
    flow.open(0, 4, 2)
    rollout.finish(0)
    assert taken(flow) == [0]
    with pytest.raises(WaitTimeout, match="1 prompts out"):
        flow.take(9)


@pytest.mark.parametrize("here", [True, False], ids=["here", "workers"])
def test_a_workflow_that_returns_nothing_is_told_apart_from_one_that_fails(here):
    flow, rollout = flow_of(Periodic())
    if here:
        rollout.workflow_executor = rollout
    flow.open(0, 4, 2)
    for _ in range(4):
        rollout.finish(*rollout.prompts(), failed=True)
        assert taken(flow) == []
    rollout.finish(*rollout.prompts(), failed=True)
    with pytest.raises(MetronomeError, match="every group fails") as found:
        taken(flow)
    assert ("the workflow returned None for each" in found.value.what) == here
    assert ("workers' logs" in found.value.remedy) == (not here)


def test_a_run_of_failures_is_one_error_with_its_cause():
    flow, rollout = flow_of(Periodic())
    flow.open(0, 4, 2)
    flow.note(ZeroDivisionError("no digits"))
    for _ in range(4):
        rollout.finish(*rollout.prompts(), failed=True)
        assert taken(flow) == []
    rollout.finish(*rollout.prompts(), failed=True)
    with pytest.raises(MetronomeError, match="every group fails: ZeroDivisionError: no digits") as found:
        taken(flow)
    assert isinstance(found.value.__cause__, ZeroDivisionError)
    assert flow.failed == 9
    assert "log has each error" in found.value.remedy
    flow, rollout = flow_of(Periodic())
    flow.open(0, 4, 2)
    for _ in range(20):  # one in two fails: no error
        rollout.finish(rollout.prompts()[0], failed=True)
        taken(flow)
        rollout.finish(rollout.prompts()[0])
        flow.take(9, block=False)
        if flow.complete():
            flow.open(0, 4, 2)


def test_an_error_of_areals_threads_comes_through_and_other_tasks_results_stay():
    flow, rollout = flow_of(Periodic())
    flow.open(0, 4, 2)
    rollout.dispatcher._pending_results[77] = SimpleNamespace(task_id=77, data=None)
    rollout.finish(0)
    assert taken(flow) == [0]
    assert list(rollout.dispatcher._pending_results) == [77]
    assert rollout.dispatcher._active_task_ids == {1}
    rollout.dispatcher.broken = RuntimeError("a thread died")
    with pytest.raises(RuntimeError, match="a thread died"):
        flow.take(9)


def test_a_groups_versions_are_those_of_trained_tokens_or_else_of_sampled_ones():
    (group,) = room.random_groups([2], version=3)
    group["versions"][0, -1] = 9  # padding, or a tool's token
    group["loss_mask"][0, -1] = 0
    assert versions_of(group) == [3]
    group["attention_mask"][0, -1] = False
    group["loss_mask"][:] = 0
    assert versions_of(group) == [3]
    (group,) = room.random_groups([2], response=10)
    task = Task({}, 2, 1.0)
    task.done()
    stats = stats_of(group, task, largest=int(group["loss_mask"].sum(1).max()))
    assert stats.lengths == group["loss_mask"].sum(1).tolist()
    assert True in stats.truncated
    assert (stats.start, stats.end) == (1.0, task.end)


def test_a_row_is_truncated_if_one_of_its_turns_is_and_not_for_their_sum():
    (group,) = room.random_groups([2], prompt=4, response=10)
    group["loss_mask"][:] = torch.tensor([0] * 4 + [1] * 10)
    group["loss_mask"][0, 9] = 0  # a tool's token: turns of 5 and 4
    stats = stats_of(group, Task({}, 2, 1.0), largest=6)
    assert stats.lengths == [9, 10]
    assert stats.truncated == [False, True]


def prompts_of(shuffle):
    loader = StatefulDataLoader(list(range(10)), batch_size=4, shuffle=shuffle, drop_last=True, collate_fn=list)
    return Prompts(loader)


def test_prompts_come_in_the_order_of_the_data_without_end():
    prompts = prompts_of(False)
    assert [next(prompts) for _ in range(18)] == [*range(8), *range(8), 0, 1]
    assert len(prompts) == 2
    assert prompts.batch_size == 4
    assert next(iter(prompts)) == [0, 1, 2, 3]


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_checkpoint_gives_the_prompts_that_were_out_and_then_those_that_would_have_come(shuffle):
    torch.manual_seed(0)
    prompts = prompts_of(shuffle)
    taken_ = [next(prompts) for _ in range(6)]
    prompts.out = lambda: taken_[4:]
    state = prompts.state_dict()
    rest = [next(prompts) for _ in range(2)]
    again = prompts_of(shuffle)
    again.load_state_dict(state)
    assert [next(again) for _ in range(4)] == [*taken_[4:], *rest]
    other = prompts_of(shuffle)
    other.load_state_dict(state)
    assert next(other) == taken_[4]
    other.load_state_dict(prompts_of(shuffle)._loader.state_dict())  # of a run without us
    assert next(other) in range(10)


# --- members ------------------------------------------------------------------------------------------


class Scripted(RolloutWorkflow):
    """One episode after another from a list."""

    def __init__(self, episodes):
        self.episodes = iter(episodes)

    async def arun_episode(self, engine, data):
        one = next(self.episodes)
        if isinstance(one, Exception):
            raise one
        return one


class Named(RolloutWorkflow):
    """As an import path has it."""

    def __init__(self, rows):
        self.rows = rows

    async def arun_episode(self, engine, data):
        return room.random_groups([self.rows])[0]


def run(members):
    return asyncio.run(members.arun_episode(None, {}))


def test_failed_and_refused_members_are_left_out_and_an_episode_may_give_several_rows():
    one, two = room.random_groups([1, 2])
    told, finished = [], []
    script = Scripted([one, ValueError("no"), two, None])
    found = run(Members(script, 4, failed=told.append, done=lambda: finished.append(1)))
    assert len(found["rewards"]) == 3
    assert found["input_ids"].shape[1] == max(one["input_ids"].shape[1], two["input_ids"].shape[1])
    assert [str(error) for error in told] == ["no"]
    assert finished == [1]
    assert run(Members(Scripted([None, ValueError()]), 2)) is None


def test_interactions_of_agents_stay_what_they_are_for_areal():
    found = run(Members(Scripted([{"a": "first"}, {"b": "second"}, {}]), 3))
    assert found == {"a": "first", "b": "second"}


def test_a_controllers_workers_make_the_workflow_from_its_path():
    calls = []
    controller = SimpleNamespace(
        _resolve_workflow_str=lambda workflow: f"{workflow.__module__}.{workflow.__name__}",
        submit=lambda *args: calls.append(args) or 7,
    )
    assert _submit_path(controller, Named, {"rows": 2}, Task({"prompt": 1}, 3, 0.0)) == 7
    ((data, path, named),) = calls
    assert (data, path) == ({"prompt": 1}, "metronome_areal.members.Members")
    assert len(run(Members(**named))["rewards"]) == 6


# --- ranks --------------------------------------------------------------------------------------------


class Together:
    """``everywhere`` between threads."""

    def __init__(self, count):
        self.barrier = threading.Barrier(count, timeout=20)
        self.values = [None] * count

    def ranks(self, place):
        ranks = Ranks(group=self, place=place, places=len(self.values))

        def everywhere(value):
            self.values[place] = value
            self.barrier.wait()
            found = list(self.values)
            self.barrier.wait()
            return found

        ranks.everywhere = everywhere
        return ranks


def on_ranks(count, work):
    """``work(place, ranks)`` on each of ``count`` ranks; what they return or raise."""
    together, found = Together(count), [None] * count

    def one(place):
        try:
            found[place] = work(place, together.ranks(place))
        except Exception as error:
            found[place] = error

    threads = [threading.Thread(target=one, args=(place,)) for place in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_ranks_get_as_many_groups_and_each_group_once():
    groups = room.random_groups([4] * 7 + [1] * 4)
    ranks = [Ranks(group=object(), place=place, places=3) for place in range(3)]
    held = Counter()
    for part in (groups[:1], groups[1:3], groups[3:8], groups[8:]):
        shares = [one.share(part) for one in ranks]
        assert sorted(id(one) for share in shares for one in share) == sorted(map(id, part))
        for place, share in enumerate(shares):
            held[place] += len(share)
        assert max(held.values()) - min(held[place] for place in range(3)) <= 1
    for one in ranks:
        one.begin()
    assert len(ranks[0].share(groups[:1])) == 1  # a new period begins with the first again


def test_ranks_train_as_many_parts_and_wait_for_a_group_each():
    def work(place, ranks):
        flow, rollout = flow_of(Periodic())
        flow.open(0, 2, 3)
        parts = Parts(flow, ranks, 9)
        found, first = [], threading.Timer(0.1, rollout.finish, [0])
        if place == 0:
            first.start()
        threading.Timer(0.3, rollout.finish, [1, 2] if place == 0 else [0, 1, 2]).start()
        while (part := parts.next()) is not None:
            found.append([one["prompt"] for one in part])
        return found

    found = on_ranks(2, work)
    assert len(found[0]) == len(found[1]) >= 1
    assert all(part for part in found[0] + found[1])  # no rank is idle: six groups for two
    assert Counter(one for rank in found for part in rank for one in part) == {0: 2, 1: 2, 2: 2}


def test_a_part_with_fewer_groups_than_ranks_leaves_some_without():
    def work(place, ranks):
        flow, rollout = flow_of(Periodic())
        flow.open(0, 2, 1)
        if place == 1:
            flow = None  # one rank alone generates
        else:
            rollout.finish(0)
        parts = Parts(flow, ranks, 9)
        return [parts.next(), parts.next()]

    found = on_ranks(2, work)
    assert sorted(len(rank[0]) for rank in found) == [0, 1]
    assert [rank[1] for rank in found] == [None, None]


@pytest.mark.parametrize("error", [MetronomeError("a failure"), KeyError("a filter's")], ids=["ours", "a user's"])
def test_what_one_rank_raises_all_raise(error):
    def work(place, ranks):
        flow, rollout = flow_of(Periodic())

        def accept(group):
            if place == 1:
                raise error
            return True

        flow.accept = accept
        flow.open(0, 2, 2)
        rollout.finish(0)
        parts = Parts(flow, ranks, 9)
        while parts.next() is not None:
            pass

    found = on_ranks(2, work)
    assert all(isinstance(one, MetronomeError) for one in found)
    assert all(str(error) in str(one) for one in found)


def test_all_ranks_choose_the_same_g_from_everyones_groups_and_one_bubble():
    options = SagcOptions(sizes=(2, 4, 8), start=4, min_dwell=1, event="step_idle", idle_tau=0.5, eta=2.0)

    def work(place, ranks):
        controller = SagcController(options, seed=0)
        part = SimpleNamespace(owns_groups=True, selection=SimpleNamespace(group_controller=controller))
        flow, _ = flow_of(Periodic())
        actor = FlowActor(None, part, Parts(flow, ranks, 9), None, None)
        sizes = []
        for step in range(12):
            groups = room.random_groups([controller.size()] * 2, seed=100 * place + step)
            task = Task({}, controller.size(), 0.0, end=1.0 + place)
            flow.generated = [stats_of(group, task, 10) for group in groups]
            actor._close(0.9 if place == 0 else 0.2 if step < 6 else 0.0)
            sizes.append(controller.size())
        return sizes, controller.state_dict()

    found = on_ranks(2, work)
    assert found[0] == found[1]
    assert len(set(found[0][0])) > 1
    # Each rank with its own bubble would choose another.
    alone = []
    for place in range(2):
        controller = SagcController(options, seed=0)
        for step in range(12):
            groups = room.random_groups([controller.size()] * 2, seed=step)
            task = Task({}, controller.size(), 0.0, end=1.0)
            controller.observe(StepStats(step, [stats_of(one, task, 10) for one in groups], 0.9 * (1 - place)))
        alone.append(controller.state_dict()["lambda"])
    assert alone[0] != alone[1]


def test_a_controller_fills_a_part_up_to_a_group_for_every_worker():
    controller = MetronomeController.__new__(MetronomeController)
    calls = []
    controller.train_alloc = SimpleNamespace(parallel=SimpleNamespace(dp_size=4))
    controller._custom_function_call = lambda name, *args, **named: calls.append((name, args, named)) or args[0]
    groups = room.random_groups([4] * 6)
    filled = controller.metronome_level(groups)
    assert [one[MASKED] for one in filled] == [False] * 6 + [True] * 2
    assert len({tuple(sorted(one)) for one in filled}) == 1
    assert controller.metronome_part(filled) == filled
    assert controller.metronome_level([]) == controller.metronome_part([]) == []
    ((name, _, named),) = calls
    assert name == "metronome_part"
    assert named == {"rpc_meta": {"broadcast": True}}
    assert controller.metronome_here(groups) is groups
    assert controller.world_size == 1


def test_a_workers_part_leaves_out_what_the_controller_filled_up(tmp_path):
    from areal_engines import apart, in_parts, near, ours

    with ours(room.configuration(tmp_path)) as engine:
        groups = near(engine, room.random_groups([4, 4]))
        right = in_parts(engine, [groups])
        filled = [*({**one, MASKED: False} for one in groups), {**groups[0], MASKED: True}]
        assert apart(in_parts(engine, [filled]), right) < 1e-6
        assert apart(in_parts(engine, [[*groups, groups[0]]]), right) > 1e-2
        assert torch.isfinite(right).all()
