"""``metronome reproduce``: exit codes, what is printed, and files that are written whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from metronome.cli import main
from metronome.reproduce import catalogue, files, rows

QUICK = ("shared-8x", "survey-generation-time", "periodic-3.12x")


def lines(text: str) -> str:
    return " ".join(text.split())


def test_the_table_is_grouped_by_technique_with_paper_ours_and_tolerance(capsys) -> None:
    assert main(["reproduce", *QUICK]) == 0
    shown = lines(capsys.readouterr().out)
    for technique in ("Periodic asynchrony", "Shared-prompt attention", "Buffers and staleness (survey)"):
        assert technique in shown
    assert "tokens 8x 7.788x 8x +- 0.5x" in shown
    assert "not reproducible here: periodic-3.12x (Qwen3-8B against MindSpeed-RL): Another framework" in shown
    assert "survey-generation-time: 512 rollouts of one H100 take this long. Source: Hugging Face blog" in shown
    assert "2 of 2 rows that can be computed are shown within their tolerance; 1 not reproducible here" in shown


def test_a_row_out_of_tolerance_is_exit_code_1_and_says_what_was_wanted(capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("metronome.shared_prompt.cost.token_ratio", lambda *_: 1.0)
    assert main(["reproduce", "shared-8x", "--out", str(tmp_path / "r")]) == 1
    shown = lines(capsys.readouterr().out)
    assert "out of tolerance: shared-8x" in shown
    assert "tokens: 1x, wanted 8x +- 0.5x" in shown
    written = json.loads((tmp_path / "r.json").read_text())
    assert written["passed"] is False
    assert written["rows"][0]["status"] == "OUT OF TOLERANCE"


def test_a_row_that_needs_torch_is_not_success_without_it(capsys, monkeypatch) -> None:
    real = rows.find_spec
    monkeypatch.setattr(rows, "find_spec", lambda name: None if name == "torch" else real(name))
    monkeypatch.setattr("metronome.reproduce.command.find_spec", rows.find_spec)
    assert main(["reproduce", "shared-8x", "a3po-alpha-table"]) == 1
    shown = lines(capsys.readouterr().out)
    assert "not run: a3po-alpha-table (alpha = 1/d for d >= 1): needs torch" in shown
    assert "1 of 2 rows that can be computed are shown within their tolerance; 1 not run, so not shown" in shown


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["shared-8"], "no such row; found 'shared-8'; in metronome reproduce; to mend: use 'shared-8x'"),
        (["shared-measured", "--cheap"], "none of these rows is cheap; found 'shared-measured'"),
        (["--list", "--out", "x"], "a list of rows computes nothing that could be written"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, told, capsys) -> None:
    assert main(["reproduce", *arguments]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("path", ["gone/r", "folder.json", ""])
def test_a_path_that_cannot_be_written_is_told_before_anything_is_computed(path, capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.md").mkdir()
    monkeypatch.setattr("metronome.reproduce.command.run", lambda row: pytest.fail("computed"))
    assert main(["reproduce", "shared-8x", "--out", path]) == 2
    assert "the results can't be written" in capsys.readouterr().err
    assert sorted(one.name for one in tmp_path.rglob("*")) == ["folder.md"]


def test_only_an_earlier_result_is_replaced(capsys, monkeypatch, tmp_path) -> None:
    assert main(["reproduce", "shared-8x", "--out", str(tmp_path / "r")]) == 0
    assert main(["reproduce", "shared-tokens", "--out", str(tmp_path / "r")]) == 0
    assert "shared-8x" not in (tmp_path / "r.md").read_text()
    (tmp_path / "README.md").write_text("# Something else")
    monkeypatch.setattr("metronome.reproduce.command.run", lambda row: pytest.fail("computed"))
    assert main(["reproduce", "shared-8x", "--out", str(tmp_path / "README")]) == 2
    assert "README.md is another file" in capsys.readouterr().err
    assert (tmp_path / "README.md").read_text() == "# Something else"
    assert not (tmp_path / "README.json").exists()


def test_a_calibrated_row_is_called_so(capsys) -> None:
    assert main(["reproduce", "sagc-99.6-43.4"]) == 0
    shown = lines(capsys.readouterr().out)
    assert "simulation, calibrated: shown" in shown
    assert "calibrated, not reproduced: SAGC's rates and hours; delta isn't public" in shown


def test_the_reason_of_a_row_that_cannot_be_shown_is_told_once(capsys) -> None:
    assert main(["reproduce", "periodic-3.12x"]) == 0
    shown = lines(capsys.readouterr().out)
    assert shown.count("Another framework on other devices") == 1
    assert "Source: arXiv 2511.18871" in shown
    assert "rows that can be computed" not in shown  # there is none
    assert "1 not reproducible here" in shown


def test_the_help_names_both_reasons_for_exit_code_1(capsys) -> None:
    assert main(["reproduce", "--help"]) == 0
    assert "out of its tolerance or couldn't be run" in lines(capsys.readouterr().out.replace("│", " "))


def test_the_list_names_every_row_and_computes_nothing(capsys, monkeypatch) -> None:
    monkeypatch.setattr("metronome.reproduce.command.run", lambda row: pytest.fail("computed"))
    assert main(["reproduce", "--list"]) == 0
    shown = capsys.readouterr().out
    assert all(row.name in shown for row in catalogue.ROWS)


def test_both_files_are_written_and_agree(capsys, tmp_path) -> None:
    assert main(["reproduce", *QUICK, "--out", str(tmp_path / "r.json")]) == 0
    assert sorted(one.name for one in tmp_path.iterdir()) == ["r.json", "r.md"]
    written, page = json.loads((tmp_path / "r.json").read_text()), (tmp_path / "r.md").read_text()
    assert [row["name"] for row in written["rows"]] == [
        row.name for row in catalogue.ROWS if row.name in QUICK
    ]  # in the table's order
    assert written["rows"][1]["figures"][0]["paper"] == 8.0
    assert written["rows"][0]["status"] == "not reproducible here"
    assert f"    {written['command']}\n" in page
    assert "| tokens | 8x | 7.788x | 8x +- 0.5x |" in page
    assert "Not reproducible here:" in page
    assert "| `periodic-3.12x` | Qwen3-8B against MindSpeed-RL | speed 3.12x |" in page
    assert all(len(line.split(" | ")) == 5 for line in page.splitlines() if line.startswith("| `"))


def test_a_failed_write_leaves_the_old_files(monkeypatch, tmp_path) -> None:
    page, figures = tmp_path / "r.md", tmp_path / "r.json"
    page.write_text("old")

    def full(self, mode):
        if "r.json" in self.name:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "chmod", full)
    with pytest.raises(rows.MetronomeError, match="No space left"):
        files.write({page: "new", figures: "new"})
    assert [one.name for one in tmp_path.iterdir()] == ["r.md"]
    assert page.read_text() == "old"
