"""Seconds of a group whatever its tokens: found where groups tell, and what they change in the advice."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from advise_runs import TRAINING, made, made_half, mean_seconds, row

from metronome.advise.advise import advise
from metronome.advise.calibrate import calibrate
from metronome.advise.decode import Observed, fit
from metronome.advise.figures import as_json
from metronome.advise.given import Given
from metronome.advise.group_cost import LEAST, group_cost
from metronome.advise.group_cost import fit as fit_line
from metronome.advise.lengths import step_groups
from metronome.advise.model import predicted
from metronome.advise.text import text
from metronome.observe.readers import read_run
from metronome.simulate.cluster import Engines, LawCurve
from metronome.simulate.lengths import Group
from metronome.simulate.policy import Policy

pytest.importorskip("simpy")

FIXED = 1.5
SHARED = Policy(source="synchronous", shared_prompt=True)
SYNCHRONOUS = Policy(source="synchronous")


def spanless(run):
    """The same without single groups' seconds of training."""
    return replace(run, spans=tuple(one for one in run.spans if one.lane != "trainer"))


# --- the line -------------------------------------------------------------------------------------------


def test_a_known_line_is_found_and_no_other():
    tokens = [80, 95, 120, 133, 150, 171, 64, 101]
    found = fit_line(tokens, [0.3 + 0.01 * one for one in tokens])
    assert found.fixed == pytest.approx(0.3, rel=1e-9)
    assert found.per_token == pytest.approx(0.01, rel=1e-9)
    assert (found.low, found.high) == (pytest.approx(0.3, rel=1e-6), pytest.approx(0.3, rel=1e-6))
    assert found.error < 1e-9
    # Negative control: the same seconds dealt out to other groups.
    dealt = fit_line(tokens, [0.3 + 0.01 * one for one in tokens[3:] + tokens[:3]])
    assert dealt is None or dealt.fixed > 0.6


def test_neither_part_is_negative():
    tokens = [80, 95, 120, 133, 150, 171, 64, 101]
    through_nothing = fit_line(tokens, [0.01 * one - 0.2 for one in tokens])
    assert through_nothing.fixed == 0.0 == through_nothing.low
    assert 0.0 < through_nothing.per_token < 0.01
    falling = fit_line(tokens, [3.0 - 0.001 * one for one in tokens])
    assert falling.per_token == 0.0
    assert falling.fixed == falling.high == pytest.approx(np.mean([3.0 - 0.001 * one for one in tokens]))


def test_the_interval_holds_the_truth_nine_times_in_ten():
    draw, held, widths = random.Random(0), 0, []
    for _ in range(500):
        tokens = [draw.uniform(60, 140) for _ in range(12)]
        found = fit_line(tokens, [0.4 + 0.01 * one + draw.gauss(0.0, 0.04) for one in tokens])
        held += found.low <= 0.4 <= found.high
        widths.append(found.high - found.low)
    assert 0.86 < held / 500 < 0.94
    assert np.mean(widths) < 0.2  # an interval that says something


@pytest.mark.parametrize(
    ("tokens", "seconds"),
    [
        (range(80, 80 + LEAST - 1), [1.0 + 0.01 * one for one in range(LEAST - 1)]),
        ([100] * 12, [1.0 + 0.01 * one for one in range(12)]),
        ([100, 101] * 6, [1.0, 1.3, 1.2, 0.8, 0.7, 1.1] * 2),
    ],
    ids=["too few", "all alike", "noise"],
)
def test_groups_that_do_not_tell_give_no_line(tokens, seconds):
    assert fit_line(list(tokens), seconds) is None


# --- in a run -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["synchronous", "periodic"])
def test_the_fixed_seconds_of_a_run_are_found_and_its_sum_is_the_recorded_one(source):
    base = calibrate(made(source, fixed=FIXED), Given())
    trainer = base.cluster.trainer
    assert trainer.seconds_per_group == pytest.approx(FIXED, rel=1e-9)
    assert trainer.seconds_per_token == pytest.approx(TRAINING, rel=1e-9)
    for number, (of_step, times) in enumerate(zip(base.steps, base.times, strict=True)):
        alone = base.of_step(number, base.cluster)[0].trainer
        tokens = sum(of_step.fed(shared=False, padded=False))
        total = len(of_step.groups) * alone.seconds_per_group + tokens * alone.seconds_per_token
        assert total == pytest.approx(times.training, rel=1e-12)


def test_a_slow_first_step_is_left_out_of_more_than_three():
    for steps, close in ((6, True), (3, False)):
        run = made("synchronous", fixed=FIXED, steps=steps)
        slow = [replace(one, end=one.end + 3.0) if one.step == 0 and one.kind == "train" else one for one in run.spans]
        found = calibrate(replace(run, spans=tuple(slow)), Given()).cost
        assert (found is not None and found.fixed == pytest.approx(FIXED, rel=1e-9)) == close


def test_shared_prompts_save_nothing_of_the_fixed_seconds():
    known = made("synchronous", prompt=200, fixed=FIXED)
    tokens = sum(one.response_tokens for one in known.rollouts)
    saved = TRAINING * 200 * len(known.rollouts) * 3 / 4
    seconds = sum(step.seconds for step in known.steps)
    expected = seconds / (seconds - saved)
    assert tokens > 0
    assert predicted(known, SHARED).value == pytest.approx(expected, rel=1e-9)
    # Negative control: without single groups' seconds the gain is an upper bound, and says so.
    assert predicted(spanless(known), SHARED).value > 1.05 * expected


def test_half_of_a_group_costs_the_fixed_seconds_once_more():
    known = made("synchronous", size=4, fixed=FIXED)
    measured = mean_seconds(known) / made_half(known, FIXED)
    assert predicted(known, SYNCHRONOUS, group_size=2).value == pytest.approx(measured, rel=0.03)
    assert predicted(spanless(known), SYNCHRONOUS, group_size=2).value > 1.1 * measured


def test_what_the_groups_leave_open_widens_the_interval_of_what_changes_the_work_alone():
    draw, known = random.Random(1), made("synchronous", prompt=200, fixed=FIXED)
    spans, steps = [], []
    for one in known.spans:
        longer = draw.gauss(0.0, 0.4) if one.kind == "train" else 0.0
        spans.append(replace(one, end=one.end + longer))
    for step in known.steps:
        training = sum(one.end - one.start for one in spans if one.kind == "train" and one.step == step.number)
        steps.append(replace(step, training=training, seconds=step.seconds + training - step.training))
    noisy = replace(known, spans=tuple(spans), steps=tuple(steps))
    cost = calibrate(noisy, Given()).cost
    assert cost.low < FIXED < cost.high
    sharp, wide = (predicted(one, SHARED) for one in (known, noisy))
    assert wide.low < sharp.value < wide.high
    assert wide.high / wide.low > 1.1 > sharp.high / sharp.low
    periodic = predicted(noisy, Policy(source="periodic"))
    assert periodic.high / periodic.low < 1.05  # from the run's own work, whatever its parts


# --- what is said ---------------------------------------------------------------------------------------


def test_the_text_and_the_json_tell_the_fixed_seconds():
    advice = advise(made("synchronous", fixed=FIXED))
    shown, figures = " ".join(text(advice).split()), as_json(advice)["model"]
    assert "20 ms a token and 1.5 s a group whatever its tokens (90 %: 1.5 to 1.5 s; ours)" in shown
    assert "fitted to the seconds of 40 groups (0.0 % off)" in shown
    assert "upper bound" not in shown
    assert "1.5 s of each group's training are taken as fixed" in row(advice, "shared_prompt").why
    assert figures["seconds_per_group"] == pytest.approx(FIXED)
    assert figures["group_cost"]["groups"] == 40


def test_without_single_groups_seconds_the_gains_are_called_upper_bounds():
    advice = advise(spanless(made("synchronous", fixed=FIXED)))
    shown = " ".join(text(advice).split())
    assert "training is proportional to tokens (no group's own seconds are recorded)" in shown
    assert "gains of shared prompts and of a smaller G are upper bounds" in shown
    assert "the gain is an upper bound" in row(advice, "shared_prompt").why
    assert "the gain is an upper bound" in row(advice, "sagc_fixed_prompts").why
    assert as_json(advice)["model"]["group_cost"] is None


@pytest.mark.parametrize("name", ["local_synchronous", "local_periodic"])
def test_the_shipped_runs_tell_their_fixed_seconds(name):
    base = calibrate(read_run(name), Given())
    assert 0.0 < base.cost.low < base.cost.fixed < base.cost.high < base.cost.seconds
    assert base.cost.groups == 7 * 12
    assert [one.step.fed_tokens for one in base.steps][:2] == [1312, 1330]  # tokens_computed of metrics.jsonl
    assert base.cluster.engines.prefix_cache
    assert base.cluster.engines.prefill_stops_decoding


def test_prompts_of_which_only_a_mean_is_known_give_no_line():
    run = made("synchronous", fixed=FIXED)
    bare = [replace(one, prompt_tokens=None) for one in run.rollouts]
    alike = replace(run, rollouts=tuple(bare))
    assert calibrate(alike, Given()).cost is not None
    mixed = [replace(one, prompt_tokens=20.5) for one in run.steps]
    base = calibrate(replace(alike, steps=tuple(mixed)), Given())
    assert base.cost is None
    assert any("no group's own tokens are recorded" in one for one in base.assumed)


# --- padding --------------------------------------------------------------------------------------------


def fed(run, count):
    """``run`` with the tokens that each step fed, ``count(responses)`` of a group with prompts of 20."""
    steps = []
    for step in run.steps:
        groups: dict[str, list[int]] = {}
        for one in run.rollouts:
            if one.step == step.number:
                groups.setdefault(one.prompt, []).append(one.response_tokens)
        steps.append(replace(step, fed_tokens=sum(map(count, groups.values()))))
    return replace(run, steps=tuple(steps))


def test_padding_is_seen_in_the_tokens_that_were_fed():
    run = made("synchronous")
    for count, padded in ((lambda g: 4 * (20 + max(g)), True), (lambda g: 80 + sum(g), False)):
        base = calibrate(fed(run, count), Given())
        assert base.cluster.trainer.padded is padded
        said = any("padded to their group's longest" in one for one in base.measured)
        assert said is padded
    other = fed(run, lambda g: 7 + sum(g))
    steps = step_groups(other, Given(), [])[0]
    assert group_cost(other, steps, shared=False, padded=None)[0] is None
    assert calibrate(other, Given()).cost is None


def test_a_shared_prompt_saves_the_padding_too():
    run = made("synchronous", sigma=0.8)
    padded = spanless(fed(run, lambda g: 4 * (20 + max(g))))
    assert predicted(padded, SHARED).value > 1.05 * predicted(spanless(run), SHARED).value


# --- reading prompts ------------------------------------------------------------------------------------


def observed(engines, batches=6):
    """Groups of two and of six, of different prompts, on ``engines``, and when they ended."""
    from metronome.advise.decode import _replayed

    draw, found = random.Random(0), []
    for _ in range(batches):
        groups = tuple(
            Group(draw.randint(20, 400), tuple(draw.randint(5, 60) for _ in range(draw.choice([2, 6]))))
            for _ in range(8)
        )
        bare = Observed(groups, (0.0,) * 8, (1.0,) * 8)
        found.append(Observed(groups, (0.0,) * 8, tuple(_replayed(engines, bare, 0.0).tolist())))
    return found


def engines(**changes):
    decode = LawCurve(tokens_per_second=20.0, half=8.0)
    return Engines(count=1, slots=4, decode=decode, prefill_seconds_per_token=0.1 / 20.0, **changes)


def test_a_prompt_read_once_a_group_is_fitted_by_engines_that_do_so():
    true = engines(prefix_cache=True, prefill_stops_decoding=True)
    seen = observed(true)
    right, wrong = fit(seen, true, None), fit(seen, engines(), None)
    assert right.prefill == pytest.approx(0.005, rel=0.01)
    assert right.error < 1e-3
    assert right.dearest is None
    assert wrong.error > 20 * right.error


def test_prompts_and_groups_that_are_alike_leave_open_what_reading_costs():
    base = calibrate(read_run("local_synchronous"), Given())
    assert base.dearest is not None
    assert base.dearest.prefill_seconds_per_token > base.cluster.engines.prefill_seconds_per_token
    assert any("the record leaves open up to" in one for one in base.measured)
    low, high = base.ends()
    assert low.cluster.engines == base.cluster.engines
    assert high.cluster.engines == base.dearest
    assert low.cluster.trainer.seconds_per_group < high.cluster.trainer.seconds_per_group
