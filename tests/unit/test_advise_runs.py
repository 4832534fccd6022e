"""Advice on runs of every kind: a CSV, a periodic one, colocated ones, and ones that lack something."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from advise_runs import made, row, without_times

from metronome.advise.advise import advise
from metronome.advise.calibrate import calibrate
from metronome.advise.given import Given, split
from metronome.advise.measure import measure
from metronome.advise.text import text
from metronome.errors import ConfigurationError
from metronome.observe.words import duration

pytest.importorskip("simpy")


def test_a_run_that_is_periodic_already_says_so_and_what_it_gives():
    advice = advise(made("periodic"))
    periodic = row(advice, "periodic")
    assert periodic.verdict == "already on"
    assert periodic.gain.value > 1.2
    assert "metronome.rollout_source=periodic" not in text(advice).split("Why")[1].split("bounded staleness 1")[0]
    assert row(advise(made("synchronous")), "periodic").verdict == "turn on"


def test_a_colocated_run_is_told_that_periodic_needs_a_split():
    run = replace(made("synchronous"), source="colocated")
    run = replace(run, settings={**run.settings, "workers": 8, "slots": 4})
    advice = advise(run)
    assert advice.split is not None
    engines, ranks = advice.split
    assert engines + ranks == 8
    periodic = row(advice, "periodic")
    assert "at most 1.0x" in periodic.why
    assert f"{engines} for generation and {ranks} for training" in periodic.why
    assert periodic.gain.value <= 1.0
    assert periodic.verdict == "not worth it"


def test_one_device_cannot_be_split():
    run = replace(made("synchronous"), source="colocated")
    advice = advise(run)
    assert advice.split is None
    assert row(advice, "periodic").gain is None
    assert "can't be split" in row(advice, "periodic").why


def test_a_colocated_run_without_its_devices_names_what_to_give():
    run = replace(made("synchronous"), source="colocated", settings={})
    run = replace(run, rollouts=without_times(run).rollouts)
    with pytest.raises(ConfigurationError, match="workers=8"):
        advise(run)


def test_a_run_of_one_step_has_gains_without_an_interval():
    advice = advise(made("synchronous", steps=1))
    periodic = row(advice, "periodic")
    assert periodic.gain.low is None
    assert periodic.verdict == "not known"
    assert "not enough steps" in text(advice)


def test_an_empty_run_is_refused_in_one_line():
    with pytest.raises(ConfigurationError, match="no steps"):
        advise(replace(made("synchronous"), steps=(), rollouts=(), spans=()))


def test_a_run_without_clock_times_is_fitted_to_its_generation_and_says_what_it_assumed():
    advice = advise(without_times(made("synchronous")))
    assert advice.replayed is None
    assert row(advice, "periodic").method == "simulated"
    assert any("give half=N" in one for one in advice.base.assumed)
    assert "seconds of generation" in text(advice)


def test_a_run_without_generation_seconds_is_fitted_to_whole_steps():
    run = without_times(made("periodic"))
    run = replace(run, steps=tuple(replace(one, generation=None) for one in run.steps))
    advice = advise(run)
    assert "seconds of whole steps" in text(advice)
    assert advice.simulated.level < 0.02


def test_a_run_without_single_responses_draws_their_lengths_and_says_so():
    run = without_times(made("synchronous"))
    advice = advise(replace(run, rollouts=()))
    assert any("lengths are drawn" in one for one in advice.base.assumed)
    assert "stragglers are those of drawn lengths" in row(advice, "sagc_fixed_prompts").why
    wanted = sum(step.response_tokens for step in run.steps) / len(run.steps)
    drawn = [one for step in advice.base.steps for group in step.groups for one in group.responses]
    assert sum(drawn) / len(drawn) == pytest.approx(wanted, rel=0.15)
    bare = [replace(one, prompts=None, group_size=None) for one in run.steps]
    with pytest.raises(ConfigurationError, match="prompts=64"):
        advise(replace(run, rollouts=(), steps=tuple(bare)))


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"source": None}, "source=synchronous"),
        ({"training": None}, "training_seconds=12.5"),
    ],
)
def test_what_is_missing_is_named_with_an_example(changes, remedy):
    run = made("periodic")
    if "training" in changes:
        run = replace(run, steps=tuple(replace(one, training=None) for one in run.steps))
    else:
        run = replace(run, **changes)
    with pytest.raises(ConfigurationError, match=remedy):
        advise(run)


def test_what_is_given_stands_over_what_was_recorded():
    run = replace(made("periodic"), spans=())
    lacking = replace(run, steps=tuple(replace(one, training=None) for one in run.steps))
    mean = sum(one.training for one in run.steps) / len(run.steps)
    advice = advise(lacking, Given(training_seconds=mean))
    assert row(advice, "periodic").gain.value == pytest.approx(row(advise(run), "periodic").gain.value, rel=0.05)


def test_a_model_that_is_far_off_says_that_its_gains_are_not_to_be_relied_upon():
    run = made("periodic")
    steps = [replace(one, seconds=1.5 * one.seconds, waiting=one.waiting + 0.5 * one.seconds) for one in run.steps]
    slow = replace(run, steps=tuple(steps))
    advice = advise(slow)
    assert not advice.replayed.trusted
    assert "not to be relied upon" in " ".join(text(advice).split())
    assert {one.verdict for one in advice.rows if one.method} <= {"not known", "already on"}
    assert advise(run).replayed.trusted
    assert "relied upon" not in text(advise(run))


def test_seconds_that_no_part_names_are_said_and_taken_as_serial():
    run = made("synchronous")
    longer = replace(run, steps=tuple(replace(one, seconds=one.seconds + 3.0) for one in run.steps))
    assert re.search(r"3 s a step \(\d+ %\) belong to no recorded part", text(advise(longer)))
    assert "everything stands still" not in text(advise(longer))
    much = replace(run, steps=tuple(replace(one, seconds=one.seconds + 20.0) for one in run.steps))
    assert "intervals reach to where everything stands still" in " ".join(text(advise(much)).split())
    assert "no recorded part" not in text(advise(run))
    gain, before = row(advise(longer), "periodic").gain.value, row(advise(run), "periodic").gain.value
    mean = sum(one.seconds for one in run.steps) / len(run.steps)
    assert gain == pytest.approx((mean + 3.0) / (mean / before + 3.0), rel=1e-9)


def unnamed(run, seconds):
    """``run`` with so many more seconds in each step, that no part names."""
    return replace(run, steps=tuple(replace(one, seconds=one.seconds + seconds) for one in run.steps))


def test_the_interval_holds_the_case_in_which_unnamed_seconds_overlap_with_nothing():
    run = made("synchronous", prompt=2)
    paused = [replace(one, seconds=one.seconds + 12.0, publication=one.publication + 12.0) for one in run.steps]
    for key in ("bounded_1", "bounded_2"):
        found = row(advise(unnamed(run, 12.0)), key).gain
        worst = row(advise(replace(run, steps=tuple(paused))), key).gain.value
        assert found.value > 1.05 * worst  # so that the case matters
        assert found.low <= worst <= found.high
    # Negative control: few such seconds leave the interval as narrow as it was.
    assert len(calibrate(unnamed(run, 12.0), Given()).ends()) == 1 + len(calibrate(unnamed(run, 3.0), Given()).ends())


def test_idle_shares_name_their_denominator_where_much_of_the_time_is_in_no_part():
    run = made("synchronous")
    facts = measure(unnamed(run, 20.0))
    total = sum(one.seconds for one in run.steps)
    assert facts.unrecorded == pytest.approx(6 * 20.0 / (total + 6 * 20.0), rel=1e-12)
    said = f"of the steps' {duration(total + 6 * 20.0)}, of which {100 * facts.unrecorded:.0f} % is in no recorded part"
    assert said in text(advise(unnamed(run, 20.0)))
    assert measure(run).unrecorded == pytest.approx(0.0, abs=1e-12)
    assert "of the steps'" not in text(advise(run))
    untimed = replace(run, steps=tuple(replace(one, training=None) for one in run.steps))
    assert measure(untimed).unrecorded is None


def test_a_colocated_run_needs_a_split_for_every_source_that_overlaps():
    run = replace(made("synchronous"), source="colocated")
    run = replace(run, settings={**run.settings, "workers": 8})
    advice = advise(run)
    engines, ranks = advice.split
    for key in ("periodic", "bounded_1", "bounded_2", "bounded_4", "together"):
        assert "needs a split" in row(advice, key).changes
        assert f"{engines} for generation and {ranks} for training" in row(advice, key).why
    for key in ("shared_prompt", "sagc_fixed_prompts"):
        assert "split" not in row(advice, key).changes + row(advice, key).why
    assert "split" not in text(advise(made("synchronous")))


def test_what_was_never_held_against_a_run_says_so():
    advice = advise(made("synchronous"))
    for one in advice.rows:
        assert ("never held against a run" in one.why) == one.key.startswith("bounded")
    assert text(advice).count("fitted to this run; no proof of the gains") == 1


def test_groups_of_one_response_are_refused():
    with pytest.raises(ConfigurationError, match="groups of one response"):
        advise(made("synchronous", size=1))


def test_facts_are_those_of_the_records():
    run = made("synchronous", steps=2, prompts=2, size=4, sigma=0.0)
    facts = measure(run)
    assert (facts.steps, facts.groups, facts.rollouts) == (2, 4, 16)
    assert facts.straggler_ratio == 1.0
    assert facts.straggler_rate == 0.0
    assert facts.degenerate == 0.0
    assert (facts.staleness_mean, facts.staleness_max) == (0.0, 0)
    assert facts.trainer_idle == pytest.approx(run.steps[0].waiting / run.steps[0].seconds)
    # Two prompts of four responses of 20 tokens at 10 tokens/s and 4 slots: 4 s of each step.
    assert facts.rollout_idle == pytest.approx(1 - 4.0 / run.steps[0].seconds)
    one = replace(run.rollouts[0], response_tokens=50, version=0, trained_version=3)
    other = measure(replace(run, rollouts=(one, *run.rollouts[1:])))
    assert other.straggler_ratio == pytest.approx((2.5 + 3) / 4)
    assert other.straggler_rate == 0.25
    assert other.staleness_max == 3
    alike = [replace(one, reward=1.0) for one in run.rollouts]
    assert measure(replace(run, rollouts=tuple(alike))).degenerate == 1.0


def test_a_technique_that_is_on_is_not_advised_again():
    shared = made("synchronous", attention="shared_prompt", group_controller="sagc")
    advice = advise(shared)
    assert row(advice, "shared_prompt").verdict == "already on"
    assert row(advice, "sagc_fixed_rollouts").verdict == "already on"


def test_keys_of_the_command_line_are_checked():
    given, rest = split(["training_seconds=3", "workers=4", "attention_share=0.25"])
    assert (given.training_seconds, given.attention_share, rest) == (3.0, 0.25, ["workers=4"])
    for wrong, match in (
        ("trainingseconds=3", "training_seconds"),
        ("training_seconds=0", "training_seconds=12.5"),
        ("training_seconds=.nan", "training_seconds=12.5"),
        ("attention_share=2", "0 to 1"),
        ("half=many", "half=12.5"),
    ):
        with pytest.raises(ConfigurationError, match=match):
            split([wrong])
