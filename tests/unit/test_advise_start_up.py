"""Leading steps that start something up don't decide what pays."""

from __future__ import annotations

from dataclasses import replace

import pytest
from advise_runs import made, row, without_times

from metronome.advise.advise import advise
from metronome.advise.calibrate import calibrate
from metronome.advise.given import Given
from metronome.advise.start_up import SLOW
from metronome.advise.text import text
from metronome.observe.readers import read_run

pytest.importorskip("simpy")


def stretched(run, factors):
    """``run`` with ``{place: factor}`` times the seconds of its steps; what is added belongs to no part."""
    steps = [replace(one, seconds=one.seconds * factors.get(place, 1.0)) for place, one in enumerate(run.steps)]
    return replace(run, steps=tuple(steps))


def without_first(run, count):
    """``run`` as if its first steps hadn't been recorded."""
    gone = {one.number for one in run.steps[:count]}
    return replace(
        run,
        steps=run.steps[count:],
        rollouts=tuple(one for one in run.rollouts if one.step not in gone),
        spans=tuple(one for one in run.spans if one.step not in gone),
    )


def gains(run):
    return {one.key: one.gain for one in advise(run).rows}


@pytest.mark.parametrize("source", ["synchronous", "periodic"])
def test_advice_is_that_of_the_run_without_its_start_up(source):
    run = made(source, steps=7)
    for bare in (run, without_times(run)):
        slow = stretched(bare, {0: 8.0, 1: 5.0})
        assert gains(slow) == gains(without_first(bare, 2))
        # Negative control: what is as slow later is part of the run.
        assert gains(stretched(bare, {3: 8.0})) != gains(without_first(bare, 2))


def test_what_was_left_out_is_said_and_the_facts_are_of_all_steps():
    run = stretched(made("synchronous"), {0: 8.0})
    advice = advise(run)
    assert f"recorded step 1 took {run.steps[0].seconds:.3g} s, " in text(advice)
    assert "start-up, left out of the model" in " ".join(text(advice).split())
    assert len(advice.base.steps) == 5
    assert advice.facts.steps == 6
    assert "start-up" not in text(advise(made("synchronous")))


@pytest.mark.parametrize(
    ("factors", "steps", "kept"),
    [
        ({0: 1.3}, 6, 6),
        ({1: 8.0}, 6, 6),  # it doesn't lead
        ({0: 8.0}, 6, 5),
        ({0: 9.0, 1: 9.0, 2: 9.0}, 7, 4),
        ({0: 8.0}, 3, 2),
        ({0: 8.0}, 2, 2),  # which of two is usual can't be told
        ({0: 8.0}, 1, 1),
    ],
)
def test_only_leading_steps_are_left_out_and_two_must_follow(factors, steps, kept):
    base = calibrate(stretched(made("synchronous", steps=steps, sigma=0.1), factors), Given())
    assert len(base.steps) == kept


def test_a_long_step_with_as_many_more_tokens_is_kept():
    factor = 3
    assert factor > SLOW
    run = without_times(made("synchronous", sigma=0.1))
    long = [
        replace(one, response_tokens=factor * one.response_tokens, prompt_tokens=factor * one.prompt_tokens)
        if one.step == 0
        else one
        for one in run.rollouts
    ]
    assert len(calibrate(replace(stretched(run, {0: float(factor)}), rollouts=tuple(long)), Given()).steps) == 6


def test_the_start_up_of_the_shipped_verl_run_does_not_turn_its_verdict():
    run = read_run("verl", ["workers=2"])
    assert run.steps[0].seconds > 7 * run.steps[1].seconds
    usual = stretched(run, {0: 3.1 / run.steps[0].seconds})
    as_it_is, without = row(advise(run), "bounded_1"), row(advise(usual), "bounded_1")
    assert as_it_is.verdict == without.verdict == "not worth it"
    assert as_it_is.gain.value == pytest.approx(without.gain.value, rel=0.05)
