"""The local host's run folder, read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from reader_files import CLOCK, groups, jsonl, local_run, period

from metronome.errors import ConfigurationError
from metronome.observe.readers import TRACES, read_run
from metronome.periodic.closed_form import periodic_seconds, synchronous_seconds


@pytest.mark.parametrize("source", ["synchronous", "periodic"])
def test_a_run_folder_gives_each_period_s_parts(tmp_path: Path, source: str) -> None:
    folder, _ = local_run(tmp_path / "run", source)
    run = read_run(folder)
    assert (run.name, run.host, run.source) == ("run", "local", source)
    first = run.steps[0]
    assert [step.number for step in run.steps] == [0, 1]
    assert first.seconds == pytest.approx(6.7 if source == "synchronous" else 5.1, abs=1e-12)
    assert first.generation == 4.0
    assert first.training == pytest.approx(2.4 - 0.1, abs=1e-12)  # the proximal pass stands apart
    assert (first.proximal, first.optimizer, first.publication) == (0.1, 0.2, 0.1)
    assert (first.group_size, first.prompts, first.reward) == (2, 3, 0.25)
    assert (first.prompt_tokens, first.response_tokens, first.response_tokens_max) == (10.0, 4.0, 7.0)
    assert [step.fingerprint for step in run.steps] == ["weights 1", "weights 2"]
    assert run.settings["slots"] == 8
    assert run.settings["staleness"] == 0


@pytest.mark.parametrize("gap", [0.0, 0.5])
def test_a_period_s_start_is_found_where_its_groups_ends_and_arrivals_meet(tmp_path: Path, gap: float) -> None:
    folder, starts = local_run(tmp_path, gap=gap)
    run = read_run(folder)
    begins = [min(one.start for one in run.rollouts if one.step == step and one.start) - 0.001 for step in (0, 1)]
    assert begins == pytest.approx(starts, abs=1e-9)
    last = [max(span.end for span in run.spans if span.step == step and span.lane == "trainer") for step in (0, 1)]
    assert last == pytest.approx(
        [start + step.seconds for start, step in zip(starts, run.steps, strict=True)], abs=1e-9
    )


def test_rollouts_carry_group_version_worker_and_reward(tmp_path: Path) -> None:
    run = read_run(local_run(tmp_path)[0])
    assert len(run.rollouts) == 12
    one = run.rollouts[7]
    assert (one.step, one.prompt, one.response_tokens, one.reward, one.worker) == (1, "20", 7, 0.5, "worker 0")
    assert (one.version, one.trained_version, one.prompt_tokens) == (1, 1, None)
    assert one.end is not None
    assert one.start is not None
    assert one.end - one.start == pytest.approx(2.0 - 0.001, abs=1e-9)


def test_a_periodic_trainer_takes_groups_as_they_arrive_and_a_synchronous_one_after_the_last(tmp_path: Path) -> None:
    def begins(source: str) -> list[float]:
        run = read_run(local_run(tmp_path / source, source)[0])
        return [span.start for span in run.spans if span.kind == "train" and span.step == 0]

    assert begins("periodic") == pytest.approx([1.0, 1.8, 4.0], abs=1e-9)
    assert begins("synchronous") == pytest.approx([4.0, 4.8, 5.6], abs=1e-9)


def test_bounded_runs_with_groups_from_before_have_their_bound_and_ages(tmp_path: Path) -> None:
    folder, _ = local_run(tmp_path, "periodic")
    (folder / "recipe.yaml").write_text("metronome: {rollout_source: bounded}\n", encoding="utf-8")
    lines = [period(1, [1.0, 2.0], [0.5, 0.5]), period(2, [0.0, 1.0], [0.5, 0.5])]
    early, late = groups(2, CLOCK + lines[0]["seconds"], [0.0, 1.0])
    early |= {"start": CLOCK + 0.5, "end": CLOCK + 2.2, "versions": [0]}  # it waited for its training
    jsonl(folder / "metrics.jsonl", lines)
    jsonl(folder / "groups.jsonl", [*groups(1, CLOCK, [1.0, 2.0]), early, late])
    run = read_run(folder)
    assert run.settings["staleness"] == 2
    assert [(one.trained_version or 0) - (one.version or 0) for one in run.rollouts[4::2]] == [1, 0]
    assert run.rollouts[4].end == pytest.approx(2.2, abs=1e-9)
    assert run.steps[1].generation == pytest.approx((lines[0]["seconds"] + 1.0) - 0.5, abs=1e-9)


def test_a_line_that_is_still_being_written_is_left_out_and_said(tmp_path: Path) -> None:
    folder, _ = local_run(tmp_path)
    whole = read_run(folder)
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text(encoding="utf-8") + json.dumps(period(3, [1.0], [1.0]))[:60], encoding="utf-8")
    run = read_run(folder)
    assert run.steps == whole.steps
    assert any("metrics.jsonl is cut" in note for note in run.notes)
    assert not any("is cut" in note for note in whole.notes)


def test_a_broken_line_in_the_middle_is_refused_with_its_number(tmp_path: Path) -> None:
    folder, _ = local_run(tmp_path)
    path = folder / "groups.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join([lines[0], lines[1][:40], *lines[2:]]) + "\n", encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"isn't JSON.*groups\.jsonl, line 2"):
        read_run(folder)


def test_a_resumed_run_that_repeats_a_period_keeps_the_later_one(tmp_path: Path) -> None:
    folder, _ = local_run(tmp_path)
    path = folder / "metrics.jsonl"
    again = period(1, [1.0, 1.5, 4.0], [0.8, 0.8, 0.8], reward=0.75)
    path.write_text(path.read_text(encoding="utf-8") + json.dumps(again) + "\n", encoding="utf-8")
    run = read_run(folder)
    assert [step.reward for step in run.steps] == [0.75]  # period 2 of before belongs to the old run
    assert {one.step for one in run.rollouts} == {0}


@pytest.mark.parametrize(
    ("file", "key", "value", "line"),
    [("metrics", "seconds", "NaN", 3), ("metrics", "work", "[NaN, 1, 1]", 3), ("groups", "end", "Infinity", 1)],
)
def test_what_is_not_a_number_is_refused_with_file_and_line(
    tmp_path: Path, file: str, key: str, value: str, line: int
) -> None:
    folder, _ = local_run(tmp_path)
    path = folder / f"{file}.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    record = json.loads(lines[line - 1])
    lines[line - 1] = json.dumps({**record, key: 0}).replace(f'"{key}": 0', f'"{key}": {value}')
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with pytest.raises(ConfigurationError, match=rf"{key} must be a finite number.*{file}\.jsonl, line {line}"):
        read_run(folder)


def test_another_metric_that_is_not_a_number_is_left_out_and_said(tmp_path: Path) -> None:
    folder, _ = local_run(tmp_path)
    jsonl(folder / "metrics.jsonl", [period(1, [1.0, 1.5, 4.0], [0.8] * 3, **{"loss/ratio": float("nan")})])
    run = read_run(folder)
    assert "loss/ratio" not in run.steps[0].metrics
    assert any("loss/ratio" in note for note in run.notes)


def test_without_groups_and_recipe_what_is_missing_is_said(tmp_path: Path) -> None:
    folder, _ = local_run(tmp_path)
    (folder / "groups.jsonl").unlink()
    run = read_run(folder)
    assert run.rollouts == ()
    assert run.steps[0].prompt_tokens is None
    assert any("single rollouts" in note for note in run.notes)
    (folder / "groups.jsonl").write_text("", encoding="utf-8")
    (folder / "recipe.yaml").unlink()
    run = read_run(folder)
    assert run.source is None
    assert any("recipe.yaml is missing" in note for note in run.notes)


def test_a_run_without_a_whole_period_is_refused(tmp_path: Path) -> None:
    folder, _ = local_run(tmp_path)
    (folder / "metrics.jsonl").write_text("", encoding="utf-8")
    with pytest.raises(ConfigurationError, match="no whole period"):
        read_run(folder)


@pytest.mark.parametrize("name", ["local_synchronous", "local_periodic"])
def test_the_shipped_runs_take_the_time_of_their_schedule_s_closed_form(name: str) -> None:
    run = read_run(TRACES / name)
    form, other = periodic_seconds, synchronous_seconds
    if run.source == "synchronous":
        form, other = other, form
    lines = [json.loads(line) for line in (TRACES / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    lines = [line for line in lines if "work" in line]
    assert len(run.steps) == len(lines) > 1
    differs = 0
    for step, line in zip(run.steps, lines, strict=True):
        parts = (line["arrivals"], line["work"], step.optimizer, step.publication)
        assert step.seconds == pytest.approx(form(*parts), rel=0.02)
        differs += abs(step.seconds - other(*parts)) > 0.02 * step.seconds
        ends = [span.end for span in run.spans if span.step == step.number and span.lane == "trainer"]
        begin = min(one.start for one in run.rollouts if one.step == step.number and one.start is not None)
        assert max(ends) - begin == pytest.approx(step.seconds, rel=0.02)
    assert differs  # the other schedule's form wouldn't fit


@pytest.mark.parametrize(
    ("file", "line", "key", "value"),
    [
        ("metrics", 2, "seconds", -1.0),
        ("metrics", 3, "seconds_step", -0.2),
        ("metrics", 2, "arrivals", [1.0, -1.5, 4.0]),
        ("metrics", 2, "work", [0.8, 0.8, -0.8]),
        ("groups", 4, "end", -1e9),
        ("groups", 4, "start", -1.0),
        ("groups", 4, "lengths", [1, -7]),
    ],
)
def test_a_negative_time_is_refused_with_its_file_and_line(
    tmp_path: Path, file: str, line: int, key: str, value: object
) -> None:
    folder, _ = local_run(tmp_path)
    path = folder / f"{file}.jsonl"
    records = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    records[line - 1][key] = value
    jsonl(path, records)
    with pytest.raises(ConfigurationError, match=rf"{key} can't be negative; found -.*{file}\.jsonl, line {line}"):
        read_run(folder)


def test_a_group_that_ends_before_it_starts_is_refused(tmp_path: Path) -> None:
    folder, _ = local_run(tmp_path)
    of_run = groups(1, CLOCK, [1.0, 1.5, 4.0]) + groups(2, CLOCK + 6.0, [2.0, 2.1, 2.2])
    of_run[2]["end"] = of_run[2]["start"] - 0.5
    jsonl(folder / "groups.jsonl", of_run)
    with pytest.raises(ConfigurationError, match=r"a group ends before it starts.*groups\.jsonl, line 3"):
        read_run(folder)
