import json
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metronome.contracts import GroupController, GroupStats, StepStats
from metronome.errors import ConfigurationError
from metronome.sagc.controller import SagcController
from metronome.sagc.fixed import Fixed, FixedOptions
from metronome.sagc.options import SagcOptions, utility
from metronome.sagc.plugin import describe, group_controller


def group(size, straggles, rewards=None):
    lengths = [100] * (size - 1) + [300 if straggles else 100]
    return GroupStats(size, lengths, [False] * size, rewards or [0.0] * size, 0.0, 1.0)


def step(number, size, straggles, groups=2):
    return StepStats(number, [group(size, straggles)] * groups)


def sagc(seed=0, **options):
    return SagcController(SagcOptions(**options), seed)


def drive(controller, events, first=0):
    """Feeds one event a step to the current size; returns the sizes chosen."""
    sizes = []
    for number, straggles in enumerate(events, first):
        controller.observe(step(number, controller.size(), straggles))
        sizes.append(controller.size())
    return sizes


def wander(controller, steps, first=0):
    """Feeds events that depend on the size, so that the controller visits every one; returns the sizes."""
    sizes = []
    for number in range(first, first + steps):
        size = controller.size()
        straggles = size == 16 or (size == 8 and number % 3 > 0) or number % 10 == 0
        controller.observe(step(number, size, straggles))
        sizes.append(controller.size())
    return sizes


def test_the_defaults_are_the_documented_ones():
    assert SagcOptions().model_dump() == {
        "sizes": (4, 8, 16),
        "start": None,
        "event": "mean_ratio",
        "tau": 2.0,
        "idle_tau": 0.5,
        "delta": 0.3,
        "eta": 0.1,
        "lambda_start": 0.0,
        "lambda_max": 10.0,
        "gamma": 0.95,
        "prior": (1.0, 1.0),
        "neighbours": 1,
        "utility": "log2",
        "success_above": 0.0,
        "min_dwell": 5,
        "budget": "fixed_rollouts",
        "infeasible_after": 20,
    }
    assert sagc().size() == 16
    assert sagc(start=8).size() == 8
    assert sagc(start=4).largest() == 16


# --- the update -----------------------------------------------------------------------------------


def test_lambda_takes_one_dual_step_and_stays_in_its_range():
    controller = sagc(lambda_start=0.5)
    assert controller.observe(step(0, 16, True))["lambda"] == pytest.approx(0.5 + 0.1 * 0.7, rel=1e-12)
    assert controller.observe(step(1, 16, False))["lambda"] == pytest.approx(0.57 - 0.1 * 0.3, rel=1e-12)
    assert sagc().observe(step(0, 16, False))["lambda"] == 0.0
    assert sagc(lambda_start=10.0).observe(step(0, 16, True))["lambda"] == 10.0


def test_every_posterior_forgets_and_the_generating_size_learns():
    controller = sagc(gamma=0.5, prior=(1.0, 2.0))
    controller.observe(step(0, 16, True))
    controller.observe(step(1, 16, True))
    state = controller.state_dict()
    assert state["a"] == [1.0, 1.0, 1.0 + 0.5 * 1 + 1]
    assert state["b"] == [2.0, 2.0, 2.0]
    controller.observe(StepStats(2, [group(8, False)]))
    state = controller.state_dict()
    assert state["a"] == [1.0, 1.0, 1.0 + 0.5 * 1.5]
    assert state["b"] == [2.0, 3.0, 2.0]


def test_an_outcome_belongs_to_the_size_that_generated_it():
    controller = sagc()
    assert controller.size() == 16
    metrics = controller.observe(StepStats(0, [group(4, False), group(8, True)]))
    assert metrics["p/4"] == pytest.approx(1 / 3)
    assert metrics["p/8"] == pytest.approx(2 / 3)
    assert metrics["p/16"] == 0.5  # the current size generated nothing


def test_lambda_takes_the_event_of_all_groups():
    calm = sagc(lambda_start=1.0).observe(StepStats(0, [group(4, False)] * 3 + [group(8, True)]))
    assert (calm["straggler_ratio"], calm["straggler_rate"]) == (1.5, 0.0)
    assert calm["lambda"] == pytest.approx(0.97)
    wild = sagc(lambda_start=1.0).observe(StepStats(0, [group(4, False)] + [group(8, True)] * 3))
    assert (wild["straggler_ratio"], wild["straggler_rate"]) == (2.5, 1.0)
    assert wild["lambda"] == pytest.approx(1.07)


def test_a_step_without_responses_changes_nothing():
    controller = sagc()
    drive(controller, [True] * 7)
    before = json.dumps(controller.state_dict())
    for groups in ([], [GroupStats(8, [], [], [], 0.0, 0.0)]):
        metrics = controller.observe(StepStats(99, groups))
        assert "straggler_rate" not in metrics
        assert metrics["switched"] == 0.0
    assert json.dumps(controller.state_dict()) == before
    controller.observe(step(7, controller.size(), True))
    assert json.dumps(controller.state_dict()) != before


def test_groups_of_a_foreign_size_are_refused_before_anything_changes():
    controller = sagc()
    before = controller.state_dict()
    with pytest.raises(ConfigurationError, match=r"never chose; found 5; in GroupStats.size"):
        controller.observe(StepStats(0, [group(16, True), group(5, True)]))
    assert controller.state_dict() == before


def test_the_idle_event_compares_with_its_own_threshold():
    lengths = StepStats(0, [group(16, True)])  # 1 - mean/max = 0.625, ratio 3
    assert sagc(event="step_idle").observe(lengths)["straggler_rate"] == 1.0
    assert sagc(event="step_idle", idle_tau=0.7).observe(lengths)["straggler_rate"] == 0.0
    measured = StepStats(0, lengths.groups, bubble=0.1)
    assert sagc(event="step_idle").observe(measured)["straggler_rate"] == 0.0
    assert sagc(event="mean_ratio").observe(measured)["straggler_rate"] == 1.0


def test_a_measured_bubble_counts_for_every_size_in_the_step():
    groups = [group(4, False), group(8, False)]
    measured = sagc(event="step_idle").observe(StepStats(0, groups, bubble=0.9))
    assert measured["p/4"] == measured["p/8"] == pytest.approx(2 / 3)
    assert measured["p/16"] == 0.5
    by_length = sagc(event="step_idle").observe(StepStats(0, groups))
    assert by_length["p/4"] == by_length["p/8"] == pytest.approx(1 / 3)


def test_metrics_are_named_and_finite():
    metrics = sagc().observe(StepStats(0, [GroupStats(16, [0] * 16, [True] * 16, [1.0] * 16, 0.0, 1.0)]))
    assert set(metrics) == {
        "straggler_rate",
        "straggler_ratio",
        "idle",
        "truncation_rate",
        "lambda",
        "success_rate",
        "p/4",
        "p/8",
        "p/16",
        "group_size",
        "infeasible",
        "switched",
    }
    assert all(type(value) is float and math.isfinite(value) for value in metrics.values())
    assert metrics["truncation_rate"] == 1.0


# --- the decision ---------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.booleans(), min_size=1, max_size=120),
    st.integers(1, 8),
    st.integers(1, 3),
    st.sampled_from([0.05, 0.3, 0.9]),
    st.integers(0, 2**32),
)
def test_moves_respect_range_neighbourhood_and_dwell(events, min_dwell, neighbours, delta, seed):
    sizes = [2, 4, 8, 16, 32]
    controller = sagc(
        seed,
        sizes=sizes,
        start=8,
        min_dwell=min_dwell,
        neighbours=neighbours,
        delta=delta,
        lambda_max=2.0,
        infeasible_after=10**6,
    )
    since_move = 0
    for number, straggles in enumerate(events):
        before = controller.size()
        metrics = controller.observe(step(number, before, straggles))
        after = controller.size()
        since_move += 1
        assert 0.0 <= metrics["lambda"] <= 2.0
        assert after in sizes
        assert abs(sizes.index(after) - sizes.index(before)) <= neighbours
        assert metrics["switched"] == float(after != before)
        assert metrics["group_size"] == after
        if after != before:
            assert since_move >= min_dwell
            since_move = 0


def test_without_stragglers_the_size_climbs_to_the_largest():
    controller = sagc(start=4, min_dwell=3)
    assert drive(controller, [False] * 6) == [4, 4, 8, 8, 8, 16]
    assert set(drive(controller, [False] * 50)) == {16}


def test_with_stragglers_at_the_large_sizes_the_size_falls():
    controller = sagc(delta=0.1)
    sizes = []
    for number in range(300):
        controller.observe(step(number, controller.size(), controller.size() > 4))
        sizes.append(controller.size())
    assert sizes[:5] == [16] * 5
    assert sizes[150:].count(4) > 75


def test_the_same_seed_decides_the_same_and_another_seed_does_not():
    first = wander(sagc(3, delta=0.4), 200)
    assert wander(sagc(3, delta=0.4), 200) == first
    assert wander(sagc(4, delta=0.4), 200) != first


def test_explain_says_why_the_size_moved_was_held_or_kept():
    controller = sagc(min_dwell=3)
    assert controller.explain() == "G 16: the first size, no step observed yet"
    drive(controller, [True])
    assert controller.explain() == (
        "G 16 kept at step 0: straggler ratio 3.00 > 2.00, lambda 0.07, 1 of min_dwell 3 steps at this size"
    )
    seen = set()
    for number in range(1, 200):
        before = controller.size()
        controller.observe(step(number, before, before > 4))
        text = controller.explain()
        after = controller.size()
        if after != before:
            seen.add("moved")
            assert re.fullmatch(
                rf"G {before} -> {after} at step {number}: straggler ratio \d\.\d\d (>|<=) 2\.00, "
                rf"lambda \d+\.\d\d, straggler probability sampled as \d\.\d\d at {before} against \d\.\d\d at {after}",
                text,
            )
        elif "sampled" in text:
            seen.add("kept")
            assert text.startswith(f"G {before} kept at step {number}: ")
    assert seen == {"moved", "kept"}


# --- the fallback ---------------------------------------------------------------------------------


def test_an_infeasible_delta_falls_back_to_the_smallest_size_and_says_so():
    controller = sagc(lambda_start=10.0, infeasible_after=4, min_dwell=100)
    assert drive(controller, [True] * 3) == [16, 16, 16]
    metrics = controller.observe(step(3, 16, True))
    assert (controller.size(), metrics["infeasible"], metrics["switched"]) == (4, 1.0, 1.0)
    assert controller.explain().startswith(
        "G 16 -> 4 at step 3: no size meets delta 0.3, lambda 10.00 against a cap of 10.0 and posterior p"
    )
    assert set(drive(controller, [True] * 200, first=4)) == {4}


def test_the_fallback_ends_when_the_smallest_size_meets_delta():
    controller = sagc(lambda_start=10.0, infeasible_after=4, min_dwell=1)
    drive(controller, [True] * 4)
    for number in range(4, 60):
        metrics = controller.observe(step(number, 4, False))
        assert metrics["infeasible"] == float(metrics["p/4"] > 0.3)
        if not metrics["infeasible"]:
            break
        assert controller.size() == 4
    assert metrics["infeasible"] == 0.0
    assert metrics["lambda"] > 9.0  # lambda keeps its own law


def test_lambda_at_its_cap_is_no_infeasibility_while_the_smallest_size_meets_delta():
    controller = sagc(start=4, lambda_start=10.0, infeasible_after=4, min_dwell=1, gamma=1.0)
    for number in range(20):
        # the event of all (ratio 7/3) keeps lambda at its cap; the smallest size's own posterior is low
        metrics = controller.observe(StepStats(number, [group(4, False), group(16, True), group(16, True)]))
        assert metrics["lambda"] == 10.0
        assert metrics["infeasible"] == 0.0


def test_one_step_without_stragglers_does_not_restart_the_count():
    steady = sagc(lambda_start=10.0, infeasible_after=4, min_dwell=100)
    drive(steady, [True, True, False, True])
    assert steady.size() == 4
    broken = sagc(lambda_start=10.0, infeasible_after=4, min_dwell=100, eta=1.0, delta=0.4)
    drive(broken, [True, False, False, False])  # lambda 10, 9.6, 9.2, 8.8: the last is more than eta below
    assert broken.size() == 16


# --- the utility ----------------------------------------------------------------------------------


def test_the_dapo_utility_discounts_groups_that_would_be_filtered():
    assert utility("log2", 8) == 3.0
    p, size = 0.18, 4
    mixed = 1 - p**size - (1 - p) ** size
    assert utility("dapo", size, p) == pytest.approx(2 + math.log2(mixed), rel=1e-12)
    gain = utility("dapo", 16, p) - utility("dapo", 4, p)
    assert gain > utility("log2", 16) - utility("log2", 4)


@pytest.mark.parametrize("rate", [0.0, 1.0, 1e-300, 1 - 1e-16])
@pytest.mark.parametrize("size", [2, 4, 64])
def test_the_dapo_utility_is_finite_at_both_ends(rate, size):
    assert math.isfinite(utility("dapo", size, rate))
    assert utility("dapo", 2 * size, rate) > utility("dapo", size, rate)


def test_the_success_rate_counts_generated_groups_and_forgets():
    controller = sagc(gamma=0.5)
    metrics = controller.observe(StepStats(0, [group(4, False, [1.0] * 4), group(4, False, [0.0] * 4)]))
    assert metrics["success_rate"] == (1 + 4) / (2 + 8)
    metrics = controller.observe(StepStats(1, [group(4, False, [0.2, 0.0, 0.0, -1.0])]))
    assert metrics["success_rate"] == (1 + 2 + 1) / (2 + 4 + 4)
    strict = sagc(utility="dapo", success_above=0.5).observe(StepStats(0, [group(4, False, [0.2, 1.0, 0.0, 0.0])]))
    assert strict["success_rate"] == (1 + 1) / (2 + 4)


def test_the_dapo_utility_keeps_groups_larger_when_success_is_rare():
    def mean_size(kind):
        controller = sagc(utility=kind, delta=0.4, min_dwell=1)
        sizes = []
        for number in range(600):
            size = controller.size()
            straggles = size == 16 or (size == 8 and number % 3 > 0) or number % 10 == 0
            rewards = [float(number % 10 == 0)] + [0.0] * (size - 1)
            controller.observe(StepStats(number, [group(size, straggles, rewards)]))
            sizes.append(size)
        return sum(sizes) / len(sizes), controller.state_dict()["lambda"]

    (plain, plain_lambda), (dapo, dapo_lambda) = mean_size("log2"), mean_size("dapo")
    # the constraint holds the rate, so the larger utility shows as a larger price
    assert dapo_lambda > 1.2 * plain_lambda
    assert dapo > plain


# --- the state ------------------------------------------------------------------------------------


def test_a_restored_controller_makes_the_same_200_decisions():
    saved = sagc(seed=1, delta=0.4, min_dwell=2)
    wander(saved, 100)
    state = json.loads(json.dumps(saved.state_dict()))
    restored = sagc(seed=2, delta=0.4, min_dwell=2)
    restored.load_state_dict(state)
    assert restored.explain() == saved.explain()
    expected = wander(saved, 200, first=100)
    assert wander(restored, 200, first=100) == expected
    assert set(expected) == {4, 8, 16}
    assert restored.state_dict() == saved.state_dict()

    other = sagc(seed=2, delta=0.4, min_dwell=2)  # the same but for the sampler's state
    other.load_state_dict({**state, "random": other.state_dict()["random"]})
    assert wander(other, 200, first=100) != expected


def test_a_state_of_other_sizes_is_refused_and_leaves_the_controller_as_it_was():
    controller = sagc()
    before = controller.state_dict()
    with pytest.raises(ConfigurationError, match=r"sagc: \{sizes: \[2, 4\]\}"):
        controller.load_state_dict(sagc(sizes=[2, 4]).state_dict())
    with pytest.raises(ConfigurationError, match="lacks a, b"):
        controller.load_state_dict({"size": 8})
    with pytest.raises(ConfigurationError, match="can't be read"):
        controller.load_state_dict({**before, "index": 0, "lambda": 3.0, "random": {"bit_generator": "other"}})
    assert controller.state_dict() == before


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"index": 3}, "index 3 isn't one of 3 sizes"),
        ({"index": -1}, "index -1"),
        ({"index": math.inf}, "OverflowError"),
        ({"a": [1.0, 1.0]}, "a must hold 3"),
        ({"b": [1.0] * 4}, "b must hold 3"),
        ({"a": [1.0, 0.0, 1.0]}, "a must hold 3 finite positive"),
        ({"b": [1.0, math.nan, 1.0]}, "b must hold 3 finite positive"),
        ({"b": [1.0, math.inf, 1.0]}, "b must hold 3 finite positive"),
        ({"lambda": -0.1}, "between 0 and lambda_max 10.0"),
        ({"lambda": 10.5}, "between 0 and lambda_max 10.0"),
        ({"lambda": math.nan}, "between 0 and lambda_max 10.0"),
        ({"successes": math.nan}, "are no rate"),
        ({"successes": 5.0, "rollouts": 4.0}, "are no rate"),
        ({"successes": 1.0, "rollouts": math.inf}, "are no rate"),
        ({"dwell": -1}, "must count up from 0"),
    ],
)
def test_a_state_that_cannot_be_true_is_refused_and_leaves_the_controller_as_it_was(wrong, message):
    saved = sagc()
    wander(saved, 30)
    state, controller = saved.state_dict(), sagc()
    before = controller.state_dict()
    with pytest.raises(ConfigurationError, match=message):
        controller.load_state_dict({**state, **wrong})
    assert controller.state_dict() == before
    controller.load_state_dict(state)
    assert controller.state_dict() == state


# --- the options ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, message",
    [
        ({"sizes": [1, 4]}, "group-relative advantage needs at least 2"),
        ({"sizes": [8]}, "group_controller: fixed"),
        ({"sizes": [8, 8]}, "at least 2 sizes"),
        ({"sizes": [16, 4, 8]}, r"sizes: \[4, 8, 16\]"),
        ({"start": 5}, r"start must be one of sizes: \[4, 8, 16\] \(found 5\)"),
        ({"event": "any"}, "mean_ratio"),
        ({"tau": 1.0}, "tau: above 1"),
        ({"tau": math.nan}, "metronome.sagc.tau"),
        ({"idle_tau": 1.0}, "idle_tau: below 1"),
        ({"event": "step_idle", "tau": 3.0}, "set idle_tau instead, or event: mean_ratio"),
        ({"idle_tau": 0.6}, "set tau instead, or event: step_idle"),
        ({"success_above": 0.5}, "utility: dapo"),
        ({"delta": 0.0}, "delta: above 0"),
        ({"delta": 1.0}, "delta: below 1"),
        ({"eta": 0.0}, "eta: above 0"),
        ({"eta": 10.0}, "eta must be below lambda_max: 10.0"),
        ({"lambda_start": 11.0}, "lambda_start must not exceed lambda_max: 10.0"),
        ({"gamma": 1.1}, "gamma: 1 or less"),
        ({"prior": [0.0, 1.0]}, "both positive"),
        ({"neighbours": 0}, "metronome.sagc.neighbours"),
        ({"min_dwell": 0}, "metronome.sagc.min_dwell"),
        ({"infeasible_after": 0}, "metronome.sagc.infeasible_after"),
        ({"budget": "fixed"}, "fixed_rollouts"),
        ({"lamda_max": 3}, "use 'lambda_max'"),
    ],
)
def test_options_that_cannot_be_true_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        group_controller("sagc", options, 0)


def test_options_that_have_an_effect_are_taken():
    assert group_controller("sagc", {"tau": 3.0}, 0).size() == 16
    assert group_controller("sagc", {"event": "step_idle", "idle_tau": 0.4}, 0).size() == 16
    assert group_controller("sagc", {"utility": "dapo", "success_above": 0.5}, 0).size() == 16


def test_a_group_of_one_is_refused_with_the_reason():
    with pytest.raises(ConfigurationError, match="group-relative advantage needs at least 2"):
        group_controller("fixed", {"size": 1}, 0)
    assert group_controller("fixed", {"size": 2}, 0).size() == 2


# --- fixed and the plug-in ------------------------------------------------------------------------


def test_fixed_never_moves():
    controller = Fixed(FixedOptions(size=8))
    assert set(drive(controller, [True] * 20)) == {8}
    assert controller.explain() == "G 8: fixed by the settings"
    assert controller.observe(step(0, 8, True)) == {
        "group_size": 8.0,
        "straggler_ratio": 3.0,
        "truncation_rate": 0.0,
    }
    assert controller.observe(StepStats(1, [])) == {"group_size": 8.0}


def test_fixed_refuses_the_state_of_another_size():
    with pytest.raises(ConfigurationError, match=r"fixed: \{size: 16\}"):
        Fixed(FixedOptions(size=8)).load_state_dict(Fixed(FixedOptions(size=16)).state_dict())


def test_the_plugin_hands_its_seed_on():
    first, other = (wander(group_controller("sagc", {"delta": 0.4}, seed), 200) for seed in (3, 4))
    assert first == wander(sagc(3, delta=0.4), 200)
    assert first != other


def test_the_plugin_answers_only_to_its_own_names():
    assert group_controller("other", {}, 0) is None
    for offer in describe():
        built = group_controller(offer.name, {}, 0)
        assert isinstance(built, GroupController)
        assert built.name == offer.name
