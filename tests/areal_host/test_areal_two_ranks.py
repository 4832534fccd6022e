"""Two data-parallel ranks under torchrun: one rank's gradient, one G, and as many passes whatever they hold."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("areal", reason="the AReaL adapter's tests need AReaL (requirements/areal.txt)")

import areal_parts_two_ranks as script
import areal_room as room
import torch
from areal_engines import apart, in_parts, ours, whole


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What both ranks left."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    path = Path(script.__file__)
    run = subprocess.run(
        [*launch, str(path), str(folder)], capture_output=True, text=True, timeout=300, env=environment
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    return [torch.load(folder / f"found.{rank}", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """One rank's gradient of the same groups in one batch, and of a batch that lacks one of them."""
    keys = script.NARROW | {"metronome.loss": "a3po"}
    with ours(room.configuration(tmp_path_factory.mktemp("one"), keys)) as engine:
        engine.set_version(3)
        right = in_parts(engine, [script.groups()])
        metrics = dict(engine.found)
        return right, metrics, whole(engine, script.groups()[:-1])


def test_parts_over_two_ranks_have_one_ranks_gradient_and_tell_its_metrics(found, one):
    right, metrics, other = one
    for rank in found:
        assert apart(rank["gradient"], right) < 1e-6
        assert apart(rank["lopsided"], right) < 1e-6  # a rank without any group
        assert apart(rank["gradient"], other) > 1e-2
    for name, value in metrics.items():
        if not name.endswith("calls"):
            assert found[0]["metrics"][name] == found[1]["metrics"][name] == pytest.approx(value, rel=1e-5), name


def test_both_ranks_choose_the_same_g_and_step_with_the_same_gradient(found):
    first, second = found
    assert first["controller"] == second["controller"]
    sizes = [int(step["metronome/group_controller/size"]) for step in first["steps"]]
    assert len(sizes) == 4
    assert len(set(sizes)) > 1
    assert first["steps"] == second["steps"]
    assert first["norms"] == second["norms"]
    # 4 prompts of a step and 8 responses at the most are a budget of 32 responses, whatever G.
    assert [
        step["metronome/rollout_source/prompts"] * size for step, size in zip(first["steps"], sizes, strict=True)
    ] == [32.0] * 4


def test_both_ranks_train_as_many_parts_and_groups(found):
    first, second = (rank["trained"] for rank in found)
    assert len(first) == len(second)
    assert sum(map(len, first)) == sum(map(len, second))


def test_a_bounded_batch_is_shared_equally(found):
    for groups, staleness in (rank["bounded"] for rank in found):
        assert groups == [2, 2]
        assert staleness == [0.0, 1.0]
