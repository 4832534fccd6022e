"""``metronome run RECIPE --smoke``, once a technique: the whole way from the recipe to trained steps."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("areal", reason="the AReaL adapter's tests need AReaL (requirements/areal.txt)")

FOLDER = Path(__file__).parents[2] / "recipes" / "areal"
METRIC = re.compile(r"(metronome/[a-z_/]+)\D*?([0-9.e+\-]+)")


def smoke(folder, name, *given):
    clean = {
        variable: value
        for variable, value in os.environ.items()
        if variable not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "AREAL_SPMD_MODE")
    }
    command = [sys.executable, "-m", "metronome.cli", "run", str(FOLDER / f"{name}.yaml"), *given, "--smoke"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=clean, cwd=folder)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-4000:]
    return said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "given", "wanted"),
    [
        ("periodic_qwen3_8b", ["overlay=dapo"], {"metronome/periodic/parts": 1}),
        ("a3po_setup1", [], {"metronome/loss/staleness_max": 2}),
        ("a3po_setup1", ["overlay=areal_loglinear"], {}),
        ("long_prompt", [], {"metronome/attention/tokens_fed": 1}),
        ("sagc", [], {"metronome/group_controller/size": 4}),
        (
            "all_four",
            ["overlay=bounded"],
            {"metronome/loss/staleness_max": 2, "metronome/attention/tokens_fed": 1, "metronome/loss/calls": 1},
        ),
    ],
)
def test_a_smoke_run_trains_with_its_technique(tmp_path, name, given, wanted):
    said = smoke(tmp_path, name, *given, "--output", str(tmp_path))
    found = {}
    for metric, value in METRIC.findall(said):
        found.setdefault(metric, []).append(float(value))
    for metric, least in wanted.items():
        assert max(found.get(metric, [-1.0])) >= least, (metric, found)


@pytest.mark.slow
def test_a_smoke_run_goes_on_as_the_page_says_and_says_when_it_is_done(tmp_path):
    """sagc, as on the page: from step 4 to 6, and then there is nothing left."""

    def steps(said):
        return sorted({int(one) for one in re.findall(r"Train step (\d+)/", said)})

    assert steps(smoke(tmp_path, "sagc", "--output", str(tmp_path))) == [1, 2, 3, 4]
    more = ("--resume", str(tmp_path), "args.total_train_steps=6")
    said = smoke(tmp_path, "sagc", *more)
    assert steps(said) == [5, 6]
    assert "nothing is left" not in said
    said = smoke(tmp_path, "sagc", *more)
    assert steps(said) == []
    assert "metronome: nothing is left to train: the run is finished, step 6 of 6" in said
