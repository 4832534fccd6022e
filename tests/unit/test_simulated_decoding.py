"""The benchmarks' engine that decodes by sleeping: its lengths, and how long they take."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import simulated


def test_lengths_are_always_the_same_and_some_are_stragglers():
    found = simulated.lengths(128, 128)
    assert found == simulated.lengths(128, 128)
    assert len(found) == 128
    assert 8 <= min(found) <= max(found) <= 128
    assert max(found) > 3 * sorted(found)[64]


def test_decode_steps_are_those_of_slots_that_are_filled_again_at_once():
    assert simulated.decode_steps([4, 1, 1, 1], 1) == 7
    assert simulated.decode_steps([4, 1, 1, 1], 2) == 4
    assert simulated.decode_steps([1, 1, 1, 4], 2) == 5


def test_the_delay_makes_generation_as_long_as_training():
    lengths = simulated.lengths(8, 32)
    delay = simulated.balanced(3.0, lengths, 3)
    assert delay * simulated.decode_steps(lengths, 3) == pytest.approx(3.0, rel=1e-3)
    assert simulated.balanced(3.0, lengths, 8) == pytest.approx(3.0 / max(lengths), rel=1e-3)
