"""The timeline's arithmetic: who was busy when, and what is left."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_records import laid_run, made

from metronome.observe.lanes import REST, UNNAMED, lanes_of, union
from metronome.observe.records import Rollout, RunRecord, Span, Step

# A busy machine may take its time with the first example.
without_deadline = settings(deadline=None)
STRETCHES = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 10)), max_size=12)


def seconds_of(stretches):
    """Whole seconds that are covered, of stretches with whole bounds."""
    pairs = zip(stretches.starts.astype(int).tolist(), stretches.ends.astype(int).tolist(), strict=True)
    return [second for start, end in pairs for second in range(start, end)]


@without_deadline
@given(STRETCHES)
def test_a_union_covers_each_second_once(raw):
    merged = union([start for start, _ in raw], [start + length for start, length in raw])
    covered = {second for start, length in raw for second in range(start, start + length)}
    assert seconds_of(merged) == sorted(covered)
    assert all(merged.starts[1:] > merged.ends[:-1])


@without_deadline
@given(STRETCHES, STRETCHES)
def test_the_complement_is_what_the_stretches_leave_of_the_windows(raw, frames):
    busy = union([start for start, _ in raw], [start + length for start, length in raw])
    windows = union([start for start, _ in frames], [start + length for start, length in frames])
    left = busy.complement(windows)
    assert seconds_of(left) == sorted(set(seconds_of(windows)) - set(seconds_of(busy)))
    frame = zip(windows.starts.astype(int).tolist(), windows.ends.astype(int).tolist(), strict=True)
    inside = [len(set(range(start, end)) & set(seconds_of(busy))) for start, end in frame]
    assert busy.within(windows).tolist() == inside


def test_stretches_become_one_up_to_the_gap_and_not_beyond():
    assert len(union([0.0, 1.5], [1.0, 2.0], gap=0.5).starts) == 1
    assert len(union([0.0, 1.5], [1.0, 2.0], gap=0.4).starts) == 2


def test_idle_shares_are_what_the_lanes_leave():
    lanes = lanes_of(made())
    trainer, worker = lanes.lanes
    assert (trainer.name, worker.name) == ("trainer", "worker 0")
    assert trainer.idle_share == pytest.approx(0.25, abs=1e-12)
    assert worker.idle_share == pytest.approx(1 - 1.5 / 4, abs=1e-12)  # two overlapping groups are busy once
    assert worker.in_flight == pytest.approx(8 * 1.0 / 1.5, abs=1e-12)
    assert lanes.trainer_idle == pytest.approx({0: 0.25, 1: 0.25}, abs=1e-12)
    assert lanes.worker_idle == pytest.approx({0: 0.625, 1: 0.625}, abs=1e-12)
    assert trainer.idle.starts.tolist() == [0.0, 4.0]
    assert worker.idle.ends.tolist() == [4.0, 8.0]


def test_a_workers_spans_stand_for_its_rollouts():
    run = made()
    spanned = made(
        spans=(*run.spans, Span("worker 0", "generate", 0.0, 4.0, 0), Span("worker 0", "generate", 4.0, 8.0, 1))
    )
    assert lanes_of(spanned).lanes[1].idle_share == 0.0
    assert lanes_of(run).lanes[1].idle_share > 0.5


def test_time_between_the_steps_is_not_idle():
    steps = (Step(0, 2.0), Step(1, 2.0))
    spans = (Span("trainer", "train", 0.0, 2.0, 0), Span("trainer", "train", 11.0, 12.0, 1))
    lanes = lanes_of(RunRecord("gap", "local", None, steps, spans=spans))
    assert lanes.windows.starts.tolist() == [0.0, 10.0]
    assert lanes.lanes[0].idle_share == pytest.approx(1 / 4, abs=1e-12)  # over all 12 s it would be 3/4
    assert lanes.lanes[0].idle.starts.tolist() == [10.0]


def test_steps_without_the_trainers_spans_begin_with_their_rollouts():
    rollouts = (Rollout(0, "a", 3, start=0.0, end=1.0), Rollout(1, "a", 3, start=2.5, end=4.5))
    lanes = lanes_of(RunRecord("no trainer", "csv", None, (Step(0, 2.0), Step(1, 3.0)), rollouts))
    assert [lane.name for lane in lanes.lanes] == [UNNAMED]
    assert lanes.windows.starts.tolist() == [0.0, 2.5]
    assert lanes.windows.ends.tolist() == [2.0, 5.5]
    assert lanes.lanes[0].idle_share == pytest.approx(2 / 5, abs=1e-12)


def test_no_clock_time_is_no_lane():
    assert lanes_of(RunRecord("bare", "verl", None, (Step(0, 2.0),), (Rollout(0, "a", 3),))) is None


def test_lanes_stand_in_natural_order_with_the_trainer_first():
    names = ["worker 10", "worker 2", "trainer", "engine 1"]
    spans = tuple(Span(name, "other", 0.0, 1.0, 0) for name in names)
    lanes = lanes_of(RunRecord("order", "local", None, (Step(0, 1.0),), spans=spans))
    assert [lane.name for lane in lanes.lanes] == ["trainer", "engine 1", "worker 2", "worker 10"]


def test_covered_counts_from_the_beginning():
    stretches = union([1.0, 3.0], [2.0, 5.0])
    assert stretches.covered(np.array([0.0, 1.5, 2.5, 4.0, 9.0])).tolist() == [0.0, 0.5, 1.0, 2.0, 3.0]


def test_steps_laid_end_to_end_have_all_their_seconds_and_what_no_part_names_is_no_idle_time_of_the_trainer():
    lanes = lanes_of(laid_run())
    assert (lanes.windows.starts.tolist(), lanes.windows.ends.tolist()) == ([0.0, 10.0], [10.0, 20.0])
    trainer, worker = lanes.lanes
    assert (trainer.idle_share, worker.idle_share) == pytest.approx((0.3, 0.7), abs=1e-12)
    rest = trainer.kinds[REST]
    assert (rest.starts.tolist(), rest.ends.tolist()) == ([5.0, 15.0], [10.0, 20.0])
    assert REST not in worker.kinds
    clocked = lanes_of(replace(laid_run(), laid=False))  # a clock's spans: a step ends with the trainer's last one
    assert clocked.windows.ends.tolist() == [5.0, 15.0]
    assert REST not in clocked.lanes[0].kinds


def test_parts_that_fill_their_steps_leave_nothing_unnamed_to_rounding():
    spans, begin = [], 0.0
    for number in range(3):
        spans += [
            Span("rollout", "generate", begin, begin + 0.1, number),
            Span("trainer", "train", begin + 0.1, begin + 0.1 + 0.2, number),
        ]
        begin += 0.3
    run = RunRecord("full", "openrlhf", None, tuple(Step(n, 0.3) for n in range(3)), spans=tuple(spans), laid=True)
    assert len(lanes_of(run).lanes[0].kinds[REST].starts) == 0
