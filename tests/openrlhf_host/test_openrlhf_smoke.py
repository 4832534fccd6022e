"""``metronome run RECIPE --smoke`` as a user types it, once per technique: each was at work, by the printed metrics."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("openrlhf", reason="the OpenRLHF adapter's tests need OpenRLHF (requirements/openrlhf.txt)")

import openrlhf_head
import openrlhf_session
import psutil

from metronome_openrlhf.cpu.assets import make

pytestmark = pytest.mark.timeout(900)

RECIPES = Path(__file__).parents[2] / "recipes" / "openrlhf"
COMMAND = Path(sys.executable).with_name("metronome")


@pytest.fixture(scope="module")
def ray_address():
    """One Ray for all runs, which the environment names."""
    with openrlhf_head.head() as address:
        yield address


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    """The tiny model and its data, made once: a run that makes its own takes ten seconds longer."""
    folder = tmp_path_factory.mktemp("assets")
    make(folder)
    return f"assets={folder}"


def run(name, address, *more, **variables):
    """``metronome run NAME --smoke`` with Ray at ``address``."""
    command = [str(COMMAND), "run", str(RECIPES / f"{name}.yaml"), "--smoke", *more]
    found = openrlhf_session.run_command(command, variables={"RAY_ADDRESS": address, **variables})
    assert found.returncode == 0, found.tail()
    return found


def smoke(*arguments, **variables):
    """Runs a recipe and returns what it printed and its three steps, whose gradients moved the weights."""
    found = run(*arguments, **variables)
    assert [one["step"] for one in found.steps] == [1, 2, 3], found.tail()
    for one in found.steps:
        assert one["actor_grad_norm"] > 0
        assert one["metronome/weights/changed"] == one["metronome/weights/finite"] == 1
    return found


def closing(found):
    """The line that a smoke run ends with."""
    [line] = [one for one in found.text.splitlines() if one.startswith("metronome: smoke run: 3 steps")]
    return line


def test_periodic_asynchrony_trains_groups_as_they_arrive(ray_address, tmp_path):
    before = Path("ckpt").exists()  # where OpenRLHF writes by default
    # No argument but --smoke: it runs in a temporary folder.
    found = smoke("periodic_qwen3_8b", ray_address, TMPDIR=str(tmp_path))
    parts = [one["metronome/periodic/parts"] for one in found.steps]
    assert max(parts) > 1  # trained while others were generated
    for one in found.steps:
        assert one["metronome/periodic/rows"] == one["rollout/num_samples"] == 16
    [folder] = tmp_path.glob("metronome-smoke-*")
    for part in (f"model in {folder / 'trained'}", f"tiny model and data in {folder}", "parts"):
        assert part in closing(found)
    assert (folder / "trained" / "model.safetensors").is_file()
    assert Path("ckpt").exists() == before


def test_a3po_corrects_samples_that_are_two_versions_old(ray_address, assets, tmp_path):
    found = smoke("a3po_setup1", ray_address, assets, "--output", str(tmp_path))
    assert [one["metronome/loss/staleness_max"] for one in found.steps] == [0, 1, 2]
    # Up to one version behind, A-3PO is plain PPO: the proximal policy is the engines'.
    assert [one["metronome/loss/off_behavior"] > 0 for one in found.steps] == [False, False, True]
    assert "samples up to 2 versions old" in closing(found)
    assert f"--resume {tmp_path} goes on" in closing(found)


def test_shared_prompts_feed_fewer_tokens_than_separate_rows(ray_address, assets, tmp_path):
    found = smoke("long_prompt", ray_address, assets, "--output", str(tmp_path))
    for one in found.steps:
        assert one["metronome/attention/calls"] > 0
        assert 0 < one["metronome/attention/tokens_fed"] < one["metronome/attention/tokens_separate"]
    assert "tokens fed for" in closing(found)


def test_sagc_moves_the_group_size_and_a_resumed_run_goes_on_with_it(ray_address, assets, tmp_path):
    found = smoke("sagc", ray_address, assets, "--output", str(tmp_path))
    assert [one["metronome/group_controller/size"] for one in found.steps] == [2, 4, 4]
    assert [one["rollout/num_samples"] for one in found.steps] == [8, 16, 16]  # four prompts: the batch follows it
    assert "G 2, 4, 4" in closing(found)
    resumed = run("sagc", ray_address, assets, "--resume", str(tmp_path))
    # The checkpoint is the second step's: the third is trained again, with the controller's G.
    assert [(one["step"], one["metronome/group_controller/size"]) for one in resumed.steps] == [(3, 4)]


def test_ctrl_c_ends_a_smoke_run_and_its_ray(tmp_path):
    command = [str(COMMAND), "run", str(RECIPES / "sagc.yaml"), "--smoke", "--output", str(tmp_path / "out")]
    log = tmp_path / "log"
    with openrlhf_head.folder() as folder, log.open("w", encoding="utf-8") as out:
        variables = openrlhf_head.environment() | {"RAY_TMPDIR": str(folder)}
        process = subprocess.Popen(command, env=variables, stdout=out, stderr=out, start_new_session=True)
        try:
            # A worker of OpenRLHF's is there: Ray and all of its processes are up.
            assert openrlhf_head.until(lambda: "pid=" in log.read_text(errors="replace"), 300, process)
            begun = openrlhf_head.tree(process.pid)
            assert any(one.name() == "raylet" for one in begun)
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            assert process.wait(timeout=100) == 130
            _, left = psutil.wait_procs(begun, timeout=30)
            assert left == []
        finally:
            openrlhf_head.end(process.pid)
    assert "metronome: smoke run: ended with exit code 130 after 0 steps" in log.read_text(errors="replace")
