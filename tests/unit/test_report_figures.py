"""The report's figures: what is drawn is what was measured, and none needs colours to be read."""

from dataclasses import replace
from itertools import combinations

import pytest
from report_records import laid_run, made, without_times

from metronome.observe import by_step, parts, staleness, timeline
from metronome.observe.figures import BACKGROUNDS, COLOURS, DASHES, KINDS, PATTERNS, SYMBOLS, filled, fold, look
from metronome.observe.measures import Measured, measure
from metronome.observe.records import Rollout, RunRecord, Span, Step


def one(**changes):
    return Measured(made(**changes), "made")


def traces(panel):
    return {trace["name"]: trace for trace in panel.figure["data"]}


def panels_of(*runs):
    made_panels, missing = by_step.panels(measure(runs))
    return {panel.key: panel for panel in made_panels}, missing


def test_bubbles_are_drawn_and_their_share_is_written():
    panel = timeline.panel(one(), "timeline")
    idle = traces(panel)["idle"]
    by_lane = dict.fromkeys(idle["y"], 0.0)
    for lane, seconds in zip(idle["y"], idle["x"], strict=True):
        by_lane[lane] += seconds
    assert by_lane == pytest.approx({"trainer<br>idle 25 %": 2.0, "worker 0<br>idle 62 %": 5.0}, abs=1e-4)
    assert "trainer: idle 25 % of the steps' time" in panel.alternative
    assert ("trainer", "idle", "0.000", "1.000", "1.000") in panel.table.rows
    assert ("trainer", "training", "1.000", "3.000", "2.000") in panel.table.rows


def test_a_worker_that_is_always_busy_has_no_bubble():
    spans = (Span("trainer", "train", 0.0, 4.0, 0), Span("worker 0", "generate", 0.0, 4.0, 0))
    run = RunRecord("busy", "local", None, (Step(0, 4.0),), spans=spans)
    panel = timeline.panel(Measured(run, "busy"), "timeline")
    assert "idle" not in traces(panel)
    assert "idle 0 %" in traces(panel)["generation"]["y"][0]


def test_a_timeline_zooms_to_each_step():
    assert timeline.panel(one(), "timeline").stretches == (("Step 0", 0.0, 4.0), ("Step 1", 4.0, 8.0))


def test_a_run_of_many_steps_begins_with_eight_in_view():
    def in_view(steps):
        spans = tuple(Span("trainer", "train", float(step), step + 0.5, step) for step in range(steps))
        run = RunRecord("long", "local", None, tuple(Step(step, 1.0) for step in range(steps)), spans=spans)
        return timeline.panel(Measured(run, "long"), "timeline").figure["layout"]["xaxis"]["range"]

    assert in_view(20) == [0.0, 7.5]
    assert in_view(12) == [0.0, 11.5]


def test_a_timeline_says_what_has_no_lane():
    trainer_only = timeline.panel(one(rollouts=()), "timeline")
    assert "workers' times were not recorded" in trainer_only.notes[0]
    workers_only = timeline.panel(one(spans=()), "timeline")
    assert "trainer's times were not recorded" in workers_only.notes[0]
    assert "not recorded" not in " ".join(timeline.panel(one(), "timeline").notes)


def test_a_timeline_of_parts_laid_end_to_end_draws_and_says_what_no_part_names():
    panel = timeline.panel(Measured(laid_run(), "laid"), "timeline")
    rest = traces(panel)["no part named"]
    assert (rest["y"], rest["base"], rest["x"]) == (["trainer<br>idle 30 %"] * 2, [5.0, 15.0], [5.0, 5.0])
    assert panel.notes[0].startswith("No recorded part names 50 % of the steps' time. It isn't counted as idle")
    assert not any("No recorded part" in note for note in timeline.panel(one(), "timeline").notes)


def test_a_timeline_says_where_its_trainer_was_idle_longer_than_the_run_recorded():
    run = made()
    less = Measured(replace(run, steps=tuple(replace(step, waiting=0.5) for step in run.steps)), "less")
    note = "The run recorded 12 % of waiting, which the summary has; the trainer's lane leaves 25 %: some"
    assert timeline.panel(less, "timeline").notes[0].startswith(note)
    assert not any("of waiting" in note for note in timeline.panel(one(), "timeline").notes)


def test_a_long_run_draws_its_first_steps_and_says_so(monkeypatch):
    monkeypatch.setattr(timeline, "BARS", 7)
    panel = timeline.panel(one(), "timeline")  # five bars a step
    assert len(panel.stretches) == 1
    assert "Only the first 1 step of 2 are drawn; shares are over all." in panel.notes
    assert "idle 25 %" in panel.alternative
    assert max(float(row[3]) for row in panel.table.rows) == 4.0


def test_a_step_of_very_many_stretches_closes_gaps_and_says_so(monkeypatch):
    spans = tuple(Span("trainer", "train", start, start + 0.5, 0) for start in range(400))
    run = Measured(RunRecord("busy", "local", None, (Step(0, 400.0),), spans=spans), "busy")
    assert len(timeline.panel(run, "timeline").table.rows) == 400 + 399
    monkeypatch.setattr(timeline, "BARS", 100)
    few = timeline.panel(run, "timeline")
    assert len(few.table.rows) <= 100
    assert "idle 50 %" in few.alternative
    assert few.notes[-1] == "Gaps shorter than 799 ms are not drawn; the shares count them."


def test_many_workers_draw_some_lanes_and_list_all():
    rollouts = tuple(Rollout(0, "a", 3, start=0.0, end=1.0, worker=f"worker {index}") for index in range(60))
    many = one(rollouts=rollouts)
    panel = timeline.panel(many, "timeline")
    assert len({lane for trace in panel.figure["data"] for lane in trace["y"]}) == timeline.LANES
    assert f"{timeline.LANES} of 61 lanes are drawn; the table of idle time has all." in panel.notes
    assert len(timeline.lane_table(many).rows) == 61


def test_a_record_without_clock_times_gets_bars_by_step_and_says_so():
    bare = Measured(without_times(made()), "made")
    assert timeline.panel(bare, "timeline") is None
    assert timeline.lane_table(bare) is None
    panel = parts.panel(bare, "parts")
    assert "no clock times" in panel.notes[0]
    stacks = traces(panel)
    assert {name: trace["y"] for name, trace in stacks.items()} == {
        "waiting": [1.0, 1.0],
        "training": [2.0, 2.0],
        "publication": [0.5, 0.5],
        "no part named": [0.5, 0.5],
    }
    assert "Generation goes on beside the trainer's work" in panel.notes[1]


def test_without_recorded_waiting_generation_is_a_part():
    run = without_times(made())
    run = replace(run, steps=tuple(replace(step, waiting=None) for step in run.steps))
    panel = parts.panel(Measured(run, "made"), "parts")
    assert traces(panel)["generation"]["y"] == [1.5, 1.5]
    assert traces(panel)["no part named"]["y"] == [0.0, 0.0]
    assert len(panel.notes) == 1


def test_parts_that_overlap_are_said_to():
    run = without_times(made())
    run = replace(run, steps=tuple(replace(step, training=3.0) for step in run.steps))
    panel = parts.panel(Measured(run, "made"), "parts")
    assert "add up to more than the step's seconds" in panel.notes[-1]


def test_a_long_record_without_clock_times_averages_its_bars():
    steps = tuple(Step(number, float(number % 2 + 1), training=1.0) for number in range(400))
    panel = parts.panel(Measured(RunRecord("long", "verl", None, steps), "long"), "parts")
    assert traces(panel)["no part named"]["y"] == [0.5] * parts.BARS
    assert "mean over 4 steps" in panel.notes[-1]


def test_each_panel_shows_the_series_it_names():
    found, missing = panels_of(made())
    values = {key: [trace["y"] for trace in panel.figure["data"]] for key, panel in found.items()}
    assert values == {
        "reward": [[0.25, 0.75]],
        "seconds": [[4.0, 4.0]],
        "idle": [[0.25, 0.25], [0.625, 0.625]],
        "group-size": [[4.0, 4.0]],
        "stragglers": [[0.5, 0.5]],
        "tokens": [[100.0, 100.0], [250.0, 250.0]],
        "sharing": [[2.5, 2.5]],
        "clipped": [[0.125, 0.125]],
    }
    assert missing == ["Straggler ratio by step"]


def test_a_controllers_own_event_stands_beside_the_straggler_rate():
    run = made()
    metrics = {"group/straggler_rate": 1.0, "group/straggler_ratio": 2.05}
    run = replace(run, steps=tuple(replace(step, metrics=metrics) for step in run.steps))
    found, _ = panels_of(run)
    assert [trace["y"] for trace in found["stragglers"].figure["data"]] == [[0.5, 0.5], [1.0, 1.0]]
    assert found["straggler-ratio"].figure["data"][0]["y"] == [2.05, 2.05]


def test_a_run_that_lacks_a_figure_is_named_under_it():
    run = made("b")
    run = replace(run, steps=tuple(replace(step, metrics={}) for step in run.steps))
    found, _ = panels_of(made("a"), run)
    assert found["clipped"].notes == ("b: not recorded.",)
    assert len(found["clipped"].figure["data"]) == 1
    assert "b: not recorded." not in found["reward"].notes


def test_a_line_that_is_not_the_panels_own_subject_is_named():
    found, _ = panels_of(made(spans=(), steps=tuple(replace(step, waiting=None) for step in made().steps)))
    assert [trace["name"] for trace in found["idle"].figure["data"]] == ["workers"]
    assert found["idle"].figure["layout"]["showlegend"]
    assert not found["reward"].figure["layout"]["showlegend"]


def test_lines_that_coincide_are_said_to():
    moved = made("b")
    moved = replace(moved, steps=tuple(replace(step, reward=0.5) for step in moved.steps))
    found, _ = panels_of(made("a"), moved)
    assert found["clipped"].notes == ("b lies exactly on a.",)
    assert found["idle"].notes == ("b, trainer lies exactly on a, trainer.", "b, workers lies exactly on a, workers.")
    assert found["reward"].notes == ()


def test_a_panel_without_any_figure_is_left_out_by_name():
    found, missing = panels_of(RunRecord("bare", "verl", None, (Step(0, 2.0),)))
    assert list(found) == ["seconds"]
    assert {"Reward by step", "Clipped fraction by step", "Tokens shared by step"} <= set(missing)


def test_words_and_table_say_what_the_line_shows():
    found, _ = panels_of(made())
    reward = found["reward"]
    assert "0.25 at step 0, 0.75 at step 1" in reward.alternative
    assert reward.table.rows == (("0", "0.25"), ("1", "0.75"))
    assert found["clipped"].table.rows[0] == ("0", "12 %")


def test_many_steps_are_averaged_in_blocks_and_said_to_be():
    steps = tuple(Step(number, float(number % 2)) for number in range(1000))
    found, _ = panels_of(RunRecord("long", "verl", None, steps))
    line = found["seconds"].figure["data"][0]
    assert line["y"] == [0.5] * by_step.POINTS
    assert line["x"][:2] == [0, 2]
    assert found["seconds"].notes == ("Each point is the mean over 2 steps, put at the first of them.",)
    assert found["seconds"].table.rows[1] == ("2 to 3", "0.5")


def test_blocks_keep_to_their_limit_and_lose_nothing():
    for steps in (1, 499, 500, 501, 1000, 1001):
        blocks = fold(range(steps), 500)
        assert len(blocks) <= 500
        assert [step for block in blocks for step in block] == list(range(steps))


def test_the_histogram_counts_rollouts_by_staleness():
    panel = staleness.panel([one()])
    assert panel.figure["data"][0]["x"] == [0, 1]
    assert panel.figure["data"][0]["y"] == [0.5, 0.5]
    assert panel.table.rows == (("0", "8", "50 %"), ("1", "8", "50 %"))
    assert "mean 0.5, largest 1, 50 % of rollouts fresh" in panel.alternative


def test_without_versions_the_mean_staleness_by_step_takes_the_histograms_place():
    run = made()
    unknown = replace(
        run,
        rollouts=tuple(replace(each, version=None) for each in run.rollouts),
        steps=tuple(replace(step, metrics={"loss/staleness": 1.5}) for step in run.steps),
    )
    panel = staleness.panel([Measured(unknown, "made")])
    assert panel.figure["data"][0]["y"] == [1.5, 1.5]
    assert "there is no histogram" in panel.text
    assert staleness.panel([Measured(made(rollouts=()), "made")]) is None


def test_rollouts_of_unknown_version_are_counted_under_the_histogram():
    run = made()
    mixed = replace(run, rollouts=(replace(run.rollouts[0], version=None), *run.rollouts[1:]))
    assert "made: 1 rollout of unknown version left out." in staleness.panel([Measured(mixed, "made")]).notes


def test_plotly_knows_every_property_of_the_figures():
    go = pytest.importorskip("plotly.graph_objects", reason="plotly isn't installed")
    runs = measure([made("a"), made("b")])
    drawn = [*by_step.panels(runs)[0], staleness.panel(runs), timeline.panel(runs[0], "t"), parts.panel(runs[0], "p")]
    for panel in drawn:
        go.Figure(panel.figure)
    with pytest.raises(ValueError, match="Invalid property"):
        go.Figure({"data": [{"type": "bar", "no_such_property": 1}]})


def luminance(colour):
    parts_ = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts_)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one_, other):
    low, high = sorted((luminance(one_), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_colours_of_figures_stand_out_from_both_backgrounds():
    assert contrast("#000000", "#ffffff") == pytest.approx(21, abs=1e-12)
    assert contrast("#ffff00", "#ffffff") < 3  # the formula can refuse
    for colour in {*COLOURS, *(colour for _, colour, *_ in KINDS.values())}:
        for background in BACKGROUNDS:
            assert contrast(colour, background) >= 3, (colour, background)


def test_nothing_is_told_by_colour_alone():
    assert all(len(set(each)) == len(COLOURS) for each in (DASHES, SYMBOLS, PATTERNS))
    for (_, _, *one_), (_, _, *other) in combinations(KINDS.values(), 2):
        assert one_ != other  # pattern and its size
    found, _ = panels_of(made("a"), made("b"))
    for panel in found.values():
        looks = [(trace["line"]["dash"], trace["marker"]["symbol"]) for trace in panel.figure["data"]]
        assert len(set(looks)) == len(looks)
    many = [
        (look(index, 1)["line"]["dash"], filled(index)["pattern"]["shape"], COLOURS[index % 6]) for index in range(36)
    ]
    assert len(set(many)) == 36
