"""The group stream: nothing lost, nothing trained twice, no slot leaked, no wait without end."""

from __future__ import annotations

import json
import random
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metronome.contracts import Verdict
from metronome.errors import (
    ConfigurationError,
    MetronomeError,
    VersionMismatch,
    WaitTimeout,
    WorkerFailed,
)
from metronome.periodic.ledger import RETRIES
from metronome.periodic.sources import Bounded, Periodic, Synchronous
from metronome.periodic.stream import Aborted, GroupStream, Ticket


@dataclass(frozen=True)
class Group:
    index: int
    version: int


class Workers:
    """Futures that the test completes by hand, in the order of ``rank``; one thread, no waiting."""

    def __init__(self, source, *, rank=lambda index: index, future=Future, **options):
        self.rank, self.future, self.out, self.sent, self.most = rank, future, {}, [], 0
        options.setdefault("timeout", 0.05)
        self.stream = GroupStream(source, str, self.generate, lambda group: [group.version], **options)
        self.source = source

    def generate(self, ticket: Ticket) -> Future:
        assert ticket.prompt == str(ticket.index)
        assert ticket.index not in self.out, "a prompt is out twice"
        self.out[ticket.index] = ticket, self.future()
        self.sent.append(ticket)
        flow = self.stream.flow()
        self.most = max(self.most, flow.running + flow.queued + flow.trained)
        return self.out[ticket.index][1]

    def finish(self, index=None, *, version=None, error=None):
        index = min(self.out, key=self.rank) if index is None else index
        ticket, future = self.out.pop(index)
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(Group(index, ticket.version if version is None else version))

    def arrivals(self):
        """The stream's arrivals, with groups finished one by one whenever the trainer would wait."""
        while True:
            while self.out and self._idle(self.stream.flow()):
                self.finish()
            sent = len(self.sent)
            try:
                arrival = next(self.stream.arrivals(), None)
            except WaitTimeout:
                if len(self.sent) == sent:
                    raise
                continue  # what was queued was dropped and sent out again
            if arrival is None:
                return
            yield arrival

    def _idle(self, flow):
        return not self.source.period_complete(flow) and not self.source.release(flow)

    def period(self, version, batch, unwanted=frozenset()):
        self.stream.open_period(version, batch)
        for arrival in self.arrivals():
            assert arrival.group.index == arrival.ticket.index
            if arrival.ticket.index in unwanted:
                self.stream.filter(arrival)
        return self.stream.close_period()


RUNS = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 5),
        "total": st.one_of(st.none(), st.integers(0, 17)),
        "unwanted": st.frozensets(st.integers(0, 16), max_size=9),
        "orders": st.tuples(st.integers(0, 999), st.integers(0, 999)),
        "periods": st.integers(1, 4),
    }
)


def shuffled(seed):
    return lambda index: random.Random(1000 * seed + index).random()


@given(RUNS)
@settings(deadline=None, max_examples=150)
def test_every_period_trains_the_same_set_whatever_the_order_and_the_filter(run):
    trained = []
    for source, seed in zip((Synchronous(), Periodic()), run["orders"], strict=True):
        workers = Workers(source, rank=shuffled(seed), total=run["total"])
        reports = [workers.period(version, run["batch"], run["unwanted"]) for version in range(run["periods"])]
        trained.append([set(report.indices) for report in reports])
        every = [index for report in reports for index in report.indices]
        assert len(every) == len(set(every)), "an index was trained twice"
        assert not set(every) & run["unwanted"]
        assert workers.most <= run["batch"]
        assert [ticket.index for ticket in workers.sent] == list(range(len(workers.sent)))
        flow = workers.stream.flow()
        assert (flow.running, flow.queued, flow.trained) == (0, 0, 0), "a slot leaked"
    assert trained[0] == trained[1]
    wanted = (index for index in range(run["total"] or 1000) if index not in run["unwanted"])
    if run["total"] is None:
        for period in trained[0]:
            assert period == {next(wanted) for _ in range(run["batch"])}


@given(RUNS, st.integers(0, 3))
@settings(deadline=None, max_examples=100)
def test_bounded_never_exceeds_its_window_or_its_staleness_and_trains_all(run, bound):
    total = 17 if run["total"] is None else run["total"]
    workers = Workers(Bounded(bound), rank=shuffled(run["orders"][0]), total=total, timeout=0.001)
    version, trained = 0, []
    while not workers.stream.exhausted():
        report = workers.period(version, run["batch"], run["unwanted"])
        trained += report.indices
        assert report.trained == len(report.indices) <= run["batch"]
        version += 1
    assert sorted(trained) == [index for index in range(total) if index not in run["unwanted"]]
    assert workers.most <= (bound + 1) * run["batch"]
    assert not workers.out


def test_groups_are_yielded_in_order_of_arrival_and_sent_in_order_of_index():
    workers = Workers(Periodic(), rank=lambda index: -index)
    assert workers.period(0, 4).indices == (3, 2, 1, 0)
    assert [ticket.index for ticket in workers.sent] == [0, 1, 2, 3]


def test_synchronous_yields_nothing_before_the_last_arrival():
    workers = Workers(Synchronous())
    workers.stream.open_period(0, 3)
    workers.finish()
    workers.finish()
    with pytest.raises(WaitTimeout, match="1 were running: prompts 2 at version 0"):
        next(workers.stream.arrivals())
    workers.finish()
    assert len(list(workers.stream.arrivals())) == 3


@pytest.mark.parametrize("source", [Synchronous(), Periodic(), Bounded(1)], ids=lambda source: source.name)
def test_the_last_batch_may_be_short_and_the_stream_is_then_exhausted(source):
    workers = Workers(source, total=5)
    assert workers.period(0, 3).trained == 3
    assert not workers.stream.exhausted()
    report = workers.period(1, 3, unwanted={4})
    assert (report.batch, report.trained, report.filtered, report.indices) == (3, 1, 1, (3,))
    assert workers.stream.exhausted()
    assert workers.period(2, 3).trained == 0


def test_a_filtered_group_is_refilled_one_for_one_at_the_same_version():
    workers = Workers(Periodic())
    report = workers.period(4, 3, unwanted={0, 2, 3})
    assert report.indices == (1, 4, 5)
    assert report.filtered == 3
    assert {ticket.version for ticket in workers.sent} == {4}


def test_a_whole_batch_can_be_taken_first_and_filtered_afterwards():
    workers = Workers(Synchronous())
    workers.stream.open_period(0, 3)
    for arrival in list(workers.arrivals())[::2]:
        workers.stream.filter(arrival)
    assert [arrival.ticket.index for arrival in workers.arrivals()] == [3, 4]
    assert workers.stream.close_period().indices == (1, 3, 4)


def test_filtering_twice_or_after_the_period_is_refused():
    workers = Workers(Periodic())
    workers.stream.open_period(0, 1)
    first = next(workers.arrivals())
    workers.stream.filter(first)
    assert list(workers.out) == [1], "the refill goes out at once, not when the next group is asked for"
    with pytest.raises(MetronomeError, match="once"):
        workers.stream.filter(first)
    second = next(workers.arrivals())
    workers.stream.close_period()
    with pytest.raises(MetronomeError, match="no period is open"):
        workers.stream.filter(second)
    workers.stream.open_period(1, 1)
    with pytest.raises(MetronomeError, match="open period handed out"):
        workers.stream.filter(second)


def test_a_stale_group_is_dropped_and_its_prompt_goes_out_again_at_the_current_version():
    workers = Workers(Bounded(1))
    workers.stream.open_period(0, 2)  # sends 0..3
    workers.finish(2)
    workers.finish(3)
    assert [arrival.ticket.index for arrival in workers.stream.arrivals()] == [2, 3]
    workers.stream.close_period()
    workers.stream.open_period(1, 2)  # sends 4, 5
    workers.finish(4)
    workers.finish(5)
    list(workers.stream.arrivals())
    workers.stream.close_period()
    workers.stream.open_period(2, 2)
    workers.finish(0)  # sampled at version 0, staleness 2
    workers.finish(1, version=1)
    assert next(workers.arrivals()).ticket.index == 1
    assert workers.out[0][0] == Ticket(0, "0", version=2, attempt=1)
    workers.finish(0)
    list(workers.stream.arrivals())
    report = workers.stream.close_period()
    assert (report.dropped, report.indices) == (1, (1, 0))


def test_an_aborted_group_goes_out_again_at_the_version_then_open():
    workers = Workers(Bounded(1))
    workers.stream.open_period(0, 1)
    workers.finish(0)
    list(workers.stream.arrivals())
    workers.stream.close_period()
    workers.finish(1, error=Aborted("published version 1"))
    assert 1 not in workers.out, "nothing goes out between periods"
    workers.stream.open_period(1, 1)
    assert workers.out[1][0] == Ticket(1, "1", version=1, attempt=1)
    workers.finish(1)
    list(workers.stream.arrivals())
    report = workers.stream.close_period()
    assert (report.aborted, report.indices) == (1, (1,))


@pytest.mark.parametrize(
    ("why", "outcome"), [("aborted", {"error": Aborted("worker restarts")}), ("dropped", {"version": 4})]
)
def test_a_prompt_that_never_comes_back_right_ends_in_an_error_not_in_a_loop(why, outcome):
    workers = Workers(Bounded(0), timeout=0.001)
    workers.stream.open_period(5, 1)
    for _ in range(RETRIES - 1):
        workers.finish(0, **outcome)
        with pytest.raises(WaitTimeout):
            next(workers.stream.arrivals())
    workers.finish(0, **outcome)
    with pytest.raises(WorkerFailed, match=f"{why} {RETRIES} times"):
        next(workers.stream.arrivals())
    assert [ticket.attempt for ticket in workers.sent] == list(range(RETRIES))
    assert workers.stream.flow().running == 0


def test_retries_are_counted_within_one_period():
    workers = Workers(Bounded(1))
    for version in range(3):
        workers.stream.open_period(version, 1)
        for _ in range(RETRIES - 1):
            workers.finish(0, error=Aborted("published"))
        workers.finish(version + 1)
        assert len(list(workers.stream.arrivals())) == 1
        assert workers.stream.close_period().aborted == RETRIES - 1


def test_futures_that_are_done_at_once_neither_recurse_nor_spin():
    def generate(ticket):
        future = Future()
        if ticket.index % 50 == 7 and ticket.attempt < 3:
            future.set_exception(Aborted())
        else:
            future.set_result(Group(ticket.index, ticket.version))
        return future

    stream = GroupStream(Periodic(), str, generate, lambda group: [group.version], timeout=1.0)
    stream.open_period(0, 3000)
    assert len(list(stream.arrivals())) == 3000
    report = stream.close_period()
    assert (report.trained, report.aborted) == (3000, 180)


def test_an_error_of_a_future_is_raised_in_the_trainer_and_its_prompt_is_not_lost():
    workers = Workers(Periodic())
    workers.stream.open_period(0, 2)
    workers.finish(0, error=WorkerFailed("out of memory", where="worker 1"))
    assert workers.stream.flow().running == 1, "the slot came back"
    with pytest.raises(WorkerFailed, match="out of memory; in worker 1"):
        next(workers.stream.arrivals())
    assert {arrival.ticket.index for arrival in workers.arrivals()} == {0, 1}
    assert sorted(workers.stream.close_period().indices) == [0, 1]
    assert [(ticket.index, ticket.attempt) for ticket in workers.sent] == [(0, 0), (1, 0), (0, 1)]


@pytest.mark.parametrize("where", ["prompt_at", "generate", "versions_of"])
def test_an_error_of_each_callable_is_raised_in_the_trainer_and_its_prompt_is_not_lost(where):
    faults = {where: 1}

    def may_fail(name):
        if faults.pop(name, 0):
            raise ValueError(f"{name} is ill")

    def prompt_at(index):
        may_fail("prompt_at")
        return index

    def generate(ticket):
        may_fail("generate")
        future = Future()
        future.set_result(ticket)
        return future

    def versions_of(group):
        may_fail("versions_of")
        return [group.version]

    stream = GroupStream(Periodic(), prompt_at, generate, versions_of, total=3, timeout=0.05)
    stream.open_period(0, 3)
    with pytest.raises(ValueError, match=f"{where} is ill"):
        list(stream.arrivals())
    list(stream.arrivals())
    assert sorted(stream.close_period().indices) == [0, 1, 2]


def test_a_lasting_error_is_raised_every_time_and_never_loops_inside():
    def generate(ticket):
        raise OSError("no worker")

    stream = GroupStream(Periodic(), str, generate, lambda group: [0], timeout=0.05)
    stream.open_period(0, 2)
    for _ in range(3):
        with pytest.raises(OSError, match="no worker"):
            next(stream.arrivals())
    assert stream.flow().running == 0


def test_an_error_of_the_source_reaches_the_trainer():
    class Faulty(Periodic):
        def capacity(self, flow):
            raise RuntimeError("the source is ill")

    workers = Workers(Faulty())
    workers.stream.open_period(0, 1)
    with pytest.raises(RuntimeError, match="the source is ill"):
        next(workers.stream.arrivals())


def test_an_interrupt_while_sending_leaves_the_stream_usable():
    def generate(ticket):
        if not interrupts:
            interrupts.append(ticket.index)
            raise KeyboardInterrupt
        future = Future()
        future.set_result(ticket)
        return future

    interrupts = []
    stream = GroupStream(Periodic(), str, generate, lambda group: [group.version], timeout=0.05)
    with pytest.raises(KeyboardInterrupt):
        stream.open_period(0, 2)
    assert sorted(arrival.ticket.index for arrival in stream.arrivals()) == [0, 1]


def test_a_group_of_another_version_raises_naming_prompt_and_versions():
    workers = Workers(Periodic())
    workers.stream.open_period(3, 2)
    workers.finish(1, version=2)
    with pytest.raises(VersionMismatch, match=r"trains version 3.*sampled at version 2.*prompt 1"):
        next(workers.stream.arrivals())
    assert {arrival.ticket.index for arrival in workers.arrivals()} == {0, 1}


class Twice(Future):
    """A future that reports its completion twice."""

    def add_done_callback(self, fn):
        super().add_done_callback(fn)
        super().add_done_callback(fn)


def test_a_group_that_arrives_twice_raises():
    workers = Workers(Periodic(), future=Twice)
    workers.stream.open_period(0, 1)
    workers.finish(0)
    with pytest.raises(MetronomeError, match="arrived twice; found 0"):
        next(workers.stream.arrivals())


def test_an_error_after_the_last_group_is_raised_at_the_end_of_the_period():
    workers = Workers(Periodic())
    workers.stream.open_period(0, 1)
    ticket, future = workers.out[0]
    workers.finish(0)
    list(workers.stream.arrivals())
    workers.stream._arrived(ticket, future)  # as a host does whose future reports late and again
    with pytest.raises(MetronomeError, match="arrived twice"):
        workers.stream.close_period()
    assert workers.stream.close_period().indices == (0,)


def test_a_cancelled_future_is_an_error_that_names_the_way_out():
    workers = Workers(Periodic())
    workers.stream.open_period(0, 1)
    workers.out.pop(0)[1].cancel()
    with pytest.raises(WorkerFailed, match=r"cancelled; found 0.*Aborted"):
        next(workers.stream.arrivals())


def test_a_wait_names_what_is_awaited():
    workers = Workers(Bounded(1), describe=lambda: "worker 0 decodes 3 groups, worker 1 is idle")
    workers.stream.open_period(7, 1)
    with pytest.raises(WaitTimeout) as caught:
        next(workers.stream.arrivals())
    message = str(caught.value)
    for part in (
        "in 0.05 s",
        "2 were running",
        "0 at version 7, 1 at version 7",
        "worker 1 is idle",
        "period 7",
    ):
        assert part in message


def test_each_arrival_restarts_the_timeout():
    workers = Workers(Synchronous(), timeout=0.4)
    workers.stream.open_period(0, 4)
    timers = [threading.Timer(0.2 * (index + 1), workers.finish, (index,)) for index in range(4)]
    for timer in timers:
        timer.start()
    assert len(list(workers.stream.arrivals())) == 4  # 0.8 s in all


def test_a_source_that_admits_nothing_is_named_at_once():
    class Shut(Periodic):
        def capacity(self, flow):
            return 0

    workers = Workers(Shut(), timeout=60.0)
    workers.stream.open_period(0, 1)
    with pytest.raises(MetronomeError, match="admits and releases nothing"):
        next(workers.stream.arrivals())


def test_a_period_cannot_close_early_or_with_groups_under_way():
    workers = Workers(Periodic())
    workers.stream.open_period(0, 2)
    with pytest.raises(MetronomeError, match="isn't complete"):
        workers.stream.close_period()

    class Ahead(Periodic):
        def capacity(self, flow):
            return 2 * flow.batch - flow.running - flow.queued - flow.trained

    workers = Workers(Ahead())
    workers.stream.open_period(0, 2)
    list(workers.arrivals())
    with pytest.raises(MetronomeError, match=r"may not span versions.*found \[2, 3\]"):
        workers.stream.close_period()


def test_periods_are_opened_one_at_a_time_with_rising_versions():
    workers = Workers(Periodic())
    with pytest.raises(MetronomeError, match="no period is open"):
        next(workers.stream.arrivals())
    with pytest.raises(MetronomeError, match="batch of at least 1"):
        workers.stream.open_period(0, 0)
    workers.stream.open_period(2, 1)
    with pytest.raises(MetronomeError, match="still open"):
        workers.stream.open_period(3, 1)
    list(workers.arrivals())
    workers.stream.close_period()
    with pytest.raises(MetronomeError, match="doesn't fall"):
        workers.stream.open_period(1, 1)


def test_the_report_measures_arrivals_and_waits_on_the_given_clock():
    now = [100.0]
    workers = Workers(Bounded(1), clock=lambda: now[0])
    workers.stream.open_period(0, 2)
    for index in range(3):
        now[0] += 1.5
        workers.finish(index)
    list(workers.stream.arrivals())
    report = workers.stream.close_period()
    assert (report.arrivals, report.waits) == ((1.5, 3.0), 0.0)
    now[0] += 10.0
    workers.stream.open_period(1, 2)
    now[0] += 0.5
    workers.finish(3)
    list(workers.stream.arrivals())
    report = workers.stream.close_period()
    assert report.indices == (2, 3)
    assert report.arrivals == (0.0, 0.5)  # group 2 had been waiting

    workers = Workers(Periodic(), timeout=5.0)
    workers.stream.open_period(0, 1)
    threading.Timer(0.1, workers.finish).start()
    list(workers.stream.arrivals())
    assert 0.05 < workers.stream.close_period().waits < 4.0


@given(RUNS, st.integers(0, 2), st.integers(0, 3))
@settings(deadline=None, max_examples=100)
def test_every_prompt_is_trained_once_over_a_resume(run, bound, stop):
    total = 17
    source = Bounded(bound) if bound else Periodic()
    workers = Workers(source, rank=shuffled(run["orders"][0]), total=total, timeout=0.001)
    trained, version = [], 0
    for _ in range(stop):
        trained += workers.period(version, run["batch"], run["unwanted"]).indices
        version += 1
    saved = json.loads(json.dumps(workers.stream.state_dict()))
    workers.stream.open_period(version, run["batch"])  # killed in this period
    resumed = Workers(Bounded(bound) if bound else Periodic(), rank=shuffled(run["orders"][1]), total=total)
    resumed.stream.load_state_dict(saved)
    while not resumed.stream.exhausted():
        trained += resumed.period(version, run["batch"], run["unwanted"]).indices
        version += 1
    assert sorted(trained) == [index for index in range(total) if index not in run["unwanted"]]
    assert [ticket.index for ticket in resumed.sent[: len(saved["pending"])]] == saved["pending"]
    assert resumed.stream.state_dict()["totals"]["trained"] == len(trained)


def test_state_is_refused_inside_a_period_and_on_a_used_stream():
    workers = Workers(Bounded(1))
    fresh = workers.stream.state_dict()
    workers.stream.open_period(0, 1)
    with pytest.raises(MetronomeError, match="period 0 is open"):
        workers.stream.state_dict()
    list(workers.arrivals())
    workers.stream.close_period()
    assert workers.stream.state_dict()["pending"] == [1]  # running
    workers.finish(1)
    assert workers.stream.flow().queued == 1
    assert workers.stream.state_dict()["pending"] == [1]  # finished and waiting
    with pytest.raises(MetronomeError, match="only a new stream"):
        workers.stream.load_state_dict(fresh)


@pytest.mark.parametrize(
    "changes",
    [
        {"pending": [5]},
        {"pending": [1, 1]},
        {"pending": [-1]},
        {"pending": None},
        {"next_index": "3"},
        {"source": {}},
    ],
)
def test_a_state_that_cannot_be_true_is_refused(changes):
    state = Workers(Periodic()).stream.state_dict() | {"next_index": 3, "pending": [1, 2]}
    Workers(Periodic()).stream.load_state_dict(state)
    with pytest.raises(ConfigurationError):
        Workers(Periodic()).stream.load_state_dict(state | changes)


def test_close_cancels_forgets_and_can_be_repeated():
    workers = Workers(Bounded(1))
    workers.period(0, 1)
    _, running = workers.out[1]
    workers.stream.close()
    workers.stream.close()
    assert running.cancelled()
    assert workers.stream.state_dict()["pending"] == [1]
    with pytest.raises(MetronomeError, match="has been closed"):
        workers.stream.open_period(1, 1)
    with pytest.raises(MetronomeError, match="has been closed"):
        next(workers.stream.arrivals())


def test_close_ends_although_a_future_cannot_be_cancelled():
    class Stubborn(Future):
        def cancel(self):
            raise RuntimeError("no")

    workers = Workers(Periodic(), future=Stubborn)
    workers.stream.open_period(0, 2)
    workers.stream.close()
    workers.finish()  # arrives too late: ignored
    assert workers.stream.flow().queued == 0


def test_close_wakes_a_waiting_trainer_with_an_error():
    workers = Workers(Periodic(), timeout=30.0)
    workers.stream.open_period(0, 1)
    threading.Timer(0.05, workers.stream.close).start()
    started = time.monotonic()
    with pytest.raises(MetronomeError, match="has been closed"):
        next(workers.stream.arrivals())
    assert time.monotonic() - started < 10.0


def test_a_prompt_that_is_being_sent_while_the_stream_closes_is_cancelled():
    sending, go_on, futures = threading.Event(), threading.Event(), []

    def generate(ticket):
        sending.set()
        assert go_on.wait(10.0)
        futures.append(Future())
        return futures[-1]

    stream = GroupStream(Periodic(), str, generate, lambda group: [0], timeout=10.0)
    opener = threading.Thread(target=stream.open_period, args=(0, 3))
    opener.start()
    assert sending.wait(10.0)
    stream.close()
    go_on.set()
    opener.join(10.0)
    assert not opener.is_alive()
    assert [future.cancelled() for future in futures] == [True]


@pytest.mark.parametrize("source", [Synchronous(), Periodic(), Bounded(2)], ids=lambda source: source.name)
def test_real_threads_train_every_prompt_once_with_failures_and_aborts(source):
    chance = random.Random(3)
    published, inside = [0], threading.Lock()

    def work(ticket):
        time.sleep(chance.random() * 0.002)
        if ticket.index % 11 == 3 and ticket.attempt == 0:
            raise Aborted("restart")
        if ticket.index % 17 == 5 and ticket.attempt == 0:
            raise WorkerFailed("killed")
        return Group(ticket.index, published[0])

    def generate(ticket):
        assert inside.acquire(blocking=False), "generate was called twice at a time"
        try:
            return pool.submit(work, ticket)
        finally:
            inside.release()

    with ThreadPoolExecutor(4) as pool:
        stream = GroupStream(source, str, generate, lambda group: [group.version], total=120, timeout=20.0)
        with closing(stream):
            trained, filtered, failures, aborted = [], set(), 0, 0
            while not stream.exhausted():
                stream.open_period(published[0], 16)
                while True:
                    try:
                        for arrival in stream.arrivals():
                            if arrival.ticket.index % 7 == 0:
                                filtered.add(arrival.ticket.index)
                                stream.filter(arrival)
                        report = stream.close_period()
                        break
                    except WorkerFailed:
                        failures += 1
                trained += report.indices
                aborted += report.aborted
                published[0] += 1
    assert sorted(trained) == [index for index in range(120) if index % 7]
    assert filtered == set(range(0, 120, 7))
    assert failures == len(range(5, 120, 17))
    assert aborted == len(range(3, 120, 11))


def test_a_filter_that_is_ignored_would_change_the_trained_set():
    """The negative control of the property above: without refill the sets differ."""

    class NoRefill(Periodic):
        def period_complete(self, flow):
            return flow.trained + filtered >= flow.batch

        def capacity(self, flow):
            return max(0, super().capacity(flow) - filtered)

    filtered = 0
    workers = Workers(NoRefill())
    workers.stream.open_period(0, 3)
    for arrival in workers.arrivals():
        if arrival.ticket.index == 1:
            filtered += 1
            workers.stream.filter(arrival)
    assert workers.stream.close_period().indices == (0, 2)
    assert Workers(Periodic()).period(0, 3, unwanted={1}).indices == (0, 2, 3)


def test_a_verdict_that_fails_does_not_lose_the_prompt():
    class Faulty(Bounded):
        calls = 0

        def verdict(self, versions, training_version):
            self.calls += 1
            if self.calls == 1:
                raise RuntimeError("the source is ill")
            return Verdict.TRAIN

    workers = Workers(Faulty(0))
    workers.stream.open_period(0, 1)
    workers.finish(0)
    with pytest.raises(RuntimeError, match="the source is ill"):
        next(workers.stream.arrivals())
    with pytest.raises(WaitTimeout):
        next(workers.stream.arrivals())  # sends the prompt out again
    workers.finish(0)
    assert [arrival.ticket.index for arrival in workers.stream.arrivals()] == [0]
