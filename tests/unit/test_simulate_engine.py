"""The engines of the cluster model against a brute-force computation."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from metronome.simulate import Cluster, Group, Policy, Recorded, simulate


def cluster(**changes):
    values = {
        "engines": {
            "count": 2,
            "slots": 3,
            "decode": {"kind": "law", "tokens_per_second": 50, "half": 3},
            "prefill_seconds_per_token": 0.0,
        },
        "trainer": {"ranks": 1, "seconds_per_token": 1e-3},
        "lengths": {"kind": "lognormal", "median": 100, "sigma": 0.5, "cap": 10_000},
        "prompts_per_step": 4,
        "group_size": 2,
        "prompt_tokens": 10,
        "steps": 1,
    }
    return Cluster(**{**values, **changes})


def brute_force(lengths, engines, slots, rate, prefill, single=bool):
    """Seconds at which each rollout ends: every running sequence is moved on from event to event, one by one.

    ``lengths`` in tokens in the order of dispatch, ``prefill`` seconds of each prompt, ``rate(running)`` tokens/s.
    ``single`` is told whether one engine alone ends a rollout at a moment: several take the waiting ones in an order
    that rounding decides.
    """
    now, waiting, ends = 0.0, list(range(len(lengths))), {}
    prefilling = [[] for _ in range(engines)]  # [rollout, seconds left], only the first of them moves on
    running = [{} for _ in range(engines)]  # rollout -> tokens left

    def occupied(index):
        return len(prefilling[index]) + len(running[index])

    while len(ends) < len(lengths):
        while waiting and min(map(occupied, range(engines))) < slots:
            target = min(range(engines), key=lambda index: (occupied(index), index))
            rollout = waiting.pop(0)
            if prefill:
                prefilling[target].append([rollout, prefill])
            else:
                running[target][rollout] = float(lengths[rollout])
        events = []
        for index in range(engines):
            if prefilling[index]:
                events.append((prefilling[index][0][1], index, None))
            for rollout, left in running[index].items():
                events.append((left / rate(len(running[index])), index, rollout))
        seconds, engine, ending = min(events, key=lambda event: event[0])
        ends_at = [left for left, other, rollout in events if rollout is not None and other != engine]
        single(ending is None or all(left - seconds > 1e-9 * (now + left) for left in ends_at))
        for index in range(engines):
            if prefilling[index]:
                prefilling[index][0][1] -= seconds
            speed = rate(len(running[index])) if running[index] else 0.0
            for rollout in running[index]:
                running[index][rollout] -= seconds * speed
        now += seconds
        if ending is None:
            rollout, _ = prefilling[engine].pop(0)
            running[engine][rollout] = float(lengths[rollout])
        else:
            del running[engine][ending]
            ends[ending] = now
    return [ends[rollout] for rollout in range(len(lengths))]


lengths_of_groups = st.lists(st.integers(1, 1_000_000), min_size=2, max_size=14, unique=True).map(
    lambda found: found[: len(found) // 2 * 2]
)
curves = st.one_of(
    st.tuples(st.floats(1.0, 200.0), st.floats(0.5, 50.0)).map(
        lambda pair: {"kind": "law", "tokens_per_second": pair[0], "half": pair[1]}
    ),
    st.tuples(st.floats(20.0, 200.0), st.floats(1.0, 20.0)).map(
        lambda pair: {"kind": "points", "points": [[1, pair[0]], [3, pair[0] / 2 + 1], [8, pair[1] / 2]]}
    ),
)


def simulated(lengths, engines, slots, curve, prefill):
    model = cluster(
        engines={"count": engines, "slots": slots, "decode": curve, "prefill_seconds_per_token": prefill / 10},
        prompts_per_step=len(lengths) // 2,
    )
    groups = [Group(10, (lengths[i], lengths[i + 1])) for i in range(0, len(lengths), 2)]
    return model, simulate(model, Policy(source="synchronous"), lengths=Recorded([groups]))


@settings(deadline=None, max_examples=200)
@given(lengths_of_groups, st.integers(1, 3), st.integers(1, 6), curves, st.sampled_from([0.0, 0.37, 91.0]))
def test_every_rollout_ends_when_a_brute_force_computation_says(lengths, engines, slots, curve, prefill):
    model, outcome = simulated(lengths, engines, slots, curve, prefill)
    expected = brute_force(lengths, engines, slots, model.engines.decode.rate, prefill, single=assume)
    assert sorted(outcome.steps[0].rollout_seconds) == pytest.approx(sorted(expected), rel=1e-9)
    groups = [max(expected[i : i + 2]) for i in range(0, len(expected), 2)]
    assert list(outcome.steps[0].arrivals) == pytest.approx(sorted(groups), rel=1e-9)


@pytest.mark.parametrize("prefill", [0.0, 0.37])
def test_the_brute_force_computation_would_see_a_wrong_speed_or_a_missing_prefill(prefill):
    lengths = [500, 300, 900, 110, 640, 77]
    curve = {"kind": "law", "tokens_per_second": 50, "half": 3}
    model, outcome = simulated(lengths, 2, 2, curve, prefill)
    alone = brute_force(lengths, 2, 2, lambda running: model.engines.decode.rate(1), prefill)
    other = brute_force(lengths, 2, 2, model.engines.decode.rate, prefill + 0.01)
    found = sorted(outcome.steps[0].rollout_seconds)
    assert found != pytest.approx(sorted(alone), rel=1e-2)
    assert found != pytest.approx(sorted(other), rel=1e-6)


def test_a_curve_by_points_is_straight_between_them():
    points = cluster(
        engines={"count": 1, "slots": 10, "decode": {"kind": "points", "points": [[2, 60], [6, 20], [10, 10]]}}
    ).engines.decode
    assert [points.rate(running) for running in (1, 2, 4, 6, 8, 10)] == [60, 60, 40, 20, 15, 10]


def test_the_law_halves_the_speed_at_half():
    law = cluster().engines.decode
    assert law.rate(3) == 25.0
    assert law.rate(9) == 12.5


def test_busy_spans_and_idle_shares_are_those_of_the_brute_force():
    lengths = [500, 300, 900, 110, 640, 77]
    curve = {"kind": "points", "points": [[1, 10]]}
    _, outcome = simulated(lengths, 1, 2, curve, 0.0)
    slot_seconds = sum(lengths) / 10
    generation = outcome.steps[0].generation
    assert outcome.slots_idle == pytest.approx(1 - slot_seconds / (2 * outcome.seconds), rel=1e-9)
    assert outcome.rollout_idle == pytest.approx(1 - generation / outcome.seconds, rel=1e-9)
    spans = [(span.start, span.end) for span in outcome.spans if span.lane == "engine 0"]
    assert spans == [(0.0, pytest.approx(generation))]


def test_the_tail_is_that_of_the_rollouts():
    _, outcome = simulated([100, 200, 300, 400, 500, 2000], 3, 2, {"kind": "points", "points": [[1, 10]]}, 0.0)
    step = outcome.steps[0]
    assert sorted(step.rollout_seconds) == pytest.approx([10, 20, 30, 40, 50, 200])
    assert step.tail_ratio == pytest.approx(200 / 35)
    assert step.tail_seconds == pytest.approx(200 - (50 + 0.75 * 150))
