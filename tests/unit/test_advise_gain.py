"""Gains on runs whose other schedule is known exactly: made by hand, both of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from advise_runs import RATE, TRAINING, made, made_half, mean_seconds, row, without_times

from metronome.advise.advise import advise
from metronome.advise.calibrate import calibrate
from metronome.advise.given import Given
from metronome.advise.model import predicted
from metronome.simulate.policy import Policy

pytest.importorskip("simpy")

PERIODIC, SYNCHRONOUS = Policy(source="periodic"), Policy(source="synchronous")


def test_periodic_is_predicted_exactly_from_the_arrivals_of_a_synchronous_run():
    known, held_out = made("synchronous"), made("periodic")
    gain = predicted(known, PERIODIC)
    assert gain.value == pytest.approx(mean_seconds(known) / mean_seconds(held_out), abs=1e-9)
    assert gain.low <= gain.value <= gain.high
    assert gain.value > 1.2  # else everything that says 1 would pass


def test_synchronous_is_predicted_exactly_from_a_periodic_run():
    known, held_out = made("periodic"), made("synchronous")
    assert predicted(known, SYNCHRONOUS).value == pytest.approx(mean_seconds(known) / mean_seconds(held_out), abs=1e-9)


def test_other_arrivals_predict_another_gain():
    """Negative control: the same lengths and work, but every group arrives with the last one."""
    known = made("synchronous")
    last = {number: max(one.end for one in known.rollouts if one.step == number) for number in range(6)}
    late = replace(known, rollouts=tuple(replace(one, end=last[one.step]) for one in known.rollouts))
    right = mean_seconds(known) / mean_seconds(made("periodic"))
    assert predicted(late, PERIODIC).value == pytest.approx(1.0, abs=1e-9)
    assert abs(1.0 / right - 1.0) > 0.1


def test_without_clock_times_the_simulator_predicts_periodic_within_five_in_a_hundred():
    known, held_out = made("synchronous"), made("periodic")
    gain = predicted(without_times(known), PERIODIC)
    assert gain.value == pytest.approx(mean_seconds(known) / mean_seconds(held_out), rel=0.05)


def test_a_run_whose_training_takes_twice_as_long_predicts_another_gain():
    """Negative control of the one above."""
    known = without_times(made("synchronous"))
    slow = [replace(step, training=2 * step.training, seconds=step.seconds + step.training) for step in known.steps]
    right = mean_seconds(known) / mean_seconds(made("periodic"))
    assert abs(predicted(replace(known, steps=tuple(slow)), PERIODIC).value / right - 1.0) > 0.05


def test_the_decoding_speed_and_the_training_are_found_again():
    base = calibrate(made("synchronous"), Given())
    assert base.cluster.engines.decode.rate(1) == pytest.approx(RATE, rel=0.02)
    assert base.cluster.engines.decode.rate(4) == pytest.approx(RATE, rel=0.02)
    assert base.cluster.trainer.seconds_per_token == pytest.approx(TRAINING, rel=1e-9)
    assert base.decode_error < 0.02


def test_a_smaller_group_is_predicted_from_the_larger_ones_first_members():
    known = made("synchronous", size=4)
    halved = made_half(known)
    gain = predicted(known, SYNCHRONOUS, group_size=2)
    assert gain.value == pytest.approx(mean_seconds(known) / halved, rel=0.03)
    assert gain.value > 1.5


def test_shared_prompts_gain_what_their_tokens_say():
    known = made("synchronous", prompt=200)
    training = sum(step.training for step in known.steps)
    tokens = sum(one.response_tokens for one in known.rollouts)
    separate, shared = tokens + 200 * len(known.rollouts), tokens + 200 * len(known.rollouts) / 4
    seconds = sum(step.seconds for step in known.steps)
    expected = seconds / (seconds - training * (1 - shared / separate))
    assert predicted(known, Policy(source="synchronous", shared_prompt=True)).value == pytest.approx(expected, rel=1e-9)
    assert predicted(made("synchronous", prompt=1), Policy(source="synchronous", shared_prompt=True)).value < 1.05


def test_a_recomputed_proximal_policy_saves_its_own_seconds():
    known = made("synchronous")
    steps = [replace(one, proximal=2.0, seconds=one.seconds + 2.0) for one in known.steps]
    known = replace(known, steps=tuple(steps), spans=())
    found = row(advise(known), "a3po")
    assert found.gain.value == pytest.approx(mean_seconds(known) / (mean_seconds(known) - 2.0), rel=1e-9)
    assert "plain PPO" in found.why
    nothing = row(advise(made("synchronous")), "a3po")
    assert nothing.gain is None
    assert nothing.verdict == "not worth it"


def test_bounded_staleness_is_judged_by_what_it_gains_over_less():
    advice = advise(made("synchronous"))
    one, two = row(advice, "bounded_1"), row(advice, "bounded_2")
    assert one.than == "periodic asynchrony"
    assert two.than == "bounded staleness 1"
    assert two.gain.value > 1.1
    assert two.over.value < 1.03
    assert two.verdict == "no gain over bounded 1"
    assert row(advice, "bounded_4").verdict == "no gain over bounded 2"


def test_sagc_does_nothing_where_nothing_straggles():
    advice = advise(made("synchronous", sigma=0.0))
    for key in ("sagc_fixed_prompts", "sagc_fixed_rollouts"):
        assert row(advice, key).gain.value == pytest.approx(1.0, abs=1e-6)
        assert row(advice, key).verdict == "not worth it"
    straggling = row(advise(made("synchronous", sigma=1.0, size=8, steps=8)), "sagc_fixed_prompts")
    assert straggling.gain.value > 1.1
    assert straggling.per == "step"
    assert straggling.verdict == "try"


def test_an_error_of_the_model_widens_the_interval():
    import numpy as np

    from metronome.advise.gain import Computed, gain

    before = Computed(np.array([4.0, 5.0, 6.0]), np.ones(3))
    after = Computed(np.array([2.0, 3.0, 3.0]), np.ones(3))
    exact, off = gain(before, after, 0.0), gain(before, after, 0.2)
    assert exact.value == off.value == pytest.approx(15 / 8)
    assert off.low == pytest.approx(exact.low / 1.2)
    assert off.high == pytest.approx(exact.high * 1.2)
    assert gain(before, after, 0.0) == exact  # seeded
