"""Held out: the gain predicted from one shipped record against the measurement of the configuration that wasn't in it.

Both are runs of the local host on real models with the same prompts and lengths, synchronous and periodic
(``metronome.observe.traces``); the second is never looked at for the prediction.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from advise_runs import mean_seconds, without_times

from metronome.advise.model import predicted
from metronome.observe.readers import read_run
from metronome.simulate.policy import Policy

pytest.importorskip("simpy")

TOLERANCE = 0.10
PAIRS = [("synchronous", "periodic"), ("periodic", "synchronous")]


@pytest.fixture(scope="module")
def runs():
    return {name: read_run(f"local_{name}") for name in ("synchronous", "periodic")}


def off(known, held_out, source):
    """Predicted over measured, minus 1."""
    shared = known.settings["attention"] == "shared_prompt"
    measured = mean_seconds(known) / mean_seconds(held_out)
    return predicted(known, Policy(source=source, shared_prompt=shared)).value / measured - 1.0


def test_the_shipped_pair_did_the_same_work(runs):
    def lengths(run):
        return sorted((one.prompt, one.response_tokens) for one in run.rollouts)

    assert lengths(runs["synchronous"]) == lengths(runs["periodic"])
    # A pair without a gain would pass whatever was predicted.
    assert mean_seconds(runs["synchronous"]) / mean_seconds(runs["periodic"]) > 1 + 2 * TOLERANCE


@pytest.mark.parametrize(("known", "held_out"), PAIRS)
def test_the_gain_of_a_configuration_that_was_not_run_is_predicted_within_ten_in_a_hundred(runs, known, held_out):
    assert abs(off(runs[known], runs[held_out], held_out)) < TOLERANCE


@pytest.mark.parametrize(("known", "held_out"), PAIRS)
def test_so_it_is_by_the_simulator_alone_from_lengths_and_seconds_of_steps(runs, known, held_out):
    assert abs(off(without_times(runs[known]), runs[held_out], held_out)) < TOLERANCE


def test_the_measured_gain_lies_in_the_interval_widened_by_the_tolerance(runs):
    gain = predicted(runs["synchronous"], Policy(source="periodic", shared_prompt=True))
    measured = mean_seconds(runs["synchronous"]) / mean_seconds(runs["periodic"])
    assert gain.low / (1 + TOLERANCE) < measured < gain.high * (1 + TOLERANCE)
    assert gain.high / gain.low < 1.25  # an interval that says something


def test_a_record_whose_times_are_scaled_predicts_another_gain(runs):
    """Negative control: training takes a third, and the step that much less."""
    known = runs["synchronous"]
    steps = [replace(one, training=one.training / 3, seconds=one.seconds - one.training * 2 / 3) for one in known.steps]
    scaled = replace(known, steps=tuple(steps), spans=())
    right = mean_seconds(known) / mean_seconds(runs["periodic"])
    assert abs(predicted(scaled, Policy(source="periodic", shared_prompt=True)).value / right - 1.0) > TOLERANCE


def test_a_record_whose_groups_arrive_together_predicts_another_gain(runs):
    """Negative control: every group ends when its step's last one does."""
    known = runs["synchronous"]
    ends = {}
    for one in known.rollouts:
        ends[one.step] = max(ends.get(one.step, 0.0), one.end)
    late = replace(known, rollouts=tuple(replace(one, end=ends[one.step]) for one in known.rollouts))
    assert abs(off(late, runs["periodic"], "periodic")) > TOLERANCE


def test_shuffled_arrivals_are_found_out_by_the_calibration(runs):
    """Negative control: ends dealt out among a step's groups no longer fit the lengths' order."""
    from metronome.advise.calibrate import calibrate
    from metronome.advise.given import Given

    known, deal = runs["synchronous"], random.Random(0)
    new = {}
    for number in {one.step for one in known.rollouts}:
        ends = {one.prompt: one.end for one in known.rollouts if one.step == number}
        shuffled = list(ends.values())
        deal.shuffle(shuffled)
        new |= {(number, prompt): end for prompt, end in zip(ends, shuffled, strict=True)}
    dealt = replace(known, rollouts=tuple(replace(one, end=new[one.step, one.prompt]) for one in known.rollouts))
    right, wrong = calibrate(known, Given()).decode_error, calibrate(dealt, Given()).decode_error
    assert right < 0.1
    assert wrong > 3 * right


def test_the_page_of_results_has_the_figures_of_the_live_check():
    root = Path(__file__).parents[2] / "docs" / "results"
    page = (root / "README.md").read_text(encoding="utf-8")
    for one in json.loads((root / "advise.json").read_text(encoding="utf-8"))["pairs"]:
        gain = f"| {one['predicted']:.3f}x ({one['low']:.3f} to {one['high']:.3f}) | {one['measured']:.3f}x "
        assert f"{gain}| {100 * one['off']:+.1f} % |" in page
