"""The closed form of a period's time against a simulated serial trainer, and its bound."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metronome.errors import MetronomeError
from metronome.periodic.closed_form import periodic_seconds, speed_bound, synchronous_seconds

SECONDS = st.floats(0, 50)
GROUPS = st.lists(st.tuples(SECONDS, SECONDS), max_size=12)


def simulate(groups, step, publish):
    """A serial trainer that takes the groups in turn and waits for each."""
    clock = 0.0
    for arrival, work in groups:
        clock = max(clock, arrival) + work
    return clock + step + publish


@given(GROUPS, SECONDS, SECONDS)
@settings(deadline=None, max_examples=200)
def test_the_closed_form_is_what_a_serial_trainer_takes(groups, step, publish):
    arrivals, work = [one[0] for one in groups], [one[1] for one in groups]
    assert periodic_seconds(arrivals, work, step, publish) == pytest.approx(simulate(groups, step, publish), rel=1e-12)
    last = max(arrivals, default=0.0)
    all_at_once = [(last, one) for one in work]
    assert synchronous_seconds(arrivals, work, step, publish) == pytest.approx(
        simulate(all_at_once, step, publish), rel=1e-12
    )


@given(GROUPS.filter(bool))
@settings(deadline=None, max_examples=200)
def test_periodic_lies_between_synchronous_and_its_bound(groups):
    groups = sorted(groups)
    arrivals, work = [one[0] for one in groups], [one[1] for one in groups]
    generation, training = arrivals[-1], sum(work)
    slow, fast = synchronous_seconds(arrivals, work), periodic_seconds(arrivals, work)
    assert fast <= slow * (1 + 1e-12)
    if max(generation, training) > 0.0:
        bound = speed_bound(generation, training)
        assert 1.0 <= bound <= 2.0
        assert slow <= bound * fast * (1 + 1e-12)


def test_grain_decides_how_much_of_the_bound_is_reached():
    """Evenly spaced groups, T_i = T_t: the gain is 2n / (n + 1)."""
    for groups in (1, 4, 64):
        arrivals = [(place + 1) / groups for place in range(groups)]
        work = [1 / groups] * groups
        gain = synchronous_seconds(arrivals, work) / periodic_seconds(arrivals, work)
        assert gain == pytest.approx(2 * groups / (groups + 1), rel=1e-12)


def test_the_bound_is_two_for_equal_halves_and_one_without_overlap():
    assert speed_bound(3.0, 3.0) == 2.0
    assert speed_bound(3.0, 0.0) == 1.0


@pytest.mark.parametrize(
    "call",
    [
        lambda: periodic_seconds([1.0], []),
        lambda: periodic_seconds([1.0], [-1.0]),
        lambda: synchronous_seconds([float("nan")], [1.0]),
        lambda: speed_bound(-1.0, 1.0),
        lambda: speed_bound(0.0, 0.0),
    ],
)
def test_times_that_cannot_be_true_are_refused(call):
    with pytest.raises(MetronomeError):
        call()
