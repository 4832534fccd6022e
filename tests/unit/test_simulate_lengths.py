"""Where the cluster model's response lengths come from."""

import pytest

from metronome.errors import ConfigurationError
from metronome.simulate import Cluster, Group, Policy, Recorded, simulate


def cluster(**changes):
    values = {
        "engines": {"count": 3, "slots": 4, "decode": {"kind": "law", "tokens_per_second": 40, "half": 5}},
        "trainer": {"ranks": 2, "seconds_per_token": 4e-3},
        "lengths": {"kind": "lognormal", "median": 200, "sigma": 0.7, "cap": 2000},
        "prompts_per_step": 6,
        "group_size": 4,
        "prompt_tokens": 50,
        "steps": 6,
    }
    return Cluster(**{**values, **changes})


def test_the_same_arguments_give_the_same_outcome_and_another_seed_another():
    policy = Policy(source="bounded")
    assert simulate(cluster(), policy) == simulate(cluster(), policy)
    assert simulate(cluster(), policy, seed=1).steps != simulate(cluster(), policy).steps


def test_all_policies_train_the_same_lengths():
    policies = [Policy(source=name) for name in ("synchronous_colocated", "synchronous", "periodic")]
    policies += [Policy(source="bounded", max_staleness=0), Policy(shared_prompt=True, proximal="recompute")]
    outcomes = [simulate(cluster(), policy) for policy in policies]
    assert len({tuple(step.response_tokens for step in outcome.steps) for outcome in outcomes}) == 1


def test_lengths_drift_with_the_steps_up_to_the_cap():
    lengths = {"kind": "lognormal", "median": 100, "sigma": 0.0, "cap": 250, "growth": 1.5}
    outcome = simulate(cluster(lengths=lengths), Policy())
    assert [step.response_tokens // 24 for step in outcome.steps] == [100, 150, 225, 250, 250, 250]
    far = simulate(cluster(lengths={**lengths, "growth": 1e6}, steps=400, prompts_per_step=1), Policy())
    assert far.steps[-1].response_tokens == 4 * 250


def test_lengths_of_a_file_are_drawn_from_it(tmp_path):
    file = tmp_path / "lengths.txt"
    file.write_text("10, 20\n40 80")
    outcome = simulate(
        cluster(lengths={"kind": "empirical", "file": str(file)}, prompts_per_step=1000), Policy(), steps=1
    )
    assert pytest.approx(outcome.steps[0].response_tokens / 4000, rel=0.05) == 37.5


@pytest.mark.parametrize("text", ["", "10 twenty", "0 5", "nan 4", "inf", "3 1e308"])
def test_a_file_of_lengths_that_is_none_is_refused(tmp_path, text):
    file = tmp_path / "lengths.txt"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=r"tokens, each at least 1.*lengths\.txt"):
        simulate(cluster(lengths={"kind": "empirical", "file": str(file)}), Policy())


def test_recorded_lengths_are_replayed_as_they_are():
    steps = [[Group(7, (11, 12)), Group(9, (13, 14))], [Group(7, (21, 22)), Group(9, (23, 24))]]
    outcome = simulate(cluster(prompts_per_step=2, group_size=2, steps=3), Policy(), lengths=Recorded(steps))
    assert [step.response_tokens for step in outcome.steps] == [50, 90, 50]
    assert [step.trained_tokens for step in outcome.steps] == [82, 122, 82]


def test_a_record_gives_smaller_and_larger_groups_from_its_members():
    record = Recorded([[Group(7, (11, 12, 13))]])
    assert record.group(0, 0, 2).responses == (11, 12)
    larger = record.group(0, 0, 8).responses
    assert larger[:3] == (11, 12, 13)
    assert set(larger) <= {11, 12, 13}
    assert len(larger) == 8
    assert record.group(0, 0, 8) == record.group(0, 0, 8)


def test_a_bootstrapped_record_keeps_the_shape_and_draws_from_the_same_step():
    steps = [[Group(1, (10 * step + place,)) for place in range(1, 9)] for step in range(4)]
    drawn = [Recorded(steps).bootstrapped(seed) for seed in (0, 1)]
    found = [[[one.group(step, place, 1) for place in range(8)] for step in range(4)] for one in drawn]
    for outcome in found:
        assert all(set(groups) <= set(own) for groups, own in zip(outcome, steps, strict=True))
    assert found[0] != found[1]
    assert found[0] != steps


@pytest.mark.parametrize("steps", [[], [[]], [[Group(1, ())]], [[Group(1, (0,))]], [[Group(0, (1,))]]])
def test_a_record_without_lengths_is_refused(steps):
    with pytest.raises(ConfigurationError, match="recorded lengths"):
        Recorded(steps)


def test_a_prompts_own_median_makes_its_responses_alike():
    def spread(**sigmas):
        lengths = {"kind": "lognormal", "median": 1000, "cap": 100_000, **sigmas}
        outcome = simulate(cluster(lengths=lengths, prompts_per_step=50), Policy(), steps=1)
        return outcome.steps[0].straggler_ratio, outcome.steps[0].tail_ratio

    alike, different = spread(sigma=0.01, prompt_sigma=0.7), spread(sigma=0.7)
    assert alike[0] < 1.05 < different[0]
    assert alike[1] > 1.5
