"""AReaL's metrics, rollout dump and traces, read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from reader_files import events, jsonl

from metronome.errors import ConfigurationError
from metronome.observe.readers import TRACES, read_run

WALL = 1_700_000_000.0
STEP = {
    "timeperf/rollout": 4.0,
    "timeperf/recompute_logp": 0.5,
    "timeperf/train_step": 2.0,
    "timeperf/update_weights": 1.0,
    "ppo_actor/prompt_len/avg": 20.0,
    "ppo_actor/seq_len/avg": 26.0,
    "ppo_actor/task_reward/avg": 0.5,
}


def board(folder: Path, count: int = 2, **more: float) -> Path:
    """Steps that end 8 seconds apart; the first one at WALL + 8."""
    logged = [(WALL + 8.0 * (step + 1), step, {**STEP, **more}) for step in range(count)]
    events(folder / "tensorboard" / "events.out.tfevents.1.x", logged)
    return folder


def sample(task: int, member: int, version: int, length: int = 6) -> dict[str, Any]:
    texts = {"prompt": "p", "completion": "c", "head_version": -1}
    return {
        "task_id": task,
        "sample_idx": member,
        "seqlen": 20 + length,
        "prompt_len": 20,
        "tail_version": version,
        "reward": 0.5 * member,
        **texts,
    }


def dump(folder: Path, versions: int = 2) -> Path:
    for version in range(versions):
        for task in (2 * version, 2 * version + 1):
            jsonl(
                folder / "rollout" / str(version) / f"{task}.jsonl",
                [sample(task, member, version) for member in (0, 1)],
            )
    return folder


def sessions(folder: Path, versions: int = 2) -> Path:
    rows = []
    for task in range(2 * versions):
        began = WALL + 8.0 * (task // 2) + 0.5
        for member in (1, 0):  # written as they end, not as they began
            turn = {"start_ts": began + 0.01 * member, "end_ts": began + 1.0 + member}
            rows.append(
                {
                    "task_id": task,
                    "session_id": 2 * task + member,
                    "rank": 0,
                    "status": "accepted",
                    "submit_ts": began,
                    "phases": {"generate": [turn]},
                }
            )
    jsonl(folder / "session_tracer" / "sessions-r0.jsonl", rows)
    return folder


def traces(folder: Path, versions: int = 2) -> Path:
    """Scopes on a clock that began 100 seconds before WALL."""
    rows: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "Rank 0"}}]
    for step in range(versions):
        begun = 100.0 + 8.0 * step
        for name, start, seconds in (
            ("rollout", 0.25, 4.0),
            ("ppo_update", 5.0, 2.0),
            ("update_weights", 7.0, 0.5),
            ("log_stats", 8.0, 0.125),
        ):
            rows.append(
                {
                    "name": f"train.{name}",
                    "ph": "X",
                    "ts": int((begun + start) * 1e6),
                    "dur": int(seconds * 1e6),
                    "pid": 1,
                    "tid": 1,
                    "args": {"global_step": step, "rank": 0},
                }
            )
    jsonl(folder / "perf_tracer" / "traces-r0.jsonl", rows)
    return folder


def config(folder: Path, bound: int) -> Path:
    text = "gconfig: {n_samples: 2, max_new_tokens: 12}\ntrain_dataset: {batch_size: 2}\n"
    (folder / "config.yaml").write_text(text + f"rollout: {{max_head_offpolicyness: {bound}}}\n", encoding="utf-8")
    return folder


def test_a_trial_s_records_come_together_on_one_clock(tmp_path: Path) -> None:
    run = read_run(config(traces(sessions(dump(board(tmp_path)))), 0))
    assert (run.host, run.source) == ("areal", "synchronous")
    assert run.settings == {"staleness": 0, "group_size": 2, "max_tokens": 12, "prompts": 2}
    first, second = run.steps
    assert (first.seconds, second.seconds) == (7.5, 8.0)  # the first one's beginning isn't recorded: its parts' sum
    assert (first.generation, first.old_log_probs, first.training, first.publication) == (4.0, 0.5, 2.0, 1.0)
    assert (first.prompts, first.group_size, first.response_tokens, first.prompt_tokens) == (2, 2, 6.0, 20.0)
    # The run's start is the first response's, 0.5 seconds after WALL; the wait for a batch is no span.
    late = [one for one in run.rollouts if one.step == 1 and one.prompt == "2"]
    assert [(one.start, one.end, one.reward) for one in late] == [
        (pytest.approx(8.0, abs=1e-6), pytest.approx(9.0, abs=1e-6), 0.0),
        (pytest.approx(8.01, abs=1e-6), pytest.approx(10.0, abs=1e-6), 0.5),
    ]
    assert [(one.version, one.trained_version, one.response_tokens, one.prompt_tokens) for one in late] == [
        (1, 1, 6, 20)
    ] * 2
    update = next(one for one in run.spans if one.kind == "train" and one.step == 1)
    assert (update.start, update.end) == (pytest.approx(12.5, abs=1e-6), pytest.approx(14.5, abs=1e-6))


def test_a_bounded_run_s_responses_have_no_trained_version(tmp_path: Path) -> None:
    run = read_run(config(dump(board(tmp_path)), 2))
    assert (run.source, run.settings["staleness"]) == ("bounded", 2)
    assert {one.trained_version for one in run.rollouts} == {None}
    assert any("which step trained" in note for note in run.notes)
    assert read_run(config(tmp_path, 0)).rollouts[0].trained_version == 0


@pytest.mark.parametrize("source", ["periodic", "bounded"])
def test_our_metrics_tell_the_schedule(tmp_path: Path, source: str) -> None:
    key = {"periodic": "seconds_waiting", "bounded": "staleness_max"}[source]
    run = read_run(board(tmp_path, **{f"ppo_actor/metronome/{source}/{key}": 1.5}))
    assert run.source == source
    assert (run.steps[0].training, run.steps[0].waiting) == ((0.5, 1.5) if source == "periodic" else (2.0, 4.0))


def test_what_is_missing_is_said_with_the_setting_that_writes_it(tmp_path: Path) -> None:
    run = read_run(board(tmp_path / "a"))
    notes = " ".join(run.notes)
    for setting in ("rollout.dump_to_file", "perf_tracer.session_tracer.enabled", "source="):
        assert setting in notes
    run = read_run(dump(tmp_path / "b"))
    assert run.steps == ()
    assert "stats_logger.tensorboard.path" in " ".join(run.notes)
    assert [one.start for one in run.rollouts] == [None] * 8


def test_traces_without_a_clock_to_set_them_by_give_no_spans(tmp_path: Path) -> None:
    run = read_run(traces(dump(tmp_path)))
    assert run.spans == ()
    assert any("can't be set to a clock" in note for note in run.notes)


def test_an_evaluation_s_dump_is_not_taken_for_training(tmp_path: Path) -> None:
    dump(board(tmp_path))
    jsonl(tmp_path / "eval-rollout" / "1" / "0.jsonl", [sample(0, 0, 1)])
    assert len(read_run(tmp_path).rollouts) == 8


def test_responses_that_no_step_trained_are_left_out_and_said(tmp_path: Path) -> None:
    run = read_run(dump(board(tmp_path, count=1)))
    assert len(run.rollouts) == 4
    assert any("4 responses" in note for note in run.notes)


def test_what_is_no_number_is_refused_with_file_and_line(tmp_path: Path) -> None:
    dump(board(tmp_path))
    jsonl(tmp_path / "rollout" / "1" / "2.jsonl", [sample(2, 0, 1), sample(2, 1, 1) | {"reward": float("nan")}])
    with pytest.raises(ConfigurationError, match=r"reward must be a finite number.*2\.jsonl, line 2"):
        read_run(tmp_path)


def test_a_response_that_lacks_a_length_is_refused(tmp_path: Path) -> None:
    dump(board(tmp_path))
    jsonl(tmp_path / "rollout" / "1" / "2.jsonl", [{k: v for k, v in sample(2, 0, 1).items() if k != "seqlen"}])
    with pytest.raises(ConfigurationError, match="lacks task_id, sample_idx, seqlen"):
        read_run(tmp_path)


def test_the_shipped_run_s_clocks_agree() -> None:
    """Sessions are on another clock than traces: every response must lie in its step's wait for a batch."""
    run = read_run(TRACES / "areal")
    assert (run.source, len(run.steps), len(run.rollouts)) == ("synchronous", 5, 80)
    for step in run.steps:
        own = [one for one in run.rollouts if one.step == step.number]
        first = min(one.start for one in own if one.start is not None)
        last = max(one.end for one in own if one.end is not None)
        update = next(span for span in run.spans if span.step == step.number and span.kind == "train")
        assert 0.0 < last - first <= (step.generation or 0.0) + 0.005
        assert last <= update.start
        assert update.end - update.start == pytest.approx(step.training, abs=1e-3)
        assert sum(one.response_tokens for one in own) / len(own) == pytest.approx(step.response_tokens, rel=1e-6)
        assert sum(one.reward or 0.0 for one in own) / len(own) == pytest.approx(step.reward, rel=1e-5)


def test_the_example_csv_holds_the_shipped_run_s_responses() -> None:
    csv, run = read_run(TRACES / "example.csv"), read_run(TRACES / "areal")
    assert [(one.step, one.prompt, one.response_tokens) for one in csv.rollouts] == [
        (one.step, one.prompt, one.response_tokens)
        for one in sorted(run.rollouts, key=lambda one: (one.step, one.start))
    ]


def test_a_periodic_trainer_s_spans_are_the_parts_of_its_update_without_the_waits(tmp_path: Path) -> None:
    traces(board(tmp_path, **{"metronome/periodic/seconds_waiting": 1.0}))
    path = tmp_path / "perf_tracer" / "traces-r0.jsonl"
    inner = [("ppo_actor.ppo_update", 5.0, 0.25), ("ppo_actor.ppo_update", 6.0, 0.5), ("fsdp_engine.step", 6.75, 0.125)]
    elsewhere = [("fsdp_engine.step", 3.0, 0.125)]
    rows = [
        {
            "name": name,
            "ph": "X",
            "ts": int((100.0 + start) * 1e6),
            "dur": int(seconds * 1e6),
            "pid": 1,
            "args": {"rank": 0},
        }
        for name, start, seconds in [*inner, *elsewhere]
    ]
    path.write_text(
        path.read_text(encoding="utf-8") + "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )
    run = read_run(tmp_path)
    own = [(one.kind, round(one.end - one.start, 6)) for one in run.spans if one.step == 0 and one.kind != "publish"]
    assert own == [("train", 0.25), ("train", 0.5), ("step", 0.125)]
    board(tmp_path)  # the same without our metric: the update's own scope
    own = [(one.kind, round(one.end - one.start, 6)) for one in read_run(tmp_path).spans if one.step == 0]
    assert own == [("train", 2.0), ("publish", 0.5)]


def test_a_negative_time_is_refused_with_where_it_stands(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"timeperf/train_step can't be negative; found -2\.0.*step 0"):
        read_run(board(tmp_path / "board", **{"timeperf/train_step": -2.0}))
    for name, written, key, value, says in (
        ("dur", traces, "dur", -5, r"dur can't be negative; found -5.*traces-r0\.jsonl, line 3"),
        ("turn", sessions, "phases", {"generate": [{"start_ts": 9.0, "end_ts": 8.0}]}, r"session ends.*jsonl, line 3"),
    ):
        folder = written(board(tmp_path / name))
        (path,) = (one for one in folder.rglob("*.jsonl"))
        rows = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
        rows[2][key] = value
        jsonl(path, rows)
        with pytest.raises(ConfigurationError, match=says):
            read_run(folder)


def test_a_step_that_was_logged_before_the_one_before_it_is_refused(tmp_path: Path) -> None:
    logged = [(WALL + 8.0, 0, STEP), (WALL + 3.0, 1, STEP)]
    events(tmp_path / "tensorboard" / "events.out.tfevents.1.x", logged)
    with pytest.raises(ConfigurationError, match=r"logged before the one before it; found '-5\.000 s'.*step 1"):
        read_run(tmp_path)


def test_a_response_shorter_than_its_prompt_is_refused(tmp_path: Path) -> None:
    folder = dump(board(tmp_path))
    jsonl(folder / "rollout" / "0" / "0.jsonl", [sample(0, 0, 0, length=-3)])
    with pytest.raises(ConfigurationError, match=r"seqlen must be at least prompt_len.*0\.jsonl, line 1"):
        read_run(folder)
