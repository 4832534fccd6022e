"""What the cluster model promises of every policy: nothing lost, bounds kept, costs as stated."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metronome.errors import ConfigurationError
from metronome.shared_prompt.cost import attention_ratio, token_ratio
from metronome.simulate import Cluster, Group, Policy, Recorded, simulate
from metronome.simulate.policy import default_policies
from metronome.simulate.split import best_split


def cluster(**changes):
    values = {
        "engines": {"count": 3, "slots": 4, "decode": {"kind": "law", "tokens_per_second": 40, "half": 5}},
        "trainer": {"ranks": 2, "seconds_per_token": 4e-3, "optimizer_seconds": 0.5},
        "lengths": {"kind": "lognormal", "median": 200, "sigma": 0.7, "cap": 2000},
        "prompts_per_step": 6,
        "group_size": 4,
        "prompt_tokens": 50,
        "publication_seconds": 1.5,
        "steps": 6,
    }
    return Cluster(**{**values, **changes})


POLICIES = [
    *default_policies(),
    Policy(source="bounded", max_staleness=0),
    Policy(source="bounded", max_staleness=1),
    Policy(source="bounded", max_staleness=4),
    Policy(group_controller="sagc", sagc={"budget": "fixed_prompts", "min_dwell": 1, "eta": 1.0}),
]


@pytest.mark.parametrize("policy", POLICIES, ids=[policy.label() for policy in POLICIES])
@settings(deadline=None, max_examples=15)
@given(
    seed=st.integers(0, 1000),
    sigma=st.sampled_from([0.0, 0.5, 1.5]),
    depth=st.sampled_from([None, 1, 4]),
    between=st.sampled_from([None, 20.0, 200.0]),
)
def test_nothing_is_lost_and_nothing_staler_than_the_bound_is_trained(policy, seed, sigma, depth, between):
    failures = None if between is None else {"mean_seconds_between": between, "seconds_to_return": 5.0}
    lengths = {"kind": "lognormal", "median": 60, "sigma": sigma, "cap": 600}
    model = cluster(seed=seed, lengths=lengths, queue_depth=depth, failures=failures, steps=4)
    outcome = simulate(model, policy)
    assert outcome.dispatched == outcome.trained + outcome.dropped + outcome.unfinished
    assert outcome.trained == sum(step.prompts for step in outcome.steps)
    assert outcome.dropped == sum(step.dropped for step in outcome.steps)
    assert sum(outcome.staleness.values()) == outcome.rollouts
    assert set(outcome.staleness) <= set(range(policy.bound + 1))
    if policy.bound == 0:
        assert outcome.unfinished == outcome.dropped == 0
    for step in outcome.steps:
        assert len(step.rollout_seconds) == step.rollouts
        parts = step.waiting + step.training + step.proximal + step.optimizer + step.publication + step.resharding
        assert step.seconds == pytest.approx(parts, rel=1e-9)
    for share in (outcome.rollout_idle, outcome.slots_idle, outcome.trainer_idle):
        assert -1e-9 <= share <= 1


def test_each_prompt_is_trained_once_though_engines_fail():
    model = cluster(failures={"mean_seconds_between": 40.0, "seconds_to_return": 10.0})
    calm, failing = simulate(cluster(), Policy()), simulate(model, Policy())
    assert failing.restarted > 0 == calm.restarted
    assert failing.seconds > calm.seconds
    for before, after in zip(calm.steps, failing.steps, strict=True):
        assert sorted(before.work) == pytest.approx(sorted(after.work), rel=1e-12)


def test_stale_groups_are_dropped_counted_and_sent_out_again():
    lengths = Recorded([[Group(10, (5000, 10)), *(Group(10, (10, 10)) for _ in range(5))]])
    outcome = simulate(cluster(steps=40, group_size=2), Policy(source="bounded", max_staleness=1), lengths=lengths)
    assert outcome.dropped > 0
    assert outcome.dispatched == outcome.trained + outcome.dropped + outcome.unfinished


def test_long_groups_are_dropped_most():
    model = cluster(steps=60, lengths={"kind": "lognormal", "median": 100, "sigma": 1.2, "cap": 5000})
    fast, slow = (simulate(model, Policy(source="bounded", max_staleness=bound)) for bound in (1, 0))
    assert fast.dropped > 0 == slow.dropped
    tokens = [sum(step.response_tokens for step in outcome.steps) / outcome.rollouts for outcome in (fast, slow)]
    assert tokens[0] < 0.95 * tokens[1]


@pytest.mark.parametrize("prefill, prompt_tokens", [(0.0, 10), (2.0, 200)])
def test_rollouts_under_way_stand_still_during_a_publication(prefill, prompt_tokens):
    steady = {"count": 1, "slots": 8, "decode": {"kind": "points", "points": [[1, 10]]}}
    lengths = Recorded([[Group(10, (10, 10))], [Group(prompt_tokens, (1000, 1000))], [Group(10, (90000, 90000))]])
    ends = []
    for seconds in (0.0, 5.0):
        model = cluster(
            engines={**steady, "prefill_seconds_per_token": prefill},
            prompts_per_step=1,
            group_size=2,
            publication_seconds=seconds,
            steps=2,
        )
        step = simulate(model, Policy(source="bounded", max_staleness=1), lengths=lengths).steps[1]
        ends.append(step.start + step.arrivals[0])
        assert step.staleness == {1: 2}
    # Two prompts of 10 tokens and two of the other are prefilled one after the other, then 1000 tokens at 10 a second.
    assert ends[0] == pytest.approx(2 * prefill * (10 + prompt_tokens) + 100, rel=1e-9)
    assert ends[1] == pytest.approx(ends[0] + 5, rel=1e-9)


def test_a_looser_bound_lets_staler_groups_in():
    found = [simulate(cluster(), Policy(source="bounded", max_staleness=bound)) for bound in (1, 3)]
    assert max(found[0].staleness) == 1
    assert max(found[1].staleness) > 1


def test_a_full_queue_keeps_rollouts_from_beginning():
    slow = {"ranks": 1, "seconds_per_token": 0.1}
    free, full = (
        simulate(cluster(trainer=slow, queue_depth=depth, prompts_per_step=24), Policy()) for depth in (None, 1)
    )
    assert max(full.steps[0].arrivals) > 2 * max(free.steps[0].arrivals)
    assert sorted(full.steps[0].work) == pytest.approx(sorted(free.steps[0].work))
    synchronous = [simulate(cluster(queue_depth=depth), Policy(source="synchronous")) for depth in (None, 1)]
    assert synchronous[0] == synchronous[1]


# --- costs --------------------------------------------------------------------------------------------


def test_separate_rows_cost_their_tokens_over_the_speed_of_the_ranks():
    trainer = {"ranks": 5, "seconds_per_token": 0.01, "efficiency": 0.5}
    lengths = Recorded([[Group(100, (30, 50))]])
    step = simulate(cluster(trainer=trainer, prompts_per_step=1, group_size=2), Policy(), lengths=lengths).steps[0]
    assert step.trained_tokens == 280
    assert step.training == pytest.approx(0.01 * 280 / 3.0, rel=1e-12)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_shared_prompt_saves_by_the_cost_ratios(share):
    trainer = {"ranks": 1, "seconds_per_token": 0.01, "attention_share": share}
    model = cluster(trainer=trainer, prompts_per_step=1, group_size=8)
    lengths = Recorded([[Group(16384, (64,) * 8)]])
    rows, shared = (
        simulate(model, Policy(shared_prompt=flag), lengths=lengths).steps[0].training for flag in (False, True)
    )
    tokens, attention = token_ratio(16384, [64] * 8), attention_ratio(16384, [64] * 8)
    assert (round(tokens, 2), round(attention, 2)) == (7.79, 7.59)
    assert shared == pytest.approx(rows * ((1 - share) / tokens + share / attention), rel=1e-12)


def test_seconds_of_a_group_depend_neither_on_its_tokens_nor_on_the_ranks():
    lengths = Recorded([[Group(100, (30, 50)), Group(100, (300, 500))]])

    def training(policy, **trainer):
        trainer = {"seconds_per_token": 0.01, **trainer}
        model = cluster(trainer=trainer, prompts_per_step=2, group_size=2)
        return simulate(model, policy, lengths=lengths).steps[0]

    for policy in (Policy(), Policy(shared_prompt=True), Policy(proximal="recompute")):
        for ranks in (1, 5):
            free, fixed = (training(policy, ranks=ranks, seconds_per_group=seconds) for seconds in (0.0, 7.0))
            factor = 4 / 3 if policy.proximal == "recompute" else 1.0
            expected = [work + 7.0 * factor for work in free.work]
            assert fixed.work == pytest.approx(expected, rel=1e-12)
            assert fixed.training == pytest.approx(free.training + 14.0, rel=1e-12)
            # Negative control: seconds that ranks or a shared prompt divided would be others.
            assert fixed.training != pytest.approx(free.training + 14.0 / 5, rel=1e-3)
    assert training(Policy(), ranks=1) == training(Policy(), ranks=1, seconds_per_group=0.0)


def test_padded_rows_cost_the_longest_and_a_shared_prompts_row_none_of_it():
    lengths = Recorded([[Group(100, (30, 50))]])
    trainer = {"ranks": 1, "seconds_per_token": 0.01}
    plain, padded = (
        cluster(trainer={**trainer, "padded": flag}, prompts_per_step=1, group_size=2) for flag in (False, True)
    )
    step = simulate(padded, Policy(), lengths=lengths).steps[0]
    assert step.trained_tokens == 300
    assert step.training == pytest.approx(3.0, rel=1e-12)
    assert simulate(plain, Policy(), lengths=lengths).steps[0].training == pytest.approx(2.8, rel=1e-12)
    shared = [simulate(one, Policy(shared_prompt=True), lengths=lengths).steps[0].training for one in (plain, padded)]
    assert shared == pytest.approx([1.8, 1.8], rel=1e-12)


@pytest.mark.parametrize(
    ("cached", "stops", "arrivals"),
    [
        # Two groups of two on four slots, a prompt takes 2 s, a response of n tokens n s. Reads end at 2, 4, 6, 8 s.
        (False, False, [4 + 20, 8 + 10]),
        # A cache: reads end at 2, 2, 4, 4 s.
        (True, False, [2 + 20, 4 + 10]),
        # Nothing decodes while prompts are read: all begin at 8 s, or at 4 s.
        (False, True, [8 + 20, 8 + 10]),
        (True, True, [4 + 20, 4 + 10]),
    ],
)
def test_prompts_are_read_once_a_member_or_once_a_group_beside_decoding_or_instead_of_it(cached, stops, arrivals):
    engines = {
        "count": 1,
        "slots": 4,
        "decode": {"kind": "points", "points": [[1, 1]]},
        "prefill_seconds_per_token": 0.02,
        "prefix_cache": cached,
        "prefill_stops_decoding": stops,
    }
    lengths = Recorded([[Group(100, (20, 20)), Group(100, (10, 10))]])
    step = simulate(cluster(engines=engines, prompts_per_step=2, group_size=2), Policy(), lengths=lengths).steps[0]
    assert sorted(step.arrivals) == pytest.approx(sorted(arrivals), rel=1e-12)


def test_new_weights_make_an_engine_read_a_prompt_again():
    engines = {
        "count": 1,
        "slots": 1,
        "decode": {"kind": "points", "points": [[1, 1]]},
        "prefill_seconds_per_token": 0.02,
        "prefix_cache": True,
    }
    trainer = {"ranks": 1, "seconds_per_token": 1e-9, "optimizer_seconds": 0.0}
    model = cluster(engines=engines, trainer=trainer, prompts_per_step=1, group_size=2, steps=3)
    model = model.model_copy(update={"publication_seconds": 3.0})
    lengths = Recorded([[Group(100, (10, 10))]] * 3)
    one_version = simulate(model, Policy(source="periodic"), lengths=lengths)
    assert [step.generation for step in one_version.steps] == pytest.approx([22.0] * 3)
    # The first member of the second group begins before a publication, the second one after it.
    two_versions = simulate(model, Policy(source="bounded", max_staleness=2), lengths=lengths)
    assert [step.generation for step in two_versions.steps] == pytest.approx([22.0, 24.0, 24.0], abs=1e-6)


def test_a_recomputed_proximal_policy_costs_a_forward_pass_and_a3po_nothing():
    outcomes = {name: simulate(cluster(), Policy(proximal=name)) for name in ("none", "a3po", "recompute")}
    assert outcomes["none"].steps == outcomes["a3po"].steps
    for step, plain in zip(outcomes["recompute"].steps, outcomes["none"].steps, strict=True):
        assert step.training == pytest.approx(plain.training, rel=1e-12)
        assert step.proximal == pytest.approx(plain.training / 3, rel=1e-12)
        assert plain.proximal == 0.0
        assert sum(step.work) == pytest.approx(step.training + step.proximal, rel=1e-12)


def test_a_colocated_run_uses_all_devices_for_both_and_reshards_twice():
    model = cluster(
        engines={"count": 4, "devices": 2, "slots": 4, "decode": {"kind": "points", "points": [[1, 40]]}},
        trainer={"ranks": 2, "devices": 4, "seconds_per_token": 4e-3, "optimizer_seconds": 0.5},
        resharding_seconds=7.0,
    )
    assert model.devices() == 16
    turns = simulate(model, Policy(source="synchronous_colocated"))
    apart = simulate(model.with_split(8, 4), Policy(source="synchronous"))
    for one, other in zip(turns.steps, apart.steps, strict=True):
        assert (one.resharding, one.publication) == (14.0, 0.0)
        assert one.arrivals == pytest.approx(other.arrivals, rel=1e-9)
        assert one.seconds - 14.0 == pytest.approx(other.seconds - other.publication, rel=1e-9)
    free = simulate(model.model_copy(update={"resharding_seconds": 0.0}), Policy(source="synchronous_colocated"))
    assert free.seconds == pytest.approx(turns.seconds - 14.0 * len(turns.steps), rel=1e-9)


# --- group control ------------------------------------------------------------------------------------


def test_sagc_moves_g_and_both_ways_of_counting_differ():
    quick = {"eta": 1.0, "min_dwell": 1}
    # Enough slots that the tail, not the tokens, makes the time: fewer rollouts then hardly take less of it.
    engines = {"count": 4, "slots": 64, "decode": {"kind": "law", "tokens_per_second": 40, "half": 32}}
    model = cluster(prompts_per_step=8, group_size=16, steps=80, engines=engines)
    fixed = simulate(model, Policy())
    rollouts = simulate(model, Policy(group_controller="sagc", sagc=quick))
    prompts = simulate(model, Policy(group_controller="sagc", sagc={**quick, "budget": "fixed_prompts"}))
    assert set(fixed.group_sizes) == {16}
    assert set(rollouts.group_sizes) == {4, 8, 16}
    assert {step.rollouts for step in rollouts.steps} == {128}
    assert {step.prompts for step in prompts.steps} == {8}
    assert prompts.step_seconds < fixed.step_seconds
    assert prompts.rollouts_per_second < fixed.rollouts_per_second
    ratios = [np.mean([step.straggler_ratio for step in outcome.steps]) for outcome in (fixed, rollouts)]
    assert ratios[1] < ratios[0]


def test_sagc_that_needs_rewards_is_refused():
    with pytest.raises(ValueError, match="rewards"):
        Policy(group_controller="sagc", sagc={"utility": "dapo"})


# --- spans, split, imports ----------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [Policy(), Policy(source="bounded"), Policy(source="synchronous_colocated")])
def test_spans_cover_what_the_figures_say_and_never_overlap_in_a_lane(policy):
    model = cluster(failures={"mean_seconds_between": 100.0, "seconds_to_return": 5.0}, resharding_seconds=1.0)
    outcome = simulate(model, policy)
    seconds, last = {}, {}
    for span in outcome.spans:
        seconds[span.kind] = seconds.get(span.kind, 0.0) + span.end - span.start
        assert span.start >= last.get(span.lane, 0.0) - 1e-9
        last[span.lane] = span.end
        assert 0 <= span.step < len(outcome.steps)
    engines = 3 if policy.source != "synchronous_colocated" else 5
    assert seconds["train"] == pytest.approx(sum(step.training + step.proximal for step in outcome.steps))
    assert seconds["step"] == pytest.approx(sum(step.optimizer for step in outcome.steps))
    assert 1 - seconds["generate"] / (engines * outcome.seconds) == pytest.approx(outcome.rollout_idle)
    assert 1 - (seconds["train"] + seconds["step"]) / outcome.seconds == pytest.approx(outcome.trainer_idle)


def test_the_split_search_finds_the_fastest_of_all_splits():
    model = cluster(
        engines={"count": 4, "slots": 4, "decode": {"kind": "law", "tokens_per_second": 40, "half": 5}},
        trainer={"ranks": 20, "seconds_per_token": 0.02, "efficiency": 0.97},
        prompts_per_step=60,
    )
    found = best_split(model)
    every = {
        engines: simulate(model.with_split(engines, 24 - engines), Policy()).step_seconds for engines in range(1, 24)
    }
    assert found.feasible == 23
    assert all(split.engines + split.ranks == 24 for split in found.tried)
    assert found.given.step_seconds == pytest.approx(every[4], rel=1e-12)
    assert found.fastest.step_seconds == pytest.approx(min(every.values()), rel=0.01)
    assert found.fastest.step_seconds < 0.7 * found.given.step_seconds
    gaps = [abs(split.generation - split.training) for split in found.tried]
    assert abs(found.balanced.generation - found.balanced.training) == min(gaps)


def test_a_simulation_without_a_step_is_refused():
    with pytest.raises(ConfigurationError, match="needs a step"):
        simulate(cluster(), Policy(), steps=0)


def test_engines_that_never_get_anything_done_are_refused():
    failures = {"mean_seconds_between": 0.2, "seconds_to_return": 0.0}
    with pytest.raises(ConfigurationError, match="fail so often"):
        simulate(cluster(failures=failures), Policy())


def test_without_simpy_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "simpy", None)
    with pytest.raises(ConfigurationError, match=r"metronome-rl\[plan\]"):
        simulate(cluster(), Policy())


def test_importing_the_model_imports_neither_torch_nor_simpy():
    code = "import sys, metronome.simulate.command; print(sorted({'torch', 'simpy', 'plotly'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
