import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metronome.errors import ConfigurationError
from metronome.sagc.budget import prompts
from metronome.sagc.controller import SagcController
from metronome.sagc.fixed import Fixed, FixedOptions
from metronome.sagc.options import SagcOptions


@pytest.mark.parametrize("size, count", [(4, 32), (8, 16), (16, 8)])
def test_fixed_rollouts_keeps_the_rollouts_of_a_step(size, count):
    assert prompts("fixed_rollouts", 128, 1, size=size, largest=16) == count
    assert count * size == 128


@pytest.mark.parametrize("size", [4, 8, 16])
def test_fixed_prompts_keeps_the_prompts_of_a_step(size):
    assert prompts("fixed_prompts", 128, 1, size=size, largest=16) == 8


def test_prompts_are_rounded_down_to_the_multiple():
    assert prompts("fixed_rollouts", 100, 1, size=8, largest=16) == 12
    assert prompts("fixed_rollouts", 100, 8, size=8, largest=16) == 8


def test_a_budget_below_one_multiple_gives_one_multiple():
    assert prompts("fixed_rollouts", 10, 4, size=8, largest=16) == 4
    assert prompts("fixed_prompts", 10, 1, size=8, largest=16) == 1


@settings(deadline=None, max_examples=200)
@given(
    st.sampled_from(["fixed_rollouts", "fixed_prompts"]),
    st.integers(1, 10_000),
    st.integers(1, 64),
    st.sampled_from([2, 4, 8, 16]),
)
def test_the_rounding_rule_holds(budget, rollouts, multiple, size):
    count = prompts(budget, rollouts, multiple, size=size, largest=16)
    per_group = size if budget == "fixed_rollouts" else 16
    assert count % multiple == 0
    assert count >= multiple
    assert count == multiple or count * per_group <= rollouts  # never padded
    assert (count + multiple) * per_group > rollouts  # and nothing is given away
    assert prompts(budget, rollouts + 1, multiple, size=size, largest=16) >= count


@pytest.mark.parametrize("rollouts, multiple", [(0, 1), (-8, 1), (64, 0)])
def test_a_budget_or_multiple_below_one_is_refused(rollouts, multiple):
    with pytest.raises(ConfigurationError, match="at least 1"):
        prompts("fixed_rollouts", rollouts, multiple, size=8, largest=16)


@pytest.mark.parametrize("budget, count", [("fixed_rollouts", 32), ("fixed_prompts", 8)])
def test_sagc_follows_its_budget(budget, count):
    assert SagcController(SagcOptions(start=4, budget=budget), seed=0).prompts(128) == count


def test_fixed_divides_the_rollouts_by_its_size():
    assert Fixed(FixedOptions(size=8)).prompts(128, 3) == 15
