"""``metronome run RECIPE --smoke`` as a user types it, once per technique: each was at work, by the printed metrics."""

import math
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="the verl adapter's tests need verl (requirements/verl.txt)")
pytest.importorskip("transfer_queue", reason="verl's V1 trainer needs TransferQueue (requirements/verl.txt)")

import ray_session

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RECIPES = Path(__file__).parents[2] / "recipes" / "verl"
COMMAND = Path(sys.executable).with_name("metronome")


@pytest.fixture(scope="module")
def session(request):
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def progress(line):
        with capture.global_and_fixture_disabled():
            print(f"\n  smoke: {line}", end="", flush=True)

    return ray_session.shared_session(progress)


def smoke(name, session, *more, **variables):
    """Runs the recipe and returns the metrics of its steps: three, with finite gradients that moved the weights."""
    command = [str(COMMAND), "run", str(RECIPES / f"{name}.yaml"), "--smoke", *more]
    output = ray_session.run_command(command, session, timeout=840, variables=variables)
    assert output.returncode == 0, output.tail()
    assert [step["step"] for step in output.metrics] == [1, 2, 3], output.tail()
    for step in output.metrics:
        assert math.isfinite(step["actor/grad_norm"])
        assert step["metronome/weights/changed"] > 0
    return output.metrics


def test_periodic_asynchrony_trains_groups_as_they_arrive(session, tmp_path):
    before = sorted(session.folder.iterdir())
    # No argument but --smoke: it runs in a temporary folder.
    steps = smoke("periodic_qwen3_8b", session, RAY_ADDRESS=session.address, TMPDIR=str(tmp_path))
    for step in steps:
        assert step["training/off_policy/trajectory_staleness/max"] == 0
    assert max(step["metronome/periodic/parts"] for step in steps) > 1  # trained while others were generated
    [folder] = tmp_path.glob("metronome-smoke-*")
    assert (folder / "model").is_dir()
    assert sorted(session.folder.iterdir()) == before  # nothing was left where the user stands


def test_a3po_corrects_samples_that_are_two_versions_old(session, tmp_path):
    steps = smoke("a3po_setup1", session, "--output", str(tmp_path), RAY_ADDRESS=session.address)
    assert [step["metronome/loss/calls"] > 0 for step in steps] == [True] * 3
    # Up to one version behind, A-3PO is plain PPO: the proximal policy is the behaviour policy.
    assert [step["metronome/loss/off_behavior"] > 0 for step in steps] == [False, False, True]
    assert steps[2]["metronome/loss/staleness_max"] == 2


def test_shared_prompts_feed_fewer_tokens_than_separate_rows(session, tmp_path):
    address = f"args.+ray_kwargs.ray_init.address={session.address}"
    for step in smoke("long_prompt", session, address, "--output", str(tmp_path)):
        assert step["metronome/attention/calls"] > 0
        assert 0 < step["metronome/attention/tokens_fed"] < step["metronome/attention/tokens_separate"]


def test_sagc_moves_the_group_size(session, tmp_path):
    steps = smoke("sagc", session, "--output", str(tmp_path), RAY_ADDRESS=session.address)
    assert [step["metronome/group_controller/size"] for step in steps] == [2, 4, 4]
    assert [rows(step) for step in steps] == [8, 16, 16]  # four prompts: what was trained follows it


def rows(step):
    return round(step["perf/total_num_tokens"] / (step["prompt_length/mean"] + step["response_length/mean"]))
