"""What the report derives from a record, and whether two runs did the same work."""

from dataclasses import replace

import pytest
from report_records import made, without_times

from metronome.observe.comparison import same_work, summary
from metronome.observe.measures import CLIPPED, Measured, measure
from metronome.observe.readers import TRACES, read_run
from metronome.observe.records import RunRecord, Step
from metronome.observe.weights import table
from metronome.observe.words import change, duration, number, percent


def one(**changes):
    return Measured(made(**changes), "made")


def with_steps(run, **changes):
    return replace(run, steps=tuple(replace(step, **changes) for step in run.steps))


def summary_of(*runs):
    made_table, sentences = summary(measure(runs))
    return {row[0]: row[1:] for row in made_table.rows}, made_table.headers, sentences


def test_a_group_straggles_only_above_twice_its_median():
    assert one().straggler_rate == {0: 0.5, 1: 0.5}  # 2.1 does, exactly 2 doesn't


def test_single_responses_have_no_straggler_rate():
    run = made()
    assert Measured(replace(run, rollouts=run.rollouts[:1]), "made").straggler_rate == {}


def test_staleness_counts_versions_between_sampling_and_training():
    assert dict(one().counts.staleness) == {0: 8, 1: 8}
    assert one().mean_staleness == 0.5


def test_staleness_without_versions_is_the_hosts_own_metric():
    run = made()
    bare = replace(run, rollouts=tuple(replace(each, version=None) for each in run.rollouts))
    assert Measured(bare, "made").mean_staleness is None
    told = with_steps(bare, metrics={"metronome/loss/staleness": 1.5})
    assert Measured(told, "made").mean_staleness == 1.5


def test_the_trainers_idle_share_is_its_recorded_waiting():
    assert one().trainer_idle == {0: 0.25, 1: 0.25}
    assert Measured(with_steps(made(), waiting=2.0), "made").trainer_idle_share == 0.5


def test_without_recorded_waiting_the_lane_tells_the_idle_share():
    run = with_steps(made(), waiting=None)
    assert Measured(run, "made").trainer_idle_share == pytest.approx(0.25, abs=1e-12)
    assert Measured(without_times(run), "made").trainer_idle_share is None


def test_an_idle_share_weighs_steps_by_their_seconds():
    steps = (Step(0, 1.0, waiting=1.0), Step(1, 9.0, waiting=0.0))
    assert Measured(RunRecord("two", "local", None, steps), "two").trainer_idle_share == 0.1  # not 0.5


def test_reward_and_group_size_come_from_the_rollouts_where_steps_lack_them():
    run = with_steps(made(), reward=None, group_size=None)
    assert Measured(run, "made").rewards == {0: 0.25, 1: 0.25}
    assert Measured(run, "made").group_sizes == {0: 4.0, 1: 4.0}
    assert one().rewards == {0: 0.25, 1: 0.75}


def test_figures_that_are_not_finite_are_left_out():
    run = with_steps(made(rollouts=()), reward=float("nan"), metrics={"loss/clipped": float("inf")})
    assert Measured(run, "made").rewards == {}
    assert Measured(run, "made").metric(("loss/clipped",)) == {}


def test_every_hosts_names_are_known():
    for names in (
        {"loss/clipped": 0.5, "tokens_computed": 10.0, "tokens_separate": 20.0},
        {
            "metronome/loss/clipped": 0.5,
            "metronome/attention/tokens_fed": 10.0,
            "metronome/attention/tokens_separate": 20.0,
        },
        {
            "ppo_actor/update/metronome/loss/clipped": 0.5,
            "ppo_actor/metronome/attention/tokens_fed": 10.0,
            "ppo_actor/metronome/attention/tokens_separate": 20.0,
        },
    ):
        measured = Measured(with_steps(made(), metrics=names), "made")
        assert measured.sharing == {0: 2.0, 1: 2.0}
        assert measured.sharing_whole == 2.0
        assert measured.metric(CLIPPED) == {0: 0.5, 1: 0.5}
    other = Measured(with_steps(made(), metrics={"critic/loss/clipped": 0.5}), "made")
    assert other.metric(CLIPPED) == {}


def test_a_step_of_no_seconds_has_no_idle_share():
    steps = (Step(0, 0.0, waiting=0.0), Step(1, 2.0, waiting=1.0))
    assert Measured(RunRecord("two", "local", None, steps), "two").trainer_idle == {1: 0.5}


def test_runs_of_one_name_get_numbers():
    assert [each.label for each in measure([made("a"), made("b"), made("a")])] == ["a (1)", "b", "a (2)"]


def test_the_same_work_is_said_to_be_the_same():
    rows, headers, sentences = summary_of(made("slow"), with_steps(made("fast"), seconds=2.0))
    assert headers == ("Figure", "slow", "fast", "Ratio to slow (same work)")
    assert rows["Time of all steps"] == ("8 s", "4 s", "0.50")
    assert rows["Response tokens a second"] == ("25.25", "50.5", "2.00")
    assert "The same work" in sentences[0]
    assert "202 in all" in sentences[0]


def longer(run):
    first, *others = run.rollouts
    return replace(run, rollouts=(replace(first, response_tokens=first.response_tokens + 1), *others))


def other_prompt(run):
    return replace(run, rollouts=(replace(run.rollouts[0], prompt="c"), *run.rollouts[1:]))


def longer_prompt(run):
    return replace(run, rollouts=(replace(run.rollouts[0], prompt_tokens=6), *run.rollouts[1:]))


def fewer_steps(run):
    return replace(run, steps=run.steps[:1], rollouts=run.rollouts[:8], spans=run.spans[:2])


@pytest.mark.parametrize("change_", [longer, other_prompt, longer_prompt, fewer_steps])
def test_different_work_is_labelled(change_):
    _, headers, sentences = summary_of(made("a"), change_(made("b")))
    assert headers[-1] == "Ratio to a (different work)"
    assert "different work" in sentences[0]
    assert "he same work" not in sentences[0]


def test_tokens_that_only_balance_over_the_run_are_different_work():
    run = longer(made())
    last = run.rollouts[-1]
    balanced = replace(run, rollouts=(*run.rollouts[:-1], replace(last, response_tokens=last.response_tokens - 1)))
    assert Measured(balanced, "b").total_response_tokens == one().total_response_tokens
    assert same_work(one(), Measured(balanced, "b")).same is False


def test_runs_without_rollouts_cannot_be_compared():
    _, headers, sentences = summary_of(made("a"), made("b", rollouts=()))
    assert headers[-1] == "Ratio to a (work not comparable)"
    assert "b recorded no rollouts" in sentences[0]


def test_a_group_size_that_moved_has_its_mean():
    run = made()
    moved = replace(run, steps=(*(replace(step, group_size=8) for step in run.steps[:1]), *run.steps[1:]))
    assert summary_of(moved)[0]["Group size G, first to last step"] == ("8 to 4, mean 6",)
    assert summary_of(run)[0]["Group size G, first to last step"] == ("4",)


def test_what_a_run_lacks_stands_as_not_recorded():
    bare = RunRecord("bare", "verl", None, (Step(0, 2.0),))
    rows, _, _ = summary_of(bare)
    for name in ("Rollouts", "Response tokens", "Trainer idle", "Workers idle, mean", "Staleness, mean (versions)"):
        assert rows[name] == ("not recorded",)
    assert rows["Steps"] == ("1",)


def test_fingerprints_tell_changed_from_equal_and_compare_runs():
    held = made("held")
    held = replace(held, steps=tuple(replace(step, fingerprint="mark 0") for step in held.steps))
    marks, sentences = table(measure([made("moved"), held]))
    assert marks.rows == (("0", "mark 0", "", "mark 0", ""), ("1", "mark 1", "changed", "mark 0", "equal"))
    assert sentences == (
        "moved: the weights changed at 1 of 1 publication after the first.",
        "held: the weights changed at 0 of 1 publication after the first.",
        "held and moved: equal weights after 1 of 2 common steps.",
    )


def test_hosts_without_fingerprints_tell_by_their_own_metric():
    run = with_steps(made(), fingerprint=None, metrics={"metronome/weights/changed": 1.0})
    marks, sentences = table(measure([run]))
    assert [row[2] for row in marks.rows] == ["changed", "changed"]
    assert sentences == ("made: the weights changed at 2 of 2 publications.",)


def test_no_word_of_weights_is_no_table():
    assert table(measure([with_steps(made(), fingerprint=None)])) == (None, ())


def test_figures_are_written_with_their_units():
    assert [percent(share) for share in (0.0, 1.0, 0.5, 0.055, 0.999, None)] == [
        "0 %",
        "100 %",
        "50 %",
        "5.5 %",
        "99.9 %",
        "not recorded",
    ]
    assert [duration(seconds) for seconds in (0.1234, 59.94, 61, 3725)] == [
        "0.123 s",
        "59.9 s",
        "1 min 01 s",
        "1 h 02 min",
    ]
    assert [number(value) for value in (12, 0.123456, 1234.56, 1e6)] == ["12", "0.1235", "1,234.6", "1,000,000"]
    assert change([4.0, 4.0]) == "4"
    assert change([8.0, 4.0, 8.0]) == "8 to 8"
    assert change([]) == "not recorded"


def test_a_small_ratio_keeps_two_digits():
    first, fast = made("a"), made("b")
    fast = replace(fast, steps=tuple(replace(step, seconds=step.seconds / 400) for step in fast.steps))
    rows, _, _ = summary_of(first, fast)
    assert rows["Seconds of a step, mean"][-1] == "0.0025"
    assert rows["Rollouts"][-1] == "1.00"


@pytest.mark.parametrize("name", ["verl", "openrlhf", "local_synchronous", "local_periodic"])
def test_the_summary_the_lanes_and_the_recorded_parts_have_one_denominator(name):
    run = read_run(TRACES / name)
    whole = sum(step.seconds for step in run.steps)
    shown = Measured(run, name)
    trainer, *workers = shown.lanes.lanes
    assert shown.trainer_idle_share == pytest.approx(sum(step.waiting for step in run.steps) / whole, abs=1e-9)
    assert trainer.idle_share == pytest.approx(shown.trainer_idle_share, abs=0.01)
    assert [worker.idle_share for worker in workers] == pytest.approx([shown.worker_idle_share], abs=1e-9)
    if run.laid:  # in turns: the worker generates while the trainer waits, and only then
        assert shown.worker_idle_share == pytest.approx(1 - shown.trainer_idle_share, abs=1e-6)
