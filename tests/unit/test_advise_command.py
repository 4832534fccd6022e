"""``metronome advise``: a CSV from end to end, text, JSON and files."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace

import pytest
from advise_runs import made

from metronome.advise.advise import advise
from metronome.advise.command import advise as command
from metronome.advise.figures import as_json
from metronome.advise.given import Given
from metronome.advise.text import text
from metronome.errors import ConfigurationError
from metronome.observe.readers import read_run

pytest.importorskip("simpy")


@pytest.fixture
def table(tmp_path):
    """A CSV of a synchronous run: what a step trains between its last response and the next one's first."""
    path = tmp_path / "run.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "prompt", "response_length", "start", "end"])
        for one in made("synchronous", single=True).rollouts:
            writer.writerow([one.step, one.prompt, one.response_tokens, one.start, one.end])
    return path


def test_a_csv_is_advised_on_once_its_schedule_is_given(table, capsys):
    with pytest.raises(ConfigurationError, match="source=synchronous"):
        command(str(table), [], out=None, as_json=False)
    assert command(str(table), ["source=synchronous", "slots=4"], out=None, as_json=False) == 0
    shown = capsys.readouterr().out
    assert "training is the time between a step's last response and the next step's first" in shown
    assert re.search(r"periodic asynchrony .*1\.[2-9]\dx .* turn on", shown)
    assert re.search(r"shared prompts +- +not known", shown)
    assert "give prompt_tokens=N" in shown
    command(str(table), ["source=synchronous", "slots=4", "prompt_tokens=200"], out=None, as_json=False)
    assert re.search(r"shared prompts +[1-9]\.\d\dx", capsys.readouterr().out)


def test_without_prompts_nothing_is_said_or_fitted_of_reading_them():
    known = read_run("example.csv", ["source=synchronous"])
    unknown = replace(
        known,
        rollouts=tuple(replace(one, prompt_tokens=None) for one in known.rollouts),
        steps=tuple(replace(one, prompt_tokens=None) for one in known.steps),
    )
    advice = advise(unknown)
    assert "reading a prompt" not in text(advice)
    model = as_json(advice)["model"]
    assert (model["prefill_seconds_per_token"], model["prefill_seconds_per_token_at_most"]) == (0.0, None)
    # Negative controls: with the prompts' lengths it is fitted, recorded or given.
    assert "reading a prompt takes an engine" in text(advise(known))
    assert "reading a prompt takes an engine" in text(advise(unknown, Given(prompt_tokens=10)))


def test_the_last_step_of_a_csv_ends_with_its_last_response(table, capsys):
    for given in ([], ["training_seconds=3"]):
        command(str(table), ["source=synchronous", *given], out=None, as_json=False)
        shown = capsys.readouterr().out
        assert "the last step ends with its last response" in shown
        assert "Model (ours; 5 recorded steps)" in shown  # of 6


def test_one_step_of_a_csv_cannot_show_training(table, capsys):
    rows = table.read_text().splitlines()
    table.write_text("\n".join([rows[0], *(line for line in rows if line.startswith("0,"))]) + "\n")
    with pytest.raises(ConfigurationError, match="one step can't show training"):
        command(str(table), ["source=synchronous"], out=None, as_json=False)
    command(str(table), ["source=synchronous", "training_seconds=3"], out=None, as_json=False)
    shown = capsys.readouterr().out
    assert "the last step ends" not in shown
    assert "not enough steps" in shown


def test_shares_say_of_what_they_are(capsys):
    command("local_synchronous", [], out=None, as_json=False)
    shown = capsys.readouterr().out
    assert re.search(r"; a step's mean above 2 in \d+ % of the steps", shown)
    assert re.search(r"groups whose rewards are all equal: \d+ %", shown)


def test_json_says_what_the_text_says(table, tmp_path, capsys):
    given, out = ["source=synchronous", "prompt_tokens=20"], tmp_path / "advice.json"
    command(str(table), given, out=str(out), as_json=False)
    shown = capsys.readouterr().out
    command(str(table), given, out=None, as_json=True)
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(out.read_text())
    rows = {one["name"]: one for one in printed["techniques"]}
    lines = [line for line in shown.splitlines() if re.match(r".*\d\.\d\dx \(", line) and not line.startswith("  ")]
    assert len(lines) >= 6
    for line in lines:
        name, found = re.match(r"(.*?)  +(\d+\.\d\d)x \((\d+\.\d\d) to (\d+\.\d\d)\)", line).group(1), rows
        value, low, high = re.search(r"(\d+\.\d\d)x \((\d+\.\d\d) to (\d+\.\d\d)\)", line).groups()
        gain = found[name]["gain"]
        assert (f"{gain['value']:.2f}", f"{gain['low']:.2f}", f"{gain['high']:.2f}") == (value, low, high)


def test_every_gain_in_the_sentences_is_in_the_json():
    for run in (made("synchronous"), made("periodic"), made("synchronous", steps=2)):
        advice = advise(run)
        figures = json.loads(json.dumps(as_json(advice), allow_nan=False))
        known = set()
        for one in figures["techniques"]:
            for gain in (one["gain"], one["gain_over"]):
                known |= {f"{gain['value']:.2f}"} if gain else set()
        printed = set(re.findall(r"(?:gains |  )(\d+\.\d\d)x", text(advice)))
        assert printed
        assert printed <= known


def test_nothing_is_written_when_the_run_is_refused(table, tmp_path):
    out = tmp_path / "advice.json"
    with pytest.raises(ConfigurationError):
        command(str(table), [], out=str(out), as_json=False)
    with pytest.raises(ConfigurationError, match=r"the folder of the output doesn.t exist.*mkdir -p"):
        command(str(table), ["source=synchronous"], out=str(tmp_path / "none" / "advice.json"), as_json=False)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["run.csv"]


def test_an_output_replaces_nothing_but_earlier_advice(table, tmp_path):
    given, before = ["source=synchronous", "slots=4"], table.read_text()
    for place, words in ((str(table), "stays as it is"), ("/dev/null", "stays as it is"), ("", "folder")):
        with pytest.raises(ConfigurationError, match=words):
            command(str(table), given, out=place, as_json=False)
    assert table.read_text() == before
    out = tmp_path / "advice.json"
    for _ in range(2):
        command(str(table), given, out=str(out), as_json=False)
    assert sorted(tmp_path.iterdir()) == [out, table]


def test_a_sigma_that_would_not_be_read_is_refused(table):
    with pytest.raises(ConfigurationError, match=r"no lengths are drawn; found 'sigma=0\.3'"):
        command(str(table), ["source=synchronous", "slots=4", "sigma=0.3"], out=None, as_json=False)


def test_what_is_not_a_run_is_refused(tmp_path):
    for place in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigurationError):
            command(str(place), [], out=None, as_json=False)


def test_the_answer_is_the_same_every_time():
    assert text(advise(made("synchronous"))) == text(advise(made("synchronous")))


@pytest.mark.parametrize(
    ("trace", "given", "host"),
    [
        ("local_synchronous", [], "local"),
        ("verl", ["workers=2"], "verl"),
        ("openrlhf", ["prompts=4", "group_size=4"], "openrlhf"),
        ("areal", [], "areal"),
        ("example.csv", ["source=synchronous"], "csv"),
    ],
)
def test_a_shipped_trace_of_each_format_is_advised_on(trace, given, host, capsys):
    assert command(trace, given, out=None, as_json=True) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["host"] == host
    assert len(shown["techniques"]) == 9
    verdicts = {one["verdict"] for one in shown["techniques"]}
    over = {f"no gain over {less}" for less in ("periodic", "bounded 1", "bounded 2")}
    assert verdicts <= {"turn on", "try", "not worth it", "already on", "not known", "refused", *over}
    for one in shown["techniques"]:
        assert one["why"]
        assert (one["gain"] is None) == (one["method"] == "")
    assert command(trace, given, out=None, as_json=False) == 0
    shown_text = capsys.readouterr().out
    assert "Expected, not measured: times as fast as the run as it was (already on: as without it)" in shown_text
    flags = {one["flag"] for one in shown["techniques"]}
    assert all(len(line) <= 118 for line in shown_text.splitlines() if line.strip() not in flags)
    for verdict in verdicts:
        assert f"\n{verdict}: " in shown_text
    assert "not recorded of" not in shown_text


def test_the_openrlhf_trace_says_what_it_lacks():
    """Its lengths aren't recorded and its steps differ by more than the model explains."""
    with pytest.raises(ConfigurationError, match="prompts=64 group_size=8"):
        command("openrlhf", [], out=None, as_json=False)
