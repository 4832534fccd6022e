"""AReaL's single controller with its local scheduler: real RPC workers train and generate on the CPU."""

import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("areal", reason="the AReaL adapter's tests need AReaL (requirements/areal.txt)")

import areal_controller_script as script
import areal_room as room
import torch
from areal.infra.rpc.serialization import deserialize_value, serialize_value
from areal.utils.recover import RecoverHandler, RecoverInfo
from areal_engines import apart, ours
from safetensors.torch import load_file

from metronome.errors import ConfigurationError
from metronome_areal.arrange import arrange
from metronome_areal.config import PPOConfig, read, with_block
from metronome_areal.controller import check_controller, travelling, workflow_path
from metronome_areal.cpu import assets
from metronome_areal.cpu.arguments import by_controller
from metronome_areal.prompts import KEY
from metronome_areal.state import data_of, take

TIMEOUT = 180
RECOVER = {"recover.mode": "on", "recover.freq_steps": 1}


def launched(folder, keys):
    """The script under our launcher, with ``scheduler.type=local``; every process it started is ended with it."""
    room.configuration(folder, keys)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "AREAL_SPMD_MODE")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    command = [sys.executable, "-m", "metronome_areal", script.__file__, "--config", str(folder / "config.yaml")]
    log = folder / "log"
    with log.open("w") as to:
        run = subprocess.Popen(
            [*command, "scheduler.type=local"], stdout=to, stderr=to, env=environment, start_new_session=True
        )
    try:
        code = run.wait(timeout=TIMEOUT)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
    assert code == 0, log.read_text()[-6000:]
    return torch.load(folder / "found", weights_only=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("controller")
    torch.save(groups(), found / "groups")
    return found


@pytest.fixture(scope="module")
def found(folder):
    return launched(folder, script.HOOKS | RECOVER | {"scheduler.type": None, "actor.backend": "fsdp:d2"})


def groups():
    """Five groups, of 4, 3, 4, 6 and 2 rows, stale by none to three versions."""
    found = room.random_groups([4, 3, 4, 6, 2])
    draw = torch.Generator().manual_seed(5)
    return [{**one, "versions": torch.randint(0, 4, one["versions"].shape, generator=draw)} for one in found]


def weights(folder):
    """A saved model as one row."""
    return torch.cat([value.flatten() for _, value in sorted(load_file(folder / "model.safetensors").items())])


def by_one_process(folder, tmp_path, sent):
    """The weights that a period of these groups leaves in one process, from where the controller's began."""
    keys = script.HOOKS | {"actor.path": str(folder / "before"), "tokenizer_path": str(folder / "model")}
    assets.make(tmp_path)
    with ours(room.configuration(tmp_path, keys)) as engine:
        engine.set_version(3)
        engine.metronome_begin()
        engine.metronome_part(engine.metronome_level([dict(one) for one in sent]))
        metrics = engine.metronome_step()
        script.saved(engine, tmp_path / "after")
        return weights(tmp_path / "after"), metrics


def test_scheduler_local_starts_workers_in_the_room(found):
    assert found["workers"] == {"actor": 2, "rollout": 1}
    assert found["names"] == ["MetronomeController", "RolloutController", "LocalScheduler"]


def test_a_period_over_rpc_leaves_one_processs_weights(found, folder, tmp_path):
    metrics, lengths = found["by hand"]
    before, after = weights(folder / "before"), weights(folder / "after")
    right, told = by_one_process(folder, tmp_path / "right", groups())
    assert float((after - right).abs().max()) < 1e-6
    assert apart(after - before, right - before) < 1e-5
    other, _ = by_one_process(folder, tmp_path / "other", groups()[:-1])
    assert apart(after - before, other - before) > 1e-2
    for name, value in told.items():
        if not name.endswith("calls") and name != "num_micro_batches":
            assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert len(lengths) == 6  # a reference's log-probs, of a masked group too
    assert lengths[-1] == lengths[min(range(5), key=lambda place: lengths[place][1])]


def test_a_step_of_the_run_is_one_processs(found, folder, tmp_path):
    assets.make(tmp_path)
    config = room.configuration(tmp_path, script.HOOKS | {"total_train_steps": 1})
    first = weights(folder / "model")
    with room.trainer(config) as one:
        one.train(
            workflow=room.workflow(config, script.Direct, script.reward),
            dynamic_filter_fn=f"{script.MODULE}.more_than_two_tokens",
        )
        script.saved(one.actor, tmp_path / "one step")
    # Log-probs are the engines', which batch prompts as they come: 1e-6 each.
    right = weights(tmp_path / "one step") - first
    assert apart(weights(folder / "one step") - first, right) < 1e-4
    assert float(right.norm()) > 1e-2


def test_parts_wait_for_a_group_of_each_worker_and_are_filled_up_with_masked_ones(found):
    assert found["parts by hand"] == [[4, 1], [2, 1], [2, 1]]
    assert sum(count - masked for count, masked in found["parts"]) == 4 + 8  # 4 prompts of 4, then as many tokens of 2
    assert all(count % 2 == 0 and masked < 2 for count, masked in found["parts"])
    assert len(found["parts"]) <= 2 + 4


def test_every_hook_told_its_metrics_to_the_controllers_logger(found):
    assert len(found["stats"]) == script.STEPS
    for step, stats in enumerate(found["stats"]):
        assert stats["metronome/weights/changed"] == 1.0
        assert stats["metronome/loss/calls"] > 0
        assert stats["metronome/loss/staleness_max"] == 0.0  # published: step 1 generated with step 0's weights
        assert stats["metronome/periodic/parts"] >= 2
        assert stats["metronome/attention/shared_tokens"] > 0
        assert stats["metronome/group_controller/size"] == (4, 2)[step]
        assert stats["ppo_actor/update/grad_norm"] > 0


def test_groups_are_handles_and_none_stays_on_the_workers(found):
    assert found["kinds"] == {"RTensor"}
    refused = found["stats"][-1]["metronome/rollout_source/refused"]
    assert refused > 0  # the filter read tensors
    assert found["groups"] == 4 + 8 + refused
    assert found["held"] == [0] * found["groups"]
    assert found["buffered"] == [0] * script.STEPS


def test_bounded_goes_on_with_the_same_workers(found):
    stats = found["bounded"]
    assert [step["metronome/weights/changed"] for step in stats] == [1.0, 1.0]
    assert [step["metronome/bounded/staleness_max"] for step in stats] == [0.0, 1.0]


def test_a_checkpoint_of_the_controller_holds_our_state(found, folder):
    config = room.configuration(folder, script.HOOKS | RECOVER | {"scheduler.type": None})
    recover = config.recover
    path = RecoverHandler.recover_info_path(recover.experiment_name, recover.trial_name, recover.fileroot)
    state = RecoverInfo.load(path).dataloader_info[KEY]
    assert state["run"]["rollout_source"] == "bounded"
    assert state["prompts"]  # those that were out
    assert found["controller"]["steps"] == script.STEPS
