"""``metronome simulate``: shipped clusters, tables, JSON, bad input, and its speed."""

import json
import os
import time
from pathlib import Path

import pytest

from metronome.cli import main
from metronome.errors import ConfigurationError
from metronome.simulate import Policy, simulate
from metronome.simulate.command import load_cluster, shipped

DOCS = Path(__file__).parents[2] / "docs"
SMALL = """
description: two engines
engines: {count: 2, slots: 4, decode: {kind: law, tokens_per_second: 40, half: 5}}
trainer: {ranks: 2, seconds_per_token: 4e-3}
lengths: {kind: lognormal, median: 200, sigma: 0.7, cap: 2000}
prompts_per_step: 6
group_size: 4
prompt_tokens: 50
steps: 3
"""


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


def run(*arguments):
    return main(["simulate", *map(str, arguments)])


def test_three_clusters_are_shipped_and_every_assumption_is_marked_as_ours():
    assert shipped() == ["engines_1000", "gpu_8x8", "npu_64"]
    assert [load_cluster(name).devices() for name in shipped()] == [2000, 64, 64]
    assert all("ours, not measured" in load_cluster(name).description for name in shipped())


def test_a_shipped_cluster_is_found_by_name_and_its_table_says_simulated(capsys):
    assert run("gpu_8x8", "steps=2") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "simulated, not measured: 32 engines and 32 trainer ranks on 64 devices, 2 step(s)" in text
    assert "numbers ours, not measured" in text
    assert "without failures, over its first 2 step(s): 1" in text
    assert "of 63 splits tried, to within 2 engine(s). The fastest is" in text
    for words in ("bounded(2), recompute", "SAGC at fixed", "Split for periodic", "(bounds ours)", "x, rollouts"):
        assert words in text


def test_json_has_every_figure_and_the_file_the_same(small, tmp_path, capsys):
    out = tmp_path / "figures.json"
    assert run(small, "--json", "--out", out) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(out.read_text())
    assert printed["simulated"] is True
    first = printed["policies"][0]
    assert first["label"] == "synchronous"
    assert (first["ratio_at_equal_steps"], first["ratio_at_equal_rollouts"]) == (1.0, 1.0)
    for row in printed["policies"]:
        outcome = simulate(load_cluster(str(small)), Policy(**row["policy"]))
        assert row["step_seconds"] == outcome.step_seconds
        assert row["rollouts_per_second"] == outcome.rollouts_per_second
        assert row["ratio_at_equal_steps"] == first["step_seconds"] / outcome.step_seconds
        assert row["ratio_at_equal_rollouts"] == outcome.rollouts_per_second / first["rollouts_per_second"]
        assert row["seconds"] == [step.seconds for step in outcome.steps]
    assert printed["policies"][2]["ratio_at_equal_steps"] <= printed["periodic_bound"]
    assert printed["split"]["fastest"]["step_seconds"] <= printed["split"]["given"]["step_seconds"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["figures.json", "small.yaml"]


def test_where_g_moves_equal_steps_and_equal_rollouts_differ(small, capsys):
    policies = (
        "policies=[{source: periodic}, "
        "{source: periodic, group_controller: sagc, sagc: {budget: fixed_prompts, eta: 1, min_dwell: 1}}]"
    )
    assert run(small, "steps=30", "group_size=16", policies, "--json") == 0
    _, row = json.loads(capsys.readouterr().out)["policies"]
    assert len(set(row["group_sizes"])) > 1
    assert row["ratio_at_equal_steps"] > 1.1 * row["ratio_at_equal_rollouts"]
    assert run(small, "steps=30", "group_size=16", policies) == 0
    assert (
        "periodic, SAGC at fixed prompts: G is chosen among 4, 8, 16 with 6 prompts a step; it was 16 for"
        in " ".join(capsys.readouterr().out.split())
    )


SAGC = "policies=[{source: periodic}, {source: periodic, group_controller: sagc%s}]"


def test_sagc_chooses_from_the_clusters_own_g_downwards_and_says_among_what(small, capsys):
    def among(group_size, sagc=""):
        assert run(small, f"group_size={group_size}", SAGC % sagc, "--json") == 0
        return json.loads(capsys.readouterr().out)["policies"][1]

    for group_size, sizes in ((16, [4, 8, 16]), (8, [2, 4, 8]), (6, [3, 6]), (4, [2, 4])):
        row = among(group_size)
        assert row["policy"]["sagc"]["sizes"] == sizes
        assert row["group_sizes"][0] == group_size
        assert row["prompts_by_size"] == {str(size): 6 * group_size // size for size in sizes}
    row = among(8, ", sagc: {sizes: [4, 16], budget: fixed_prompts}")  # sizes that are given stay
    assert row["policy"]["sagc"]["sizes"] == [4, 16]
    assert row["prompts_by_size"] == {"4": 3, "16": 3}
    assert among(8, ", sagc: {sizes: [2, 8], start: 2}")["group_sizes"][0] == 2
    assert run(small, "group_size=8", SAGC % "") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "periodic, SAGC: G is chosen among 2, 4, 8 with 24, 12, 6 prompts a step; it" in said


def test_a_g_that_never_moved_is_told_so(small, capsys):
    assert run(small, "group_size=8", "steps=2", SAGC % ", sagc: {min_dwell: 5}") == 0
    assert "it never moved from 8 in 2 step(s): simulate more steps" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("group_size", [2, 3])
def test_a_group_without_a_half_leaves_sagc_out_and_refuses_one_that_is_asked_for(small, capsys, group_size):
    assert run(small, f"group_size={group_size}", "--json") == 0
    assert not any("SAGC" in row["label"] for row in json.loads(capsys.readouterr().out)["policies"])
    assert run(small, f"group_size={group_size}", SAGC % "") == 2
    assert "SAGC has no smaller group to choose" in capsys.readouterr().err
    assert run(small, f"group_size={group_size}", SAGC % ", sagc: {sizes: [2, 4]}") == 0


def test_print_shows_a_cluster_as_it_is_and_simulates_nothing(small, capsys, monkeypatch):
    monkeypatch.setattr("metronome.simulate.command.simulate_policy", lambda *_: pytest.fail("simulated"))
    for name in shipped():
        assert run("--print", name) == 0
        text = capsys.readouterr().out
        small.write_text(text)
        assert load_cluster(str(small)) == load_cluster(name)
        assert "# Every number here is ours, not measured" in text
    assert run("--print", small, "steps=2") == 2
    assert "leave them out" in capsys.readouterr().err
    assert run("--print", "gpu_8x9") == 2
    assert "gpu_8x8" in capsys.readouterr().err


def test_a_misspelt_key_is_named_rather_than_the_one_that_it_leaves_missing(small, capsys):
    small.write_text(SMALL.replace("slots:", "slot:"))
    assert run(small) == 2
    assert "unknown key; found 'slot'; in" in capsys.readouterr().err


def test_what_the_pages_say_of_overlap_against_a_colocated_run_is_simulated_so():
    """1.05x on 47 + 17 devices with free switches, 0.91x in halves; with the cluster's own costs 1.15x and 1.00x."""
    free = ["resharding_seconds=0", "publication_seconds=0"]
    split = ["engines.count=47", "trainer.ranks=17"]
    for overrides, told in ((free + split, "1.05x"), (free, "0.91x"), (split, "1.15x"), ([], "1.00x")):
        model = load_cluster("gpu_8x8", overrides)
        turns, ours = (simulate(model, Policy(source=one)) for one in ("synchronous_colocated", "periodic"))
        assert f"{turns.step_seconds / ours.step_seconds:.2f}x" == told
        for page in ("limits.md", "techniques/periodic.md"):
            assert told in (DOCS / page).read_text(encoding="utf-8"), page


def test_a_relative_file_of_lengths_starts_at_the_clusters_folder(small, monkeypatch, tmp_path):
    (tmp_path / "lengths.txt").write_text("100 200 300")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    model = load_cluster(str(small), ["lengths={kind: empirical, file: lengths.txt}"])
    assert simulate(model, Policy(), steps=1).rollouts == 24


@pytest.mark.parametrize(
    "override, words, more",
    [
        ("engine={}", "unknown key; found 'engine'", "engines"),
        ("engines.slot=3", "unknown key; found 'slot'", "slots"),
        ("engines.decode.halve=3", "unknown key; found 'halve'", "half"),
        ("trainer.second_per_token=3", "unknown key; found 'second_per_token'", "seconds_per_token"),
        ("lengths.sigmas=1", "unknown key; found 'sigmas'", "sigma"),
        ("policies=[{source: synchronous}, {sources: periodic}]", "policies.1", "source"),
        ("policies=[{source: periodical}]", "invalid value; found 'periodical'", "'periodic'"),
        ("policies=[periodic]", "a policy must be a mapping", "policies.0"),
        ("policies=[]", "invalid value", "at least one"),
        ("policies=[{source: periodic, max_staleness: 2}]", "invalid value", "max_staleness"),
        ("policies=[{group_controller: fixed, sagc: {tau: 3}}]", "invalid value", "group_controller: sagc"),
        ("policies=[{group_controller: sagc, sagc: {start: 4}}]", "invalid value", "give sizes beside start"),
        ("policies=[{group_controller: sagc, sagc: {taw: 3}}]", "unknown key; found 'taw'", "tau"),
        ("trainer.seconds_per_token=.nan", "invalid value", "seconds_per_token"),
        ("publication_seconds=-1", "invalid value", "0 or more"),
        ("engines.count=true", "invalid value; found True", "a whole number"),
        ("trainer.efficiency=true", "invalid value; found True", "a number"),
        ("engines.count=0", "invalid value", "1 or more"),
        ("engines.decode={kind: points, points: [[1, 60], [2, 30]]}", "invalid value", "4 sequences"),
        ("engines.decode={kind: points, points: [[2, 60], [1, 30]]}", "invalid value", "rising"),
        ("lengths={kind: empirical, file: nothing.txt}", "can't be read", "nothing.txt"),
        ("group_size=1", "invalid value", "2 or more"),
        ("engines.decode.tokens_per_second=1e-320", "invalid value", "1e-30 or more"),
        ("trainer.seconds_per_token=1e308", "invalid value", "1e+30 or less"),
        ("trainer.optimizer_seconds=1e308", "invalid value", "1e+30 or less"),
        ("failures={mean_seconds_between: 100, seconds_to_return: 1e308}", "invalid value", "1e+30 or less"),
        ("group_size=1000000000000", "invalid value", "10,000,000 rollouts or fewer"),
        ("policies=[{source: bounded, max_staleness: 1000000}]", "invalid value", "10,000,000 rollouts or fewer"),
        ("policies=[{group_controller: sagc, sagc: {sizes: [4, 1000000000]}}]", "invalid value", "10,000,000 rollouts"),
        ('lengths={kind: empirical, file: "a\\0"}', "can't be read", "lengths.file"),
    ],
)
def test_a_wrong_key_or_value_is_one_line_with_its_remedy(small, capsys, tmp_path, override, words, more):
    out = tmp_path / "figures.json"
    assert run(small, override, "--out", out) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.count("\n") == 1
    assert words in found.err
    assert more in found.err
    assert not out.exists()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "extremes",
    [
        ["engines.decode.tokens_per_second=1e30", "publication_seconds=1e30"],
        ["engines.decode.tokens_per_second=1e-30", "engines.decode.half=1e-30"],
        ["trainer.seconds_per_token=1e30", "trainer.optimizer_seconds=1e30"],
        ["failures={mean_seconds_between: 1e3, seconds_to_return: 1e30}"],
    ],
)
def test_figures_are_numbers_at_the_ends_of_what_is_accepted(small, capsys, extremes):
    assert run(small, *extremes, "--json") == 0
    text = capsys.readouterr().out
    assert "NaN" not in text
    assert "Infinity" not in text


@pytest.mark.parametrize(
    "text, words", [("", "an empty file"), ("[1]", "must be a mapping"), ("a: [", "not valid YAML")]
)
def test_a_file_that_is_no_cluster_is_refused(tmp_path, capsys, text, words):
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    assert run(path) == 2
    assert words in capsys.readouterr().err


def test_an_unknown_name_gets_the_nearest_shipped_one(capsys):
    with pytest.raises(ConfigurationError, match=r"no such cluster.*use 'gpu_8x8'"):
        load_cluster("gpu_8x9")
    assert run("gpu_8x9") == 2
    assert "gpu_8x8" in capsys.readouterr().err


def test_a_required_key_that_is_missing_is_named(small, capsys):
    small.write_text(SMALL.replace("prompt_tokens: 50\n", ""))
    assert run(small) == 2
    assert "prompt_tokens" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["nowhere/figures.json", ""])
def test_figures_that_cannot_be_written_leave_nothing(small, tmp_path, capsys, place):
    assert run(small, "steps=1", "--out", tmp_path / place) == 2
    assert capsys.readouterr().out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["small.yaml"]


def test_an_output_that_is_no_earlier_one_stays_as_it_is(small, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("metronome.simulate.command.simulate_policy", lambda *_: pytest.fail("simulated"))
    os.mkfifo(tmp_path / "device")  # as /dev/null, which a rename would replace
    (tmp_path / "notes.txt").write_text("notes")
    for out in (small, tmp_path / "notes.txt", tmp_path / "device", ""):
        assert run(small, "--out", out) == 2
        found = capsys.readouterr()
        assert (found.out, found.err.count("\n")) == ("", 1)
    assert small.read_text() == SMALL
    assert (tmp_path / "notes.txt").read_text() == "notes"
    assert (tmp_path / "device").is_fifo()
    assert len(list(tmp_path.iterdir())) == 3


def test_an_earlier_output_is_replaced(small, tmp_path, capsys):
    out = tmp_path / "figures.json"
    for seed in (0, 1):
        assert run(small, "steps=1", f"seed={seed}", "--out", out) == 0
        assert json.loads(out.read_text())["seed"] == seed


def test_the_bound_against_a_colocated_run_is_told_with_its_condition(small, capsys):
    assert run(small, "steps=1") == 0
    assert "free resharding, perfect scaling and no tail, 1.0x" in " ".join(capsys.readouterr().out.split())


def test_a_thousand_engines_and_a_hundred_thousand_rollouts_take_under_a_minute():
    model = load_cluster("engines_1000")
    assert (model.engines.count, model.prompts_per_step * model.group_size) == (1000, 100_000)
    start = time.process_time()
    outcome = simulate(model, Policy(source="periodic"))
    seconds = time.process_time() - start
    print(f"1,000 engines, 100,000 rollouts: {seconds:.1f} s of one core")
    assert outcome.rollouts == 100_000
    assert seconds < 60
