"""Streaming denominators against the formulas, batch moments, and the accumulators' own rules."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metronome.errors import ConfigurationError, MetronomeError
from metronome.periodic.normalizer import Counts, StreamingNormalizer
from metronome.periodic.whitening import BatchMoments, TwoAccumulators

LONGEST = 12


def objective(mode: str, rows: list[list[float]]) -> float:
    """The whole-batch formula, written out once more."""
    total = sum(map(math.fsum, rows))
    if not rows:
        return 0.0
    if mode == "seq-mean":
        return math.fsum(math.fsum(row) / len(row) for row in rows if row) / len(rows)
    if mode == "token-mean":
        tokens = sum(map(len, rows))
        return total / tokens if tokens else 0.0
    return total / (len(rows) * (LONGEST if mode == "dr-grpo" else 1))


ROWS = st.lists(st.lists(st.floats(-4, 4), max_size=LONGEST), max_size=10)


@given(
    rows=ROWS,
    mode=st.sampled_from(StreamingNormalizer.MODES),
    expected=st.integers(1, 24),
    split=st.integers(1, 10),
    ranks=st.integers(1, 3),
)
@settings(deadline=None, max_examples=200)
def test_any_split_over_micro_batches_and_ranks_gives_the_formula(rows, mode, expected, split, ranks):
    normalizers = [StreamingNormalizer(mode, expected_rows=expected, max_tokens=LONGEST) for _ in range(ranks)]
    parts = []
    for start in range(0, len(rows), split):
        micro = rows[start : start + split]
        weights = normalizers[start % ranks].row_weights([len(row) for row in micro])
        parts += [weight * math.fsum(row) for weight, row in zip(weights, micro, strict=True)]
    counts = sum((normalizer.counts for normalizer in normalizers), Counts())
    assert counts == Counts(len(rows), sum(map(len, rows)))
    got = normalizers[0].final_factor(counts) * math.fsum(parts)
    assert got == pytest.approx(objective(mode, rows), rel=1e-12, abs=1e-13)


@pytest.mark.parametrize("mode", ["seq-mean", "dr-grpo", "seq-mean-token-sum"])
def test_the_final_factor_is_exactly_one_where_the_expectation_was_met(mode):
    normalizer = StreamingNormalizer(mode, expected_rows=3, max_tokens=7)
    normalizer.row_weights([5, 0, 2])
    assert normalizer.final_factor() == 1.0
    normalizer.row_weights([1])
    assert normalizer.final_factor() == 0.75


@pytest.mark.parametrize("mode", StreamingNormalizer.MODES)
def test_a_row_without_trained_tokens_counts_as_a_row_and_nothing_trained_gives_zero(mode):
    normalizer = StreamingNormalizer(mode, expected_rows=2, max_tokens=4)
    assert normalizer.final_factor() == 0.0
    weights = normalizer.row_weights([0])
    assert all(map(math.isfinite, weights))
    assert normalizer.counts == Counts(rows=1, tokens=0)
    assert normalizer.final_factor() == (0.0 if mode == "token-mean" else 2.0)


def test_weights_depend_on_the_row_alone():
    for mode in StreamingNormalizer.MODES:
        normalizer = StreamingNormalizer(mode, expected_rows=6, max_tokens=9)
        together = normalizer.row_weights([3, 9, 1])
        assert together == [normalizer.row_weights([length])[0] for length in (3, 9, 1)]


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (("token-men", 1, 1), "use 'token-mean'"),
        (("token-mean", 0, 1), "expected_rows: 1 or more"),
        (("seq-mean", 4, -1), "max_tokens: 1 or more"),
    ],
)
def test_bad_normalisers_are_refused_with_the_remedy(arguments, remedy):
    mode, rows, tokens = arguments
    with pytest.raises(ConfigurationError, match=remedy):
        StreamingNormalizer(mode, expected_rows=rows, max_tokens=tokens)


@given(st.lists(st.tuples(st.floats(-3, 3), st.integers(0, 9)), max_size=12), st.integers(0, 12))
@settings(deadline=None, max_examples=100)
def test_moments_add_over_any_split_and_equal_those_of_the_tokens(rows, cut):
    parts = [BatchMoments.of(*zip(*part, strict=True)) for part in (rows[:cut], rows[cut:]) if part]
    moments = sum(parts, BatchMoments())
    tokens = [value for value, length in rows for _ in range(length)]
    assert moments.count == len(tokens)
    assert moments.mean == pytest.approx(statistics.fmean(tokens) if tokens else 0.0, abs=1e-12)
    # sqrt of the rounding of squares: a spread of 1e-7 can't be told from none
    assert moments.std(eps=0.0) == pytest.approx(statistics.pstdev(tokens) if tokens else 0.0, abs=1e-6)
    assert moments.std(eps=0.5) == moments.std(eps=0.0) + 0.5


@dataclass
class Number:
    """A gradient of one exact number with the two methods that the accumulators use."""

    value: Fraction

    def add_(self, other):
        self.value += other.value
        return self

    def mul_(self, factor):
        self.value *= Fraction(factor)
        return self


@dataclass
class Weight:
    grad: Number | None = None


def give(weights, *values):
    for weight, value in zip(weights, values, strict=True):
        weight.grad = None if value is None else Number(Fraction(value))


def test_accumulators_combine_exactly_and_start_anew():
    weights = [Weight(), Weight(), Weight(), Weight()]
    accumulators = TwoAccumulators(weights)
    for _ in range(2):
        give(weights, 3, None, 5, None)
        accumulators.take("advantage")
        assert all(weight.grad is None for weight in weights)
        give(weights, 7, 11, None, None)
        accumulators.take("unit")
        give(weights, 13, None, None, None)
        accumulators.take("other")
    accumulators.combine(mean=0.5, std=0.25, factor=2.0)
    assert [weight.grad and weight.grad.value for weight in weights] == [
        2 * ((6 - Fraction(14, 2)) * 4 + 26),
        2 * (-Fraction(22, 2) * 4),
        2 * (10 * 4),
        None,
    ]
    give(weights, 1, None, None, None)
    accumulators.take("advantage")
    give(weights, 1, None, None, None)
    accumulators.take("unit")
    accumulators.combine(mean=0.0, std=1.0)
    assert weights[0].grad.value == 1, "the first batch must not leak into the second"


def test_accumulators_refuse_what_would_be_silently_wrong():
    accumulators = TwoAccumulators([Weight()])
    with pytest.raises(MetronomeError, match=r"found 'advantages'.*one of advantage, unit, other"):
        accumulators.take("advantages")
    accumulators.take("advantage")
    with pytest.raises(MetronomeError, match=r"take\(\"unit\"\)"):
        accumulators.combine(0.0, 1.0)
    accumulators.take("unit")
    for std in (0.0, float("nan")):
        with pytest.raises(MetronomeError, match="whitened by this deviation"):
            accumulators.combine(0.0, std)
