"""SAGC on a seeded length model: a calibration of our own defaults, NOT a reproduction of the paper's runs.

The model: response lengths are lognormal with sigma 0.5, 8 prompts a step, 4,000 steps. The paper gives no
value for its thresholds; delta 0.40 to 0.43 is what makes this model show the rate of its row (43.4 %).

Expected values are the model's own, converged over many more steps or over several other seeds; tolerances
come from the sampling spread (about three standard deviations of the widest case in a table).
"""

from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import pytest

from metronome.contracts import GroupStats, StepStats
from metronome.sagc.budget import prompts
from metronome.sagc.controller import SagcController
from metronome.sagc.options import SagcOptions

SIZES = (4, 8, 16)
STEPS, PROMPTS, SIGMA, TAU = 4000, 8, 0.5, 2.0


@lru_cache(maxsize=1)
def normals():
    """size -> standard normals [STEPS, PROMPTS, size]."""
    chance = np.random.default_rng(7)
    return {size: chance.standard_normal((STEPS, PROMPTS, size)) for size in SIZES}


@lru_cache(maxsize=1)
def model():
    """size -> lengths in tokens [STEPS, PROMPTS, size]."""
    return {size: np.rint(1000 * np.exp(SIGMA * z)).astype(int) for size, z in normals().items()}


@cache
def large_model(size):
    """Lengths of a fixed size over 20,000 steps, for rates to a third of a percent."""
    chance = np.random.default_rng(11)
    return np.rint(1000 * np.exp(SIGMA * chance.standard_normal((20_000, PROMPTS, size)))).astype(int)


def ratios(lengths):
    """[..., size] -> max/median of each group, by numpy's median (mean of the two middle values)."""
    return lengths.max(-1) / np.median(lengths, -1)


def lower_ratios(lengths):
    """The same with the lower of the two middle values, torch.median's convention."""
    ordered = np.sort(lengths, -1)
    return ordered[..., -1] / ordered[..., (ordered.shape[-1] - 1) // 2]


def rate(values):
    """[steps, prompts] ratios -> how often a step's mean exceeds tau."""
    return float((values.mean(-1) > TAU).mean())


@dataclass(frozen=True)
class Run:
    events: np.ndarray
    sizes: np.ndarray
    lambdas: np.ndarray
    switched: np.ndarray
    infeasible: np.ndarray
    posterior: np.ndarray  # of the size that generated the step

    @property
    def rate(self):
        return float(self.events.mean())


def run(lengths, steps=STEPS, **options):
    """A default controller (but for ``options``) on ``lengths``, size -> [steps, groups, rollouts]."""
    controller = SagcController(SagcOptions(**options), seed=0)
    rows = []
    for number in range(steps):
        size = controller.size()
        groups = [
            GroupStats(size, own, [False] * len(own), [0.0] * len(own), 0.0, 1.0)
            for own in lengths[size][number].tolist()
        ]
        seen = controller.observe(StepStats(number, groups))
        rows.append(
            [
                seen["straggler_rate"],
                size,
                seen["lambda"],
                seen["switched"],
                seen["infeasible"],
                seen[f"p/{size}"],
            ]
        )
    return Run(*np.array(rows).T)


@cache
def default_run(delta, min_dwell):
    return run(model(), delta=delta, min_dwell=min_dwell)


def as_groups(values, size):
    """Groups whose max/median is ``values`` [steps, groups]: all of one length, but for one longest."""
    lengths = np.full((*values.shape, size), 1000)
    lengths[..., -1] = np.rint(1000 * values)
    return lengths


# --- how often a step straggles -------------------------------------------------------------------


@pytest.mark.parametrize("size, expected", [(4, 0.118), (8, 0.665), (16, 0.9875)])
def test_straggler_rate_of_each_fixed_size(size, expected):
    assert rate(ratios(large_model(size))) == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("size, expected", [(4, 0.567), (8, 0.873), (16, 0.996)])
def test_the_lower_middle_median_shifts_every_rate_up(size, expected):
    assert rate(lower_ratios(large_model(size))) == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("size, expected", [(4, 0.874), (8, 0.994), (16, 1.0)])
def test_any_straggling_group_is_nearly_always_there(size, expected):
    assert float((ratios(large_model(size)).max(-1) > TAU).mean()) == pytest.approx(expected, abs=0.01)


def test_the_controller_measures_what_numpy_measures():
    result = default_run(0.4, 5)
    steps = np.arange(STEPS)
    reference = {size: ratios(model()[size]).mean(-1) > TAU for size in SIZES}
    expected = [reference[int(size)][step] for step, size in zip(steps, result.sizes, strict=True)]
    assert (result.events == expected).all()
    lower = {size: lower_ratios(model()[size]).mean(-1) > TAU for size in SIZES}
    other = [lower[int(size)][step] for step, size in zip(steps, result.sizes, strict=True)]
    assert (result.events != other).any()


# --- the constraint -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "delta, min_dwell, expected", [(0.40, 1, 0.409), (0.40, 5, 0.411), (0.43, 1, 0.439), (0.43, 5, 0.441)]
)
def test_calibrated_long_run_rate(delta, min_dwell, expected):
    """Brackets the paper's 43.4 %: delta was chosen for it, so this is a calibration, not a reproduction."""
    result = default_run(delta, min_dwell)
    assert result.rate == pytest.approx(expected, abs=0.008)
    assert rate(ratios(model()[16])) > 0.98  # the fixed 16 that the row starts from (99.6 %)


@pytest.mark.parametrize("delta", [0.3, 0.4, 0.43])
def test_the_excess_over_delta_is_what_lambda_has_climbed(delta):
    """sum(S - delta) = lambda_T / eta while lambda is off its ends: the excess vanishes with the horizon."""
    result = default_run(delta, 1)
    assert 0 < result.lambdas.max() < 10.0
    assert result.rate == pytest.approx(delta + result.lambdas[-1] / (0.1 * STEPS), abs=0.002)
    assert abs(result.events[STEPS // 2 :].mean() - delta) < 0.02
    assert result.rate - delta > 0.005  # the climb itself is there


def test_lambda_stays_between_zero_and_its_cap():
    for delta in (0.3, 0.4, 0.43):
        for min_dwell in (1, 5):
            lambdas = default_run(delta, min_dwell).lambdas
            assert 0.0 <= lambdas.min() <= lambdas.max() <= 10.0
    assert run(model(), steps=500, delta=0.05).lambdas.max() == 10.0  # a delta that no size meets reaches it


def test_min_dwell_lowers_the_switches_at_the_same_long_run_rate():
    free, held = default_run(0.4, 1), default_run(0.4, 5)
    assert free.switched.mean() == pytest.approx(0.366, abs=0.035)
    assert held.switched.mean() == pytest.approx(0.126, abs=0.011)
    assert held.rate == pytest.approx(free.rate, abs=0.01)


def test_min_dwell_costs_rate_where_lambda_is_at_its_cap():
    """The limit of the promise above: at delta 0.2 lambda saturates and dwelling is no longer free."""
    free, held = default_run(0.2, 1), default_run(0.2, 5)
    assert free.lambdas.max() == held.lambdas.max() == 10.0
    assert held.rate > free.rate + 0.04


def test_size_8_is_not_on_the_concave_hull():
    p = {size: rate(ratios(model()[size])) for size in SIZES}

    def ever_best(size, rates):
        prices = np.linspace(0, 10, 2001)
        scores = np.array([np.log2(own) - prices * rates[own] for own in SIZES])
        return bool((scores.argmax(0) == SIZES.index(size)).any())

    assert [ever_best(size, p) for size in SIZES] == [True, False, True]
    assert ever_best(8, {**p, 8: 0.4})  # below the chord it would be
    assert (default_run(0.4, 1).sizes == 8).mean() > 0.15  # neighbours alone keep it in use


# --- the infeasible events ------------------------------------------------------------------------


def infeasible_views():
    worst = {size: as_groups(ratios(model()[size]).max(-1, keepdims=True), size) for size in SIZES}
    lower = {size: as_groups(lower_ratios(model()[size]), size) for size in SIZES}
    return {"any": worst, "lower": lower}


@pytest.mark.parametrize("view, bare_rate, smallest_rate", [("any", 0.975, 0.874), ("lower", 0.788, 0.567)])
def test_an_infeasible_event_ends_at_the_smallest_size(view, bare_rate, smallest_rate):
    lengths = infeasible_views()[view]
    bare = run(lengths, steps=1500, infeasible_after=10**6)
    assert bare.lambdas.max() == 10.0
    assert bare.rate == pytest.approx(bare_rate, abs=0.03)
    assert bare.sizes[500:].mean() > 7  # lambda saturates and the utility wins: large groups stay

    guarded = run(lengths, steps=1500)
    first = int(guarded.infeasible.argmax())
    assert 100 < first < 300
    assert guarded.infeasible[first:].mean() > 0.99
    assert (guarded.sizes[first + 1 :] == 4).mean() > 0.98
    assert guarded.events[first + 1 :].mean() == pytest.approx(smallest_rate, abs=0.03)


def test_a_feasible_event_never_falls_back():
    for delta in (0.3, 0.4, 0.43):
        assert not default_run(delta, 5).infeasible.any()


def test_the_idle_fraction_of_a_step_hardly_depends_on_size_at_equal_rollouts():
    """A limit of ``step_idle``: from lengths alone, smaller groups lower it only where rollouts fall too."""

    def idle(count):
        lengths = np.exp(SIGMA * np.random.default_rng(3).standard_normal((2000, count)))
        return float((1 - lengths.mean(1) / lengths.max(1)).mean())

    equal_rollouts = [idle(prompts("fixed_rollouts", 128, 1, size=g, largest=16) * g) for g in SIZES]
    equal_prompts = [idle(prompts("fixed_prompts", 128, 1, size=g, largest=16) * g) for g in SIZES]
    assert np.ptp(equal_rollouts) == 0
    assert equal_prompts[0] < equal_prompts[1] < equal_prompts[2]


# --- lengths that change --------------------------------------------------------------------------


def test_growing_tails_are_tracked_because_the_posterior_forgets():
    """sigma jumps from 0.35 to 0.55 half way; gamma 1 keeps believing the first half."""
    steps, half = 3000, 1500
    sigma = np.where(np.arange(steps) < half, 0.35, 0.55)[:, None, None]
    lengths = {size: np.rint(1000 * np.exp(sigma * normals()[size][:steps])).astype(int) for size in SIZES}
    late = {size: rate(ratios(lengths[size][half:])) for size in SIZES}

    def after(gamma):
        result = run(lengths, steps=steps, delta=0.4, gamma=gamma)
        true = np.array([late[int(size)] for size in result.sizes[half:]])
        error = np.abs(result.posterior[half:] - true).mean()
        return result.events[half:].mean(), error, result.sizes[:half].mean(), result.sizes[half:].mean()

    rate_forgetting, error_forgetting, early_size, late_size = after(0.95)
    rate_keeping, error_keeping, *_ = after(1.0)
    assert late[16] > 0.99  # what staying at 16 would give
    assert early_size == 16  # short tails: the largest size is fine
    assert late_size < 8
    assert error_forgetting < 0.15
    assert error_keeping > 2 * error_forgetting
    assert rate_forgetting < 0.55
    assert rate_keeping > rate_forgetting + 0.1


# --- hours at equal steps and at equal rollouts ---------------------------------------------------


@cache
def step_cost(budget, size):
    """(barrier time, rollouts, tokens) of a mean step.

    Prompts differ with sigma 0.5, rollouts of one prompt with sigma 0.4, lengths are capped at 6. Barrier
    time is the longest response: continuous batching with a slot for every rollout.
    """
    chance = np.random.default_rng(2)
    count = prompts(budget, 128, 1, size=size, largest=16)
    of_prompt = 0.5 * chance.standard_normal((20_000, count, 1))
    lengths = np.minimum(np.exp(of_prompt + 0.4 * chance.standard_normal((20_000, count, size))), 6.0)
    return float(lengths.max((1, 2)).mean()), count * size, float(lengths.sum((1, 2)).mean())


def gains(budget, size):
    """Speed against G = 16: (at equal steps, at equal rollouts)."""
    base, base_rollouts, _ = step_cost(budget, 16)
    time, rollouts, _ = step_cost(budget, size)
    return base / time, base / time * rollouts / base_rollouts


@pytest.mark.parametrize("size, expected", [(8, 0.944), (4, 0.908)])
def test_at_fixed_rollouts_smaller_groups_are_slower_in_the_barrier(size, expected):
    at_equal_steps, at_equal_rollouts = gains("fixed_rollouts", size)
    assert at_equal_steps == at_equal_rollouts == pytest.approx(expected, abs=0.006)


@pytest.mark.parametrize("size, steps, slower", [(8, 1.104, 1.812), (4, 1.235, 3.238)])
def test_at_fixed_prompts_steps_get_faster_and_rollouts_dearer(size, steps, slower):
    at_equal_steps, at_equal_rollouts = gains("fixed_prompts", size)
    assert at_equal_steps == pytest.approx(steps, abs=0.01)
    assert 1 / at_equal_rollouts == pytest.approx(slower, rel=0.01)


def test_the_papers_ratio_lies_between_barrier_only_and_token_bound():
    """29.50 h -> 16.00 h at fixed prompts, with the sizes that the calibrated controller visits."""
    visited = default_run(0.43, 5).sizes
    shares = {size: float((visited == size).mean()) for size in SIZES}
    barrier, tokens = (
        step_cost("fixed_prompts", 16)[part]
        / sum(share * step_cost("fixed_prompts", size)[part] for size, share in shares.items())
        for part in (0, 2)
    )
    assert 1.1 < barrier < 1.2
    assert 2.0 < tokens < 2.7
    assert barrier < 29.50 / 16.00 < tokens
