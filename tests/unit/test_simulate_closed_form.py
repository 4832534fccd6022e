"""The simulated schedules against the closed form of metronome.periodic, and the figures that follow from it."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metronome.periodic.closed_form import periodic_seconds, speed_bound, synchronous_seconds
from metronome.simulate import Cluster, Policy, simulate


def cluster(**changes):
    values = {
        "engines": {"count": 3, "slots": 4, "decode": {"kind": "law", "tokens_per_second": 40, "half": 5}},
        "trainer": {"ranks": 2, "seconds_per_token": 4e-3, "efficiency": 0.9, "optimizer_seconds": 1.5},
        "lengths": {"kind": "lognormal", "median": 200, "sigma": 0.7, "cap": 2000},
        "prompts_per_step": 12,
        "group_size": 4,
        "prompt_tokens": 50,
        "publication_seconds": 2.5,
        "steps": 3,
    }
    return Cluster(**{**values, **changes})


clusters = st.builds(
    lambda seed, prompts, slots, cost, fixed, depth: cluster(
        seed=seed,
        prompts_per_step=prompts,
        engines={"count": 3, "slots": slots, "decode": {"kind": "law", "tokens_per_second": 40, "half": 5}},
        trainer={"ranks": 2, "seconds_per_token": cost, "seconds_per_group": fixed, "optimizer_seconds": 1.5},
        queue_depth=depth,
    ),
    st.integers(0, 10_000),
    st.integers(1, 20),
    st.integers(1, 8),
    st.sampled_from([1e-4, 2e-3, 2e-2, 0.2]),
    st.sampled_from([0.0, 0.3, 7.0]),
    st.sampled_from([None, 1, 3]),
)


@settings(deadline=None, max_examples=60)
@given(clusters)
def test_a_periodic_step_takes_what_the_closed_form_says_of_its_own_arrivals(model):
    for step in simulate(model, Policy(source="periodic")).steps:
        expected = periodic_seconds(step.arrivals, step.work, step.optimizer, step.publication)
        assert step.seconds == pytest.approx(expected, rel=1e-9)


@settings(deadline=None, max_examples=60)
@given(clusters)
def test_a_synchronous_step_takes_what_the_closed_form_says_of_its_own_arrivals(model):
    for step in simulate(model, Policy(source="synchronous")).steps:
        expected = synchronous_seconds(step.arrivals, step.work, step.optimizer, step.publication)
        assert step.seconds == pytest.approx(expected, rel=1e-9)


def test_seconds_of_a_group_are_part_of_the_work_that_the_closed_form_needs():
    trainer = {"ranks": 2, "seconds_per_token": 4e-3, "seconds_per_group": 3.0}
    step = simulate(cluster(trainer=trainer), Policy(source="periodic")).steps[0]
    assert step.seconds == pytest.approx(periodic_seconds(step.arrivals, step.work, 0.0, 2.5), rel=1e-9)
    tokens_alone = [seconds - 3.0 for seconds in step.work]
    assert step.seconds > 1.05 * periodic_seconds(step.arrivals, tokens_alone, 0.0, 2.5)


def test_the_other_schedules_formula_and_shuffled_arrivals_do_not_fit():
    step = simulate(cluster(), Policy(source="periodic")).steps[0]
    assert step.seconds < 0.95 * synchronous_seconds(step.arrivals, step.work, step.optimizer, step.publication)
    shuffled = random.Random(0).sample(step.arrivals, len(step.arrivals))
    assert step.seconds != pytest.approx(
        periodic_seconds(shuffled, step.work, step.optimizer, step.publication), rel=1e-3
    )


@settings(deadline=None, max_examples=30)
@given(clusters)
def test_periodic_is_never_slower_than_synchronous_nor_faster_than_its_bound(model):
    model = model.model_copy(update={"queue_depth": None})
    # The first steps begin at one moment. Later ones begin at another in each run, and then rounding decides which of
    # two engines that end a rollout at the same time takes the next one.
    before, after = (simulate(model, Policy(source=name), steps=1).steps[0] for name in ("synchronous", "periodic"))
    assert before.generation == after.generation
    bound = speed_bound(before.generation, sum(before.work))
    assert after.seconds <= before.seconds * (1 + 1e-12)
    assert before.seconds / after.seconds <= bound * (1 + 1e-12) <= 2 * (1 + 1e-12)


def balanced_gain(prompts, seed):
    """Synchronous over periodic with 256 slots, groups of 8, sigma .6, and training as long as generation."""

    def model(cost):
        return cluster(
            engines={"count": 1, "slots": 256, "decode": {"kind": "points", "points": [[1, 1000]]}},
            trainer={"ranks": 1, "seconds_per_token": cost},
            lengths={"kind": "lognormal", "median": 10_000, "sigma": 0.6, "cap": 1_000_000},
            prompts_per_step=prompts,
            group_size=8,
            prompt_tokens=1,
            publication_seconds=0.0,
            steps=1,
            seed=seed,
        )

    trial = simulate(model(1e-3), Policy(source="synchronous")).steps[0]
    balanced = model(1e-3 * trial.generation / trial.training)
    slow, fast = (simulate(balanced, Policy(source=name)) for name in ("synchronous", "periodic"))
    assert slow.steps[0].training == pytest.approx(slow.steps[0].generation, rel=1e-9)
    return slow.seconds / fast.seconds


@pytest.mark.parametrize("prompts, gain, repeats", [(64, 1.69, 20), (256, 1.80, 10), (1024, 1.92, 5)])
def test_the_balanced_gains_of_finer_and_finer_grain_come_out(prompts, gain, repeats):
    found = [balanced_gain(prompts, seed) for seed in range(repeats)]
    print(f"{prompts} x 8: {np.mean(found):.3f} +- {np.std(found) / len(found) ** 0.5:.3f}")
    assert np.mean(found) == pytest.approx(gain, abs=0.02)
    assert max(found) < 2.0


def test_coarse_grain_gains_nothing():
    model = cluster(
        engines={"count": 1, "slots": 256, "decode": {"kind": "points", "points": [[1, 1000]]}},
        lengths={"kind": "lognormal", "median": 1000, "sigma": 0.0, "cap": 1000},
        steps=1,
    )
    slow, fast = (simulate(model, Policy(source=name)) for name in ("synchronous", "periodic"))
    assert slow.seconds == pytest.approx(fast.seconds, rel=1e-12)


def test_with_perfect_scaling_and_free_resharding_no_split_beats_the_colocated_run():
    model = cluster(
        engines={"count": 8, "slots": 1, "decode": {"kind": "points", "points": [[1, 100]]}},
        trainer={"ranks": 8, "seconds_per_token": 0.01},
        lengths={"kind": "lognormal", "median": 100, "sigma": 0.2, "cap": 200},
        prompts_per_step=400,
        publication_seconds=0.0,
        steps=1,
    )
    colocated = simulate(model, Policy(source="synchronous_colocated"))
    gains = [
        colocated.seconds / simulate(model.with_split(engines, 16 - engines), Policy()).seconds
        for engines in range(1, 16)
    ]
    assert 0.9 < max(gains) <= 1.0
    dear = simulate(model.model_copy(update={"resharding_seconds": 20.0}), Policy(source="synchronous_colocated"))
    assert dear.seconds / colocated.seconds * max(gains) > 1.05


def test_with_a_tail_periodic_beats_even_a_free_colocated_run():
    model = cluster(
        engines={"count": 8, "slots": 16, "decode": {"kind": "law", "tokens_per_second": 40, "half": 16}},
        trainer={"ranks": 8, "seconds_per_token": 2e-3},
        lengths={"kind": "lognormal", "median": 200, "sigma": 0.8, "cap": 4000},
        prompts_per_step=64,
        publication_seconds=0.0,
    )
    colocated = simulate(model, Policy(source="synchronous_colocated"))
    fastest = min(simulate(model.with_split(engines, 16 - engines), Policy()).seconds for engines in range(1, 16))
    assert colocated.seconds > 1.02 * fastest


def test_a_bound_of_zero_is_periodic_and_makes_progress():
    model = cluster()
    assert simulate(model, Policy(source="bounded", max_staleness=0)).steps == simulate(model, Policy()).steps
    assert simulate(model, Policy(source="bounded", max_staleness=1)).steps != simulate(model, Policy()).steps


def test_four_times_the_devices_and_prompts_train_nearly_four_times_as_many_tokens():
    def model(scale):
        return cluster(
            engines={"count": 8 * scale, "slots": 32, "decode": {"kind": "law", "tokens_per_second": 60, "half": 32}},
            trainer={"ranks": 8 * scale, "seconds_per_token": 1e-3, "efficiency": 0.97},
            prompts_per_step=128 * scale,
            group_size=8,
        )

    small, large = (simulate(model(scale), Policy(source="periodic")) for scale in (1, 4))
    assert 3.6 < large.tokens_per_second / small.tokens_per_second <= 4.05
