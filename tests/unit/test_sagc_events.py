import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metronome.contracts import GroupStats
from metronome.errors import ConfigurationError
from metronome.sagc.events import (
    idle_event,
    ratio_event,
    straggler_ratio,
    successes,
    truncation_rate,
    with_responses,
)

LENGTHS = st.lists(st.integers(0, 100_000), min_size=1, max_size=32)


def group(lengths, truncated=None, rewards=None):
    n = len(lengths)
    return GroupStats(n, lengths, truncated or [False] * n, rewards or [0.0] * n, 0.0, 1.0)


def test_the_median_of_an_even_group_is_the_mean_of_the_two_middle_lengths():
    assert straggler_ratio([100, 100, 300, 800]) == 800 / 200
    lower_middle = 800 / 100  # torch.median's convention, which would see twice the ratio
    assert straggler_ratio([100, 100, 300, 800]) != lower_middle


def test_the_median_of_an_odd_group_is_its_middle_length():
    assert straggler_ratio([900, 100, 300]) == 3.0


@pytest.mark.parametrize(
    "lengths, ratio",
    [
        ([0], 1.0),
        ([0, 0, 0, 0], 1.0),
        ([0, 0, 1, 1], 1.0),
        ([0, 0, 0, 50], 50.0),
        ([0, 10, 10, 10], 1.0),
        ([1], 1.0),
    ],
)
def test_empty_responses_have_a_defined_ratio(lengths, ratio):
    assert straggler_ratio(lengths) == ratio


def test_a_group_cut_as_a_whole_is_no_straggler_but_shows_in_the_truncation_rate():
    cut = group([512] * 8, truncated=[True] * 8)
    assert not ratio_event([cut], tau=2.0).straggles
    assert truncation_rate([cut]) == 1.0
    assert truncation_rate([cut, group([1] * 8)]) == 0.5
    assert ratio_event([group([100] * 7 + [512])], tau=2.0).straggles  # one long response does straggle


def test_two_rollouts_never_reach_a_ratio_of_two():
    assert straggler_ratio([1, 10**9]) < 2.0
    assert straggler_ratio([1, 1, 10**9]) > 2.0


@settings(deadline=None, max_examples=100)
@given(LENGTHS, st.randoms(use_true_random=False))
def test_the_ratio_is_at_least_one_and_ignores_the_order(lengths, random):
    shuffled = list(lengths)
    random.shuffle(shuffled)
    assert straggler_ratio(lengths) == straggler_ratio(shuffled) >= 1.0


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=16), st.integers(1, 50))
def test_the_ratio_of_non_empty_responses_ignores_their_scale(lengths, scale):
    scaled = [length * scale for length in lengths]
    assert straggler_ratio(scaled) == pytest.approx(straggler_ratio(lengths), rel=1e-12)
    assert straggler_ratio(lengths) == pytest.approx(max(lengths) / np.median(lengths), rel=1e-12)


def test_the_step_takes_the_mean_of_the_ratios_not_the_worst_group():
    calm, bad = group([100] * 4), group([100, 100, 100, 250])
    assert ratio_event([bad], tau=2.0).straggles
    step = ratio_event([calm, bad], tau=2.0)
    assert step.value == (1.0 + 2.5) / 2
    assert not step.straggles


def test_a_ratio_equal_to_tau_is_no_straggler():
    assert not ratio_event([group([100, 100, 100, 200])], tau=2.0).straggles
    assert ratio_event([group([100, 100, 100, 201])], tau=2.0).straggles


def test_groups_without_responses_are_left_out():
    full = group([1, 2])
    assert with_responses([group([]), full]) == [full]


def test_lengths_may_be_arrays():
    assert straggler_ratio(np.array([100, 100, 300, 800])) == 4.0
    arrays = GroupStats(4, np.array([1, 1, 1, 5]), np.array([False, True, False, False]), [0.0] * 4, 0.0, 1.0)
    assert with_responses([arrays]) == [arrays]
    assert truncation_rate([arrays]) == 0.25


def test_idle_is_the_share_of_the_longest_response_that_the_mean_leaves():
    step = [group([100, 100]), group([100, 400])]
    event = idle_event(step, idle_tau=0.5)
    assert event.value == 1 - 175 / 400
    assert event.straggles
    assert not idle_event([group([400] * 4)], idle_tau=0.5).straggles
    assert idle_event([group([0, 0])], idle_tau=0.5).value == 0.0


def test_a_measured_bubble_takes_the_place_of_the_lengths():
    step = [group([100] * 4)]
    assert idle_event(step, 0.5, bubble=0.7).straggles
    assert not idle_event(step, 0.5, bubble=None).straggles
    assert idle_event(step, 0.5, bubble=1.0000001).value == 1.0
    assert idle_event(step, 0.5, bubble=-1e-9).value == 0.0


@pytest.mark.parametrize("bubble", [float("nan"), float("inf")])
def test_a_bubble_that_is_no_number_is_refused(bubble):
    with pytest.raises(ConfigurationError, match=r"StepStats\.bubble"):
        idle_event([group([1])], 0.5, bubble=bubble)


def test_successes_count_every_generated_rollout():
    kept, all_failed = group([1, 1], rewards=[1.0, 0.0]), group([1, 1], rewards=[-1.0, 0.0])
    assert successes([kept, all_failed], above=0.0) == (1, 4)
    assert successes([kept], above=-0.5) == (2, 2)


def test_an_event_reads_as_a_comparison():
    assert str(ratio_event([group([100, 100, 100, 270])], 2.0)) == "straggler ratio 2.70 > 2.00"
    assert str(ratio_event([group([100] * 4)], 2.0)) == "straggler ratio 1.00 <= 2.00"
