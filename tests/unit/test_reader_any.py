"""Which reader reads what, overrides, and what no reader knows."""

from __future__ import annotations

from pathlib import Path

import pytest
from reader_files import events, jsonl, local_run

from metronome.errors import ConfigurationError
from metronome.observe.readers import SETTINGS, TRACES, read_run

COUNTS = ("workers", "slots", "trainer_ranks", "prompts", "group_size", "max_tokens")


@pytest.mark.parametrize("name", ["empty", "foreign"])
def test_a_folder_without_a_run_is_one_error_that_lists_what_was_looked_for(tmp_path: Path, name: str) -> None:
    if name == "foreign":
        (tmp_path / "notes.txt").write_text("Global step 1: nothing of ours", encoding="utf-8")
        (tmp_path / "data.jsonl").write_text('{"prompt": "2+2"}\n[1, 2]\n', encoding="utf-8")
        events(tmp_path / "events.out.tfevents.1.x", [(1.0, 1, {"loss": 1.0})])
    with pytest.raises(ConfigurationError, match=r"isn't the record of a run.*metrics\.jsonl") as caught:
        read_run(tmp_path)
    for host in ("local", "verl", "openrlhf", "areal", "csv"):
        assert f"{host}: " in str(caught.value)
    assert len(str(caught.value)) - len(str(tmp_path)) < 500
    assert caught.value.exit_code == 2


def test_a_path_that_does_not_exist_names_the_nearest(tmp_path: Path) -> None:
    local_run(tmp_path / "periodic")
    with pytest.raises(ConfigurationError, match=r"no such run.*use '.*periodic'"):
        read_run(tmp_path / "periodik")


def test_the_records_of_two_hosts_in_one_folder_are_refused(tmp_path: Path) -> None:
    events(tmp_path / "a" / "events.out.tfevents.1.x", [(1.0, 1, {"train/timing/step_total": 1.0})])
    jsonl(tmp_path / "b" / "run.jsonl", [{"step": 1, "data": {"timing_s/step": 1.0}}])
    with pytest.raises(ConfigurationError, match=r"several hosts.*verl, openrlhf"):
        read_run(tmp_path)


def test_overrides_add_what_the_records_lack(tmp_path: Path) -> None:
    folder, _ = local_run(tmp_path)
    assert "max_tokens" in read_run(folder).settings
    (folder / "recipe.yaml").unlink()
    run = read_run(folder, ["slots=64", "source=bounded", "staleness=2", "loss=a3po"])
    assert (run.settings["slots"], run.settings["staleness"], run.source) == (64, 2, "bounded")
    assert run.settings["loss"] == "a3po"
    assert "source" not in run.settings


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("slots=64", "slots contradicts the record, which has 8; found 64"),
        ("source=bounded", "source contradicts the record, which has periodic"),
        ("staleness=2", "staleness contradicts the record, which has 0"),
        ("loss=a3po", "loss contradicts the record, which has ppo"),
        ("group_size=16", "group_size contradicts the record, which has 2"),
        ("prompts=4", "prompts contradicts the record, which has 3"),
    ],
)
def test_an_override_that_contradicts_the_record_is_refused(tmp_path: Path, given: str, says: str) -> None:
    folder, _ = local_run(tmp_path)
    with pytest.raises(ConfigurationError, match=says):
        read_run(folder, [given])


def test_an_override_that_says_what_was_recorded_changes_nothing(tmp_path: Path) -> None:
    folder, _ = local_run(tmp_path)
    again = read_run(folder, ["slots=8", "source=periodic", "staleness=0", "group_size=2", "prompts=3"])
    assert (again.steps, again.source) == (read_run(folder).steps, "periodic")


def test_a_group_size_is_held_against_every_step_of_a_verl_run() -> None:
    assert read_run(TRACES / "verl", ["group_size=4"]).settings["group_size"] == 4
    with pytest.raises(ConfigurationError, match="group_size contradicts the record, which has 4"):
        read_run(TRACES / "verl", ["group_size=16"])
    with pytest.raises(
        ConfigurationError, match=r"staleness contradicts the record, which has 0.*or give source=bounded"
    ):
        read_run(TRACES / "verl", ["staleness=2"])
    assert read_run(TRACES / "verl", ["staleness=2", "source=bounded"]).settings["staleness"] == 2


def test_step_numbers_that_are_not_the_hosts_own_are_said() -> None:
    said = {
        "verl": "verl's step 1 is 0, verl's step 5 is 4.",
        "openrlhf": "OpenRLHF's step 1 is 0,",
        "local": "period 1 is 0,",
    }
    for name, words in said.items():
        assert any(words in note for note in read_run(TRACES / name).notes), name
    for name in ("areal", "example.csv"):  # theirs begin with 0
        assert not any("numbered" in note for note in read_run(TRACES / name).notes), name


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("wokers=2", "use 'workers'"),
        ("workers", "key=value"),
        ("workers=two", "workers can't be this.*'two'"),
        ("workers=true", "workers can't be this.*True"),
        ("workers=-1", "workers can't be this.*-1"),
        *((f"{key}=0", rf"{key} can't be this; found 0.*{key}=4 \(1 or more\)") for key in COUNTS),
        ("loss=foo", "loss can't be this; found 'foo'.*one of a3po, ppo"),
        ("attention=foo", "attention can't be this; found 'foo'.*one of host, shared_prompt"),
        ("group_controller=foo", "group_controller can't be this; found 'foo'.*sagc"),
        ("tokenizer=/nope", "no tokenizer there; found '/nope'"),
        ("staleness=.nan", "staleness can't be this"),
        ("source=sometimes", "synchronous, colocated, periodic, bounded"),
    ],
)
def test_an_override_that_does_not_fit_is_refused(tmp_path: Path, given: str, says: str) -> None:
    folder, _ = local_run(tmp_path)
    with pytest.raises(ConfigurationError, match=says):
        read_run(folder, [given])


def test_a_tokenizer_that_would_not_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    for name in ("local", "areal", "openrlhf", "example.csv"):
        with pytest.raises(ConfigurationError, match="only a dump of verl's is counted with a tokenizer"):
            read_run(TRACES / name, [f"tokenizer={tmp_path}"])


def test_a_file_of_a_local_run_is_its_folder(tmp_path: Path) -> None:
    folder, _ = local_run(tmp_path / "run")
    assert read_run(folder / "metrics.jsonl") == read_run(folder)


@pytest.mark.parametrize("name", sorted(one.name for one in TRACES.iterdir() if one.name != "README.md"))
def test_a_shipped_trace_is_read_whole_is_small_and_names_no_machine(name: str) -> None:
    place = TRACES / name
    run = read_run(place)
    assert run.steps
    assert [step.number for step in run.steps] == list(range(len(run.steps)))
    assert {one.step for one in run.rollouts} <= {step.number for step in run.steps}
    assert all(span.end >= span.start >= -1e-9 for span in run.spans)
    assert [span.start for span in run.spans] == sorted(span.start for span in run.spans)
    assert set(run.settings) <= {*SETTINGS, "recipe"}
    files = [place] if place.is_file() else [one for one in place.rglob("*") if one.is_file()]
    assert sum(one.stat().st_size for one in files) < 100_000
    for one in files:
        data = one.read_bytes()
        for word in (b"/work", b"/tmp/", b"/root", b"/home/", b"localhost", b"root@"):
            assert word not in data, one
    if place.is_dir():
        text = (place / "README.md").read_text(encoding="utf-8")
        assert "says nothing about a cluster" in " ".join(text.split()) or "say nothing about a cluster" in text


def test_a_shipped_trace_goes_by_its_name_unless_something_here_is_called_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = read_run("local_periodic")
    assert shipped.steps == read_run(TRACES / "local_periodic").steps
    assert any("ships" in note for note in shipped.notes)
    local_run(tmp_path / "local_periodic")
    assert len(read_run("local_periodic").steps) == 2


def test_a_folder_of_local_runs_names_them(tmp_path: Path) -> None:
    for name in ("one", "other"):
        local_run(tmp_path / name)
    with pytest.raises(ConfigurationError, match=r"give one of the folders in it: one, other$"):
        read_run(tmp_path)


def test_a_source_that_is_given_changes_what_is_read_from_the_times() -> None:
    """verl's time of gathering is generation only where the two take turns."""
    found, given = read_run(TRACES / "verl"), read_run(TRACES / "verl", ["source=bounded"])
    assert found.steps[0].generation == given.steps[0].waiting
    assert given.steps[0].generation is None
    assert given.spans == ()
    assert {one.version for one in given.rollouts} == {None}
    assert read_run(TRACES / "verl", ["source=synchronous"]).spans == found.spans
    alone = TRACES / "areal" / "rollout"
    assert {one.trained_version for one in read_run(alone).rollouts} == {None}
    assert {one.trained_version for one in read_run(alone, ["source=synchronous"]).rollouts} == {0, 1, 2, 3, 4}
