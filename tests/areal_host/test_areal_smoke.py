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
    clean = {
        variable: value
        for variable, value in os.environ.items()
        if variable not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "AREAL_SPMD_MODE")
    }
    command = [sys.executable, "-m", "metronome.cli", "run", str(FOLDER / f"{name}.yaml"), *given, "--smoke"]
    done = subprocess.run(
        [*command, "--output", str(tmp_path)], capture_output=True, text=True, timeout=400, env=clean, cwd=tmp_path
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-4000:]
    found = {}
    for metric, value in METRIC.findall(said):
        found.setdefault(metric, []).append(float(value))
    for metric, least in wanted.items():
        assert max(found.get(metric, [-1.0])) >= least, (metric, found)
