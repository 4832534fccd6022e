"""OpenRLHF's TensorBoard events and log, read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from reader_files import events

from metronome.errors import ConfigurationError
from metronome.observe.readers import TRACES, read_run

PARTS = {"timing/generation": 4.0, "timing/make_experience": 1.0, "timing/ppo_train": 2.0, "timing/broadcast": 0.5}
ROLLOUT = {"rollout/reward_mean": 0.25, "rollout/response_length_mean": 12.0, "rollout/num_samples": 16.0}


def status(**more: float) -> dict[str, Any]:
    return {**PARTS, **ROLLOUT, "timing/step_total": 7.5, "policy_loss": -0.125, **more}


def board(folder: Path, *steps: dict[str, float]) -> Path:
    logged = [
        (float(n), n, {f"train/{key}": value for key, value in one.items()}) for n, one in enumerate(steps, start=1)
    ]
    events(folder / "tensorboard" / "ppo_run" / "events.out.tfevents.1.x", logged)
    return folder


def log(folder: Path, *steps: dict[str, Any], end: str = "\n") -> Path:
    rows = [
        f"INFO 11-30 13:00:00 ppo_trainer.py:551] ✨ Global step {n}: {one}" for n, one in enumerate(steps, start=1)
    ]
    noise = "(pid=1) something else\nINFO checkpoint_states: {'global_step': 0}\n"
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "train.log").write_text(noise + "\n".join(rows) + end, encoding="utf-8")
    return folder


def test_a_synchronous_run_has_each_part_and_a_timeline_laid_end_to_end(tmp_path: Path) -> None:
    run = read_run(board(tmp_path, status(), status()))
    assert (run.host, run.source, run.settings) == ("openrlhf", "synchronous", {"staleness": 0})
    step = run.steps[1]
    assert (step.number, step.seconds, step.generation, step.waiting) == (1, 7.5, 4.0, 4.0)
    assert (step.training, step.old_log_probs, step.publication) == (2.0, 1.0, 0.5)
    assert (step.reward, step.response_tokens, step.prompts) == (0.25, 12.0, None)
    assert [(one.kind, one.start) for one in run.spans if one.step == 1] == [
        ("generate", 7.5),
        ("old_log_probs", 11.5),
        ("train", 12.5),
        ("publish", 14.5),
    ]
    assert run.rollouts == ()
    assert any("nothing of single responses" in note for note in run.notes)


def test_the_log_says_the_same_as_tensorboard(tmp_path: Path) -> None:
    steps = [status(), status(**{"metronome/group_controller/size": 4})]
    from_log, from_board = read_run(log(tmp_path / "log", *steps)), read_run(board(tmp_path / "board", *steps))
    assert from_log.steps == from_board.steps
    assert from_log.spans == from_board.spans
    assert (from_log.steps[1].group_size, from_log.steps[1].prompts) == (4, 4)


def test_a_periodic_run_s_seconds_have_the_wait_that_openrlhf_s_total_lacks(tmp_path: Path) -> None:
    parts = {"timing/generation": 0.0, "timing/ppo_train": 5.0, "timing/broadcast": 0.5, "timing/step_total": 5.5}
    run = read_run(board(tmp_path, {**ROLLOUT, **parts, "metronome/periodic/seconds_waiting": 3.0}))
    step = run.steps[0]
    assert (run.source, step.seconds, step.waiting, step.training, step.generation) == ("periodic", 8.5, 3.0, 5.0, None)
    assert run.spans == ()


def test_an_asynchronous_run_is_known_by_parts_that_overlap(tmp_path: Path) -> None:
    run = read_run(board(tmp_path, status(**{"timing/step_total": 5.0})))
    assert run.source == "bounded"
    assert "staleness" not in run.settings
    assert run.steps[0].waiting == 1.5  # 5.0 less make_experience, ppo_train and broadcast
    assert run.spans == ()


def test_a_resumed_log_keeps_the_later_lines_and_a_cut_one_is_left_out(tmp_path: Path) -> None:
    folder = log(tmp_path, status(), status(), status())
    path = folder / "train.log"
    again = path.read_text(encoding="utf-8").splitlines()[3].replace("0.25", "0.75")
    path.write_text(path.read_text(encoding="utf-8") + again + "\n" + again[:90], encoding="utf-8")
    run = read_run(folder)
    assert [step.reward for step in run.steps] == [0.25, 0.75]
    assert any("cut" in note for note in run.notes)


def test_what_is_no_number_is_refused_with_file_and_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"timing/ppo_train must be a finite number.*train\.log, line 4"):
        read_run(log(tmp_path / "a", status(), status(**{"timing/ppo_train": float("nan")})))
    with pytest.raises(ConfigurationError, match=r"timing/ppo_train must be a finite number.*step 2"):
        read_run(board(tmp_path / "b", status(), status(**{"timing/ppo_train": float("nan")})))
    run = read_run(log(tmp_path / "c", status(policy_loss=float("nan"))))
    assert any("policy_loss" in note for note in run.notes)


def test_two_runs_in_one_folder_are_refused(tmp_path: Path) -> None:
    board(tmp_path / "a", status())
    board(tmp_path / "b", status())
    with pytest.raises(ConfigurationError, match="records of 2 runs lie here"):
        read_run(tmp_path)


def test_the_shipped_run_s_log_says_the_same_as_what_tensorboard_wrote() -> None:
    board, log = read_run(TRACES / "openrlhf" / "tensorboard"), read_run(TRACES / "openrlhf" / "train.log")
    assert len(board.steps) == len(log.steps) == 5
    assert board.source == log.source == "synchronous"
    for one, other in zip(board.steps, log.steps, strict=True):
        assert one.metrics.keys() == other.metrics.keys()
        for key, value in other.metrics.items():
            assert one.metrics[key] == pytest.approx(value, rel=1e-6)  # event files hold float32


def test_a_group_size_that_is_given_tells_the_prompts() -> None:
    run = read_run(TRACES / "openrlhf")
    assert any("group_size=G" in note for note in run.notes)
    run = read_run(TRACES / "openrlhf", ["group_size=4"])
    assert [(step.group_size, step.prompts) for step in run.steps] == [(4, 4)] * 5
    assert not any("group_size=G" in note for note in run.notes)


def test_a_negative_time_is_refused_with_where_it_stands(tmp_path: Path) -> None:
    steps = [status(), status(**{"timing/ppo_train": -2.0, "policy_loss": -9.0})]
    with pytest.raises(
        ConfigurationError, match=r"timing/ppo_train can't be negative; found -2\.0.*train\.log, line 4"
    ):
        read_run(log(tmp_path / "log", *steps))
    with pytest.raises(ConfigurationError, match=r"timing/ppo_train can't be negative; found -2\.0.*step 2"):
        read_run(board(tmp_path / "board", *steps))
