"""verl's metrics and rollout dump, read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from reader_files import events, jsonl

from metronome.errors import ConfigurationError
from metronome.observe.readers import TRACES, read_run

TIMES = {
    "timing_s/step": 10.0,
    "timing_s/gen": 6.0,
    "timing_s/old_log_prob": 1.0,
    "timing_s/ref": 0.5,
    "timing_s/update_actor": 2.0,
    "timing_s/update_weights": 0.25,
}
LENGTHS = {
    "response_length/mean": 6.0,
    "response_length/max": 9.0,
    "response_length/min": 2.0,
    "prompt_length/mean": 12.0,
}


def line(step: int, **more: float) -> dict[str, Any]:
    return {"step": step, "data": {**TIMES, **LENGTHS, "critic/score/mean": 0.5, **more}}


def response(step: int, uid: str, output: str, score: float = 1.0) -> dict[str, Any]:
    return {"input": f"question {uid[0]}", "output": output, "gts": "4", "score": score, "step": step, "uid": uid}


def dump(folder: Path, step: int) -> Path:
    rows = [
        response(step, f"{uid}_{member}_0", "x" * size)
        for uid, member, size in (("a", 0, 10), ("a", 1, 30), ("b", 0, 40), ("b", 1, 40))
    ]
    return jsonl(folder / "rollouts" / f"{step}.jsonl", rows)


def run_folder(folder: Path, *lines: dict[str, Any], dumps: int = 0) -> Path:
    jsonl(folder / "metrics.jsonl", lines)
    for step in range(1, dumps + 1):
        dump(folder, step)
    return folder


def test_a_synchronous_run_has_each_part_and_a_timeline_laid_end_to_end(tmp_path: Path) -> None:
    before = {"step": 0, "data": {"val-core/acc": 0.1}}  # validation before training is no step
    run = read_run(run_folder(tmp_path, before, line(1), line(2, **{"timing_s/step": 12.0})))
    assert (run.host, run.source, run.settings["staleness"]) == ("verl", "colocated", 0)
    step = run.steps[0]
    assert (step.seconds, step.generation, step.waiting, step.training) == (10.0, 6.0, 6.0, 2.0)
    assert (step.old_log_probs, step.reference, step.publication, step.optimizer) == (1.0, 0.5, 0.25, None)
    assert (step.prompt_tokens, step.response_tokens, step.response_tokens_max, step.reward) == (12.0, 6.0, 9.0, 0.5)
    assert [(one.kind, one.lane, one.start, one.end) for one in run.spans if one.step == 1] == [
        ("generate", "rollout", 10.0, 16.0),
        ("old_log_probs", "trainer", 16.0, 17.0),
        ("reference", "trainer", 17.0, 17.5),
        ("train", "trainer", 17.5, 19.5),
        ("publish", "trainer", 19.5, 19.75),
    ]
    assert any("no clock times" in note for note in run.notes)
    assert any("trainer.rollout_data_dir" in note for note in run.notes)


def test_a_periodic_run_is_known_by_its_metrics_and_has_no_invented_timeline(tmp_path: Path) -> None:
    more = {"metronome/periodic/seconds_waiting": 3.0, "timing_s/optimizer_step": 0.1}
    run = read_run(run_folder(tmp_path, line(1, **more)))
    assert run.source == "periodic"
    assert (run.steps[0].waiting, run.steps[0].generation, run.steps[0].optimizer) == (3.0, None, 0.1)
    assert run.spans == ()


@pytest.mark.parametrize(
    "key", ["training/off_policy/trajectory_staleness_worst/max", "metronome/publication/seconds_waiting"]
)
def test_a_run_with_stale_samples_is_bounded_and_its_bound_is_not_guessed(tmp_path: Path, key: str) -> None:
    run = read_run(run_folder(tmp_path, line(1), line(2, **{key: 1.0}), dumps=2))
    assert run.source == "bounded"
    assert "staleness" not in run.settings
    assert {one.version for one in run.rollouts} == {None}
    if "staleness" in key:  # the metric is always there: its value tells
        assert read_run(run_folder(tmp_path / "fresh", line(1, **{key: 0.0}))).source == "colocated"


def test_dumped_lengths_are_scaled_to_the_recorded_mean_within_its_bounds(tmp_path: Path) -> None:
    run = read_run(run_folder(tmp_path, line(1), line(2), dumps=2))
    first = [one for one in run.rollouts if one.step == 0]
    assert [one.response_tokens for one in first] == [2, 6, 8, 8]  # 10, 30, 40, 40 characters, mean 6
    assert [one.prompt for one in first] == ["a", "a", "b", "b"]
    assert (run.steps[0].prompts, run.steps[0].group_size) == (2, 2)
    assert (run.settings["prompts"], run.settings["group_size"]) == (2, 2)
    assert [(one.version, one.trained_version) for one in run.rollouts[::4]] == [(0, 0), (1, 1)]
    assert any("estimated" in note for note in run.notes)
    assert {one.start for one in run.rollouts} == {None}


def test_a_tokenizer_counts_instead(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"x": 0, "question": 1}, unk_token="x"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    folder = run_folder(tmp_path / "run", line(1))
    jsonl(folder / "rollouts" / "1.jsonl", [response(1, "a_0_0", "x x x x x"), response(1, "a_1_0", "x" * 90)])
    run = read_run(folder, [f"tokenizer={tmp_path}"])
    assert [(one.response_tokens, one.prompt_tokens) for one in run.rollouts] == [(5, 2), (1, 2)]
    assert not any("estimated" in note for note in run.notes)
    with pytest.raises(ConfigurationError, match="no tokenizer there"):
        read_run(folder, [f"tokenizer={folder}"])


def test_a_dump_without_metrics_needs_a_tokenizer(tmp_path: Path) -> None:
    dump(tmp_path, 1)
    with pytest.raises(ConfigurationError, match=r"no metrics to scale.*tokenizer=FOLDER"):
        read_run(tmp_path)


def test_a_dump_without_uids_is_grouped_by_its_prompts(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, line(1))
    rows = [response(1, uid, "xx") for uid in ("a_0_0", "b_0_0", "a_1_0", "b_1_0")]
    jsonl(folder / "rollouts" / "1.jsonl", [{k: v for k, v in row.items() if k != "uid"} for row in rows])
    assert read_run(folder).steps[0].group_size == 2


def test_a_validation_dump_beside_it_is_not_taken_for_training(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, line(1), dumps=1)
    jsonl(folder / "validation" / "1.jsonl", [response(1, "z_0_0", "x")])
    assert {one.prompt for one in read_run(folder).rollouts} == {"a", "b"}


def test_tensorboard_events_say_the_same_as_the_file(tmp_path: Path) -> None:
    lines = [line(1), line(2)]
    run_folder(tmp_path / "file", *lines)
    events(
        tmp_path / "board" / "events.out.tfevents.1.x", [(9.0 * one["step"], one["step"], one["data"]) for one in lines]
    )
    from_file, from_board = (read_run(tmp_path / name) for name in ("file", "board"))
    assert from_board.steps == from_file.steps  # these values are exact in float32
    assert from_board.spans == from_file.spans


def test_a_step_that_is_repeated_after_a_resume_keeps_its_later_line(tmp_path: Path) -> None:
    again = line(2, **{"critic/score/mean": 0.75})
    run = read_run(run_folder(tmp_path, line(1), line(2), line(3), again))
    assert [step.reward for step in run.steps] == [0.5, 0.75]


def test_a_cut_line_is_left_out_and_what_is_no_number_is_refused(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, line(1))
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text(encoding="utf-8") + json.dumps(line(2))[:50], encoding="utf-8")
    run = read_run(folder)
    assert len(run.steps) == 1
    assert any("cut" in note for note in run.notes)
    path.write_text(json.dumps(line(1)).replace("6.0", "NaN", 1) + "\n", encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"timing_s/gen must be a finite number.*metrics\.jsonl, line 1"):
        read_run(folder)


def test_two_runs_in_one_folder_are_refused(tmp_path: Path) -> None:
    run_folder(tmp_path / "a", line(1))
    run_folder(tmp_path / "b", line(1))
    with pytest.raises(ConfigurationError, match=r"records of 2 runs lie here.*give one of them"):
        read_run(tmp_path)


def test_a_kept_console_output_says_the_same_as_the_file(tmp_path: Path) -> None:
    lines = [line(1), line(2, **{"actor/lr": 1e-06})]
    run_folder(tmp_path / "file", *lines)
    rows = [
        " - ".join([f"step:{one['step']}", *(f"{key}:{value}" for key, value in one["data"].items())]) for one in lines
    ]
    rows[1] = rows[1].replace("timing_s/gen:6.0", "timing_s/gen:np.float64(6.0)")
    log = tmp_path / "log" / "train.log"
    log.parent.mkdir()
    log.write_text(
        "noise - x:1\n" + "".join(f"\x1b[36m(TaskRunner pid=1)\x1b[0m {row}\n" for row in rows), encoding="utf-8"
    )
    assert read_run(log.parent).steps == read_run(tmp_path / "file").steps
    assert read_run(log).steps == read_run(tmp_path / "file").steps
    log.write_text(log.read_text(encoding="utf-8")[:-30], encoding="utf-8")
    assert len(read_run(log).steps) == 1


def test_the_shipped_run_says_the_same_in_its_file_and_in_what_tensorboard_wrote() -> None:
    run, board = read_run(TRACES / "verl"), read_run(TRACES / "verl" / "tensorboard")
    assert len(run.steps) == len(board.steps) == 5
    for one, other in zip(run.steps, board.steps, strict=True):
        assert one.metrics.keys() == other.metrics.keys()
        for key, value in one.metrics.items():
            assert other.metrics[key] == pytest.approx(value, rel=1e-6)  # event files hold float32
    assert (run.source, run.settings["group_size"], len(run.rollouts)) == ("colocated", 4, 80)
    assert {one.prompt_tokens for one in run.rollouts} == {23}  # least and most are recorded, and alike


def test_estimated_lengths_of_the_shipped_run_stay_near_its_recorded_mean() -> None:
    run = read_run(TRACES / "verl")
    for step in run.steps:
        lengths = [one.response_tokens for one in run.rollouts if one.step == step.number]
        assert max(lengths) <= (step.response_tokens_max or 0.0)
        assert sum(lengths) / len(lengths) == pytest.approx(step.response_tokens, rel=0.1)


@pytest.mark.parametrize("key", ["timing_s/gen", "timing_s/step", "timing_s/adv", "metronome/periodic/seconds_waiting"])
def test_a_negative_time_is_refused_with_its_file_and_line(tmp_path: Path, key: str) -> None:
    folder = run_folder(tmp_path, line(1), line(2, **{key: -4.0}))
    with pytest.raises(ConfigurationError, match=rf"{key} can't be negative; found -4\.0.*metrics\.jsonl, line 2"):
        read_run(folder)


def test_a_negative_figure_that_is_no_time_is_kept(tmp_path: Path) -> None:
    (step,) = read_run(run_folder(tmp_path, line(1, **{"actor/pg_loss": -4.0, "critic/score/mean": -1.0}))).steps
    assert (step.metrics["actor/pg_loss"], step.reward) == (-4.0, -1.0)
