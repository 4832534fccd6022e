"""``metronome report``: written whole or not at all, and every mistake is one line."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from report_records import made

from metronome.cli import main
from metronome.errors import ConfigurationError
from metronome.observe import command, timeline
from metronome.observe.comparison import same_work
from metronome.observe.measures import measure
from metronome.observe.readers import read_run


@pytest.fixture(autouse=True)
def records(monkeypatch):
    """Runs by name instead of by file; ``empty`` has no step. plotly.js is one line."""
    import metronome.observe.readers as readers

    def read_run(path, overrides=()):
        run = made(Path(path).name, notes=tuple(overrides))
        return replace(run, steps=()) if run.name == "empty" else run

    monkeypatch.setattr(readers, "read_run", read_run)
    monkeypatch.setattr(command, "_plotly", lambda: "/* plotly */")


def test_the_page_is_written_and_its_size_said(tmp_path, capsys):
    out = tmp_path / "page.html"
    assert main(["report", "a", "b", "--out", str(out)]) == 0
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert capsys.readouterr().out == f"wrote {out} (0.0 MB): 2 runs, 4 steps\n"
    assert [one.name for one in tmp_path.iterdir()] == ["page.html"]


def test_what_has_an_equals_sign_and_is_no_file_is_a_setting_of_all_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("lr=1").mkdir()
    assert main(["report", "a", "group_size=4", "lr=1", "source=bounded", "--out", "page.html"]) == 0
    assert capsys.readouterr().out.endswith(": 2 runs, 4 steps\n")
    text = Path("page.html").read_text(encoding="utf-8")
    assert text.count("<li>group_size=4</li>\n<li>source=bounded</li>") == text.count("<li>source=bounded</li>") == 2


def test_settings_without_a_run_are_one_line(tmp_path, capsys):
    assert "no run was given" in refused(["group_size=4", "--out", str(tmp_path / "page.html")], capsys)
    assert list(tmp_path.iterdir()) == []


def test_a_setting_does_what_the_records_notes_promise(tmp_path, monkeypatch, capsys):
    monkeypatch.undo()
    monkeypatch.setattr(command, "_plotly", lambda: "/* plotly */")
    out = tmp_path / "page.html"
    assert main(["report", "openrlhf", "--out", str(out)]) == 0
    assert "give group_size=G" in out.read_text(encoding="utf-8")
    assert main(["report", "openrlhf", "group_size=4", "--out", str(out)]) == 0
    text = out.read_text(encoding="utf-8")
    assert "give group_size=G" not in text
    assert "<dt>group size G</dt><dd>4</dd>" in text
    assert "no such setting of a run" in refused(["openrlhf", "group_sise=4", "--out", str(out)], capsys)
    assert "tokenizer" in refused(["verl", "tokenizer=nowhere", "--out", str(out)], capsys)


def test_the_help_names_the_settings(capsys):
    assert main(["report", "--help"]) == 0
    assert "KEY=VALUE" in capsys.readouterr().out


def test_a_page_of_ours_is_written_anew(tmp_path):
    out = tmp_path / "page.html"
    for run in ("a", "b"):
        command.report([run], str(out))
    assert "Run b" in out.read_text(encoding="utf-8")


def refused(argv, capsys):
    assert main(["report", *argv]) == 2
    return capsys.readouterr().err


def test_another_file_is_never_overwritten(tmp_path, capsys):
    out = tmp_path / "metrics.jsonl"
    out.write_text("precious", encoding="utf-8")
    assert "doesn't hold a metronome report; it stays as it is" in refused(["a", "--out", str(out)], capsys)
    assert out.read_text(encoding="utf-8") == "precious"


def test_a_folder_is_no_page(tmp_path, capsys):
    assert f"--out {tmp_path / 'report.html'} names a file" in refused(["a", "--out", str(tmp_path)], capsys)


def test_the_folder_of_the_page_must_exist(tmp_path, capsys):
    out = tmp_path / "missing" / "page.html"
    assert f"mkdir -p {out.parent}" in refused(["a", "--out", str(out)], capsys)
    assert not out.parent.exists()


def test_a_run_without_a_step_leaves_no_page(tmp_path, capsys):
    out = tmp_path / "page.html"
    assert "the run has no step yet; found 'empty'" in refused(["a", "empty", "--out", str(out)], capsys)
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ConfigurationError, match="No space left on device"):
        command.report(["a"], str(tmp_path / "page.html"))
    assert list(tmp_path.iterdir()) == []


def test_without_plotly_the_extra_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    out = tmp_path / "page.html"
    assert 'pip install "metronome-rl[report]"' in refused(["a", "--out", str(out)], capsys)
    assert not out.exists()


def test_what_is_no_run_leaves_no_page(tmp_path, monkeypatch, capsys):
    monkeypatch.undo()
    pytest.importorskip("plotly", reason="plotly isn't installed")
    out = tmp_path / "page.html"
    assert "no such run" in refused([str(tmp_path / "nowhere"), "--out", str(out)], capsys)
    assert list(tmp_path.iterdir()) == []


def test_the_page_carries_the_installed_plotly_once(tmp_path, monkeypatch):
    offline = pytest.importorskip("plotly.offline", reason="plotly isn't installed")
    monkeypatch.setattr(command, "_plotly", lambda: str(offline.get_plotlyjs()))
    out = tmp_path / "page.html"
    command.report(["a"], str(out))
    assert out.read_text(encoding="utf-8").count("plotly.js v") == 1


def test_the_shipped_traces_did_the_same_work_and_periodic_waited_less(monkeypatch):
    monkeypatch.undo()
    traces = Path(command.__file__).parent / "traces"
    slow, fast = measure(read_run(traces / f"local_{name}") for name in ("synchronous", "periodic"))
    assert same_work(slow, fast).same
    assert slow.trainer_idle_share > fast.trainer_idle_share > 0
    assert timeline.panel(slow, "timeline") is not None
