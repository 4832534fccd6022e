"""A plain CSV of responses, read."""

from __future__ import annotations

from pathlib import Path

import pytest

from metronome.errors import ConfigurationError
from metronome.observe.readers import read_run

HEADER = "step,prompt,response_length,start,end,prompt_length,reward,worker,version"
ROWS = (
    "5,a,100,1000.0,1004.0,20,1,gpu0,4",
    "5,a,300,1000.0,1010.0,20,0,gpu1,4",
    "6,b,50,1012.5,1013.0,,,,",
    "6,b,70,1012.5,1014.5,,,,",
)


def write(folder: Path, *rows: str, header: str = HEADER, end: str = "\n") -> Path:
    path = folder / "run.csv"
    path.write_text("\n".join([header, *rows]) + end, encoding="utf-8")
    return path


def test_steps_and_responses_of_a_csv(tmp_path: Path) -> None:
    run = read_run(write(tmp_path, *ROWS), ["workers=2"])
    assert (run.host, run.source, run.settings) == ("csv", None, {"workers": 2})
    first, last = run.steps
    assert (first.number, first.seconds, first.generation) == (0, 12.5, 10.0)
    assert (last.number, last.seconds, last.generation) == (1, 2.0, 2.0)
    assert (first.group_size, first.prompts, first.response_tokens_max) == (2, 1, 300.0)
    assert (first.prompt_tokens, first.reward) == (20.0, 0.5)
    assert (last.prompt_tokens, last.reward) == (None, None)
    one = run.rollouts[1]
    assert (one.start, one.end, one.worker, one.version, one.response_tokens) == (0.0, 10.0, "gpu1", 4, 300)
    assert [(span.lane, span.start, span.end) for span in run.spans][2] == ("rollout", 12.5, 13.0)
    assert run.notes


def test_a_csv_with_a_byte_order_mark_and_windows_line_ends_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join([HEADER, *ROWS]).encode() + b"\r\n")
    assert len(read_run(path).rollouts) == 4


@pytest.mark.parametrize(
    ("rows", "header", "says"),
    [
        (ROWS, "step,prompt,response_length,start", "lacks a column.*add end"),
        (ROWS, HEADER.replace("reward", "rewrad"), "no such column.*use 'reward'"),
        (ROWS, HEADER.replace("reward", "step"), "stands twice"),
        ((), HEADER, "no rows"),
        (("5,a,nan,0,1,,,,",), HEADER, "response_length must be a finite number.*line 2"),
        ((ROWS[0], "5,a,3,0,inf,,,,"), HEADER, "end must be a finite number.*line 3"),
        ((ROWS[0], "5,a,,0,1,,,,"), HEADER, "response_length must be a finite number.*line 3"),
        (("5,a,2.5,0,1,,,,",), HEADER, "must be a whole number.*line 2"),
        (("5,a,-2,0,1,,,,",), HEADER, "can't be negative"),
        (("5,a,2,3,1,,,,",), HEADER, "ends before it starts.*line 2.*end after start"),
        (("5,a,2,3", ROWS[0]), HEADER, "more or fewer values.*line 2.*a value for each column"),
        ((ROWS[0], "5,a,2,-5,1,,,,"), HEADER, "start can't be negative; found -5.0.*line 3.*count seconds"),
        (("5,a,2,0,1,-3,,,",), HEADER, "prompt_length can't be negative; found -3.*line 2"),
        ((), HEADER.replace(",", ";"), "separated by semicolons.*line 1.*separate them by commas"),
        ((), HEADER.replace(",", "\t"), "separated by tabs.*line 1.*separate them by commas"),
    ],
)
def test_a_csv_that_does_not_fit_is_refused(tmp_path: Path, rows: tuple[str, ...], header: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        read_run(write(tmp_path, *rows, header=header))


def test_a_last_line_that_is_still_being_written_is_left_out_and_said(tmp_path: Path) -> None:
    run = read_run(write(tmp_path, *ROWS, "6,b,7", end=""))
    assert len(run.rollouts) == 4
    assert any("cut" in note for note in run.notes)


def test_a_worker_that_is_a_number_is_called_a_worker_and_the_csvs_own_steps_are_said(tmp_path: Path) -> None:
    run = read_run(write(tmp_path, *(row.replace("gpu", "") for row in ROWS)))
    assert [span.lane for span in run.spans] == ["worker 0", "worker 1", "rollout", "rollout"]
    assert any("the CSV's step 5 is 0, the CSV's step 6 is 1." in note for note in run.notes)
