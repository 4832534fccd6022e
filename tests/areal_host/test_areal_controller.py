"""AReaL's single controller with its local scheduler: real RPC workers train and generate on the CPU."""

import contextlib
import copy
import os
import select
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("areal", reason="the AReaL adapter's tests need AReaL (requirements/areal.txt)")

import areal_controller_script as script
import areal_room as room
import torch
from areal.api.cli_args import GRPOConfig
from areal.infra.controller import RolloutController
from areal.infra.rpc.serialization import deserialize_value, serialize_value
from areal.utils.recover import RecoverHandler, RecoverInfo
from areal_engines import apart, ours
from safetensors.torch import load_file

from metronome.errors import ConfigurationError
from metronome_areal import cpu
from metronome_areal.actor import MetronomeCritic
from metronome_areal.arrange import arrange
from metronome_areal.config import read, with_block
from metronome_areal.controller import check_controller, travelling, workflow_path
from metronome_areal.cpu import assets
from metronome_areal.cpu.arguments import arrange as arrange_room
from metronome_areal.cpu.arguments import by_controller
from metronome_areal.parts import Parts, Ranks
from metronome_areal.prompts import KEY
from metronome_areal.state import data_of, take
from metronome_areal.trainer import HostTrainer

TIMEOUT = 180
RECOVER = {"recover.mode": "on", "recover.freq_steps": 1}


@contextlib.contextmanager
def launched(folder, keys):
    """What the script under our launcher, with ``scheduler.type=local``, left before it closed its trainer.

    It closes while the tests look; every process it started ends with it.
    """
    room.configuration(folder, keys)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "AREAL_SPMD_MODE")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    read_end, write_end = os.pipe()
    environment[script.TOLD] = str(write_end)
    command = [sys.executable, "-m", "metronome_areal", script.__file__, "--config", str(folder / "config.yaml")]
    log = folder / "log"
    with log.open("w") as to:
        run = subprocess.Popen(
            [*command, "scheduler.type=local"],
            stdout=to,
            stderr=to,
            env=environment,
            start_new_session=True,
            pass_fds=[write_end],
        )
    os.close(write_end)
    try:
        ready, _, _ = select.select([read_end], [], [], TIMEOUT)
        assert ready, log.read_text()[-6000:]
        assert os.read(read_end, 1), log.read_text()[-6000:]  # nothing: it ended before
        yield torch.load(folder / "found", weights_only=False)
        assert run.wait(timeout=TIMEOUT) == 0, log.read_text()[-6000:]
        with pytest.raises(ProcessLookupError):
            os.killpg(run.pid, 0)  # no worker is left
    finally:
        os.close(read_end)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("controller")
    torch.save(groups(), found / "groups")
    return found


@pytest.fixture(scope="module")
def found(folder):
    keys = script.HOOKS | RECOVER | {"scheduler.type": None, "actor.backend": "fsdp:d2"}
    with launched(folder, keys) as left:
        yield left


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
        if name.startswith(("metronome/loss", "metronome/periodic", "grad_norm")) and not name.endswith("calls"):
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


def test_parts_have_as_many_groups_for_each_worker_and_masked_ones_where_there_are_none(found):
    assert found["parts by hand"] == [[4, 1], [2, 1], [2, 1]]
    assert found["parts"]
    assert all(count % 2 == 0 and masked == 0 for count, masked in found["parts"])  # an even number of prompts


def test_every_hook_told_its_metrics_to_the_controllers_logger(found):
    assert len(found["stats"]) == script.STEPS
    refused = 0.0
    for stats in found["stats"]:
        assert stats["metronome/weights/changed"] == 1.0
        assert stats["metronome/loss/calls"] > 0
        assert stats["metronome/loss/staleness_max"] == 0.0  # published: generated with the last step's weights
        assert stats["metronome/periodic/parts"] >= 1
        assert stats["metronome/attention/tokens_fed"] < stats["metronome/attention/tokens_separate"]
        assert stats["ppo_actor/update/grad_norm"] > 0
        refused, before = stats["metronome/rollout_source/refused"], refused
        trained = stats["metronome/rollout_source/prompts"] - (refused - before)
        assert trained * stats["metronome/group_controller/size"] == 16
    assert len({stats["metronome/group_controller/size"] for stats in found["stats"]}) > 1


def test_groups_are_handles_and_none_stays_on_the_workers(found):
    assert found["kinds"] == {"RTensor"}
    assert found["stats"][-1]["metronome/rollout_source/refused"] > 0  # the filter read tensors
    assert found["groups"] == sum(stats["metronome/rollout_source/prompts"] for stats in found["stats"])
    assert found["held"] == [0] * found["groups"]
    assert found["buffered"][: script.STEPS] == [0] * script.STEPS


def test_bounded_goes_on_with_the_same_workers(found):
    stats = found["bounded"]
    assert [step["metronome/weights/changed"] for step in stats] == [1.0, 1.0]
    assert [step["metronome/bounded/staleness_max"] for step in stats] == [0.0, 1.0]


def test_a_checkpoint_of_the_controllers_run_holds_our_state(found, folder):
    config = room.configuration(folder, script.HOOKS | RECOVER | {"scheduler.type": None})
    part = read(config)
    first = part.selection.group_controller.state_dict()
    take(config, part, data_of(config, room.dataset(folder)))
    assert part.selection.group_controller.state_dict() == found["controller"] != first
    recover = config.recover
    path = RecoverHandler.recover_info_path(recover.experiment_name, recover.trial_name, recover.fileroot)
    (state,) = RecoverInfo.load(path).dataloader_info
    assert state[KEY]["run"]["rollout_source"] == "periodic"
    config.train_dataset.batch_size = 2
    with pytest.raises(ConfigurationError, match="other data"):
        take(config, part, data_of(config, room.dataset(folder)))


# --- what is refused, and what travels -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["actor", "rollout", "critic"])
def test_v2_is_refused_with_the_reason_with_and_without_hooks(tmp_path, name):
    for keys in ({}, {"metronome.loss": "a3po"}):
        config = room.configuration(tmp_path, keys)
        if name == "critic":
            config.critic = copy.copy(config.actor)
        getattr(config, name)._version = "v2"
        with pytest.raises(ConfigurationError, match=rf"fixed routes.*{name}\._version=v1"):
            arrange(config, read(config))


def test_the_room_honours_local_and_refuses_other_schedulers_and_torchrun(tmp_path, monkeypatch):
    config = room.configuration(tmp_path)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert not by_controller(config)
    config.scheduler.type = "local"
    assert by_controller(config)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(ConfigurationError, match="torchrun's ranks"):
        by_controller(config)
    config.scheduler.type = "ray"
    with pytest.raises(ConfigurationError, match=r"scheduler\.type=local"):
        by_controller(config)


def test_preparing_for_a_controller_takes_the_single_rank_back(monkeypatch):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "AREAL_SPMD_MODE")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cpu, "_set_here", set())
    cpu.prepare()
    assert {name: os.environ.get(name) for name in ("RANK", "AREAL_SPMD_MODE")} == {"RANK": "0", "AREAL_SPMD_MODE": "1"}
    cpu.prepare(controller=True)
    assert not is_in(names[:-1])
    assert os.environ["AREAL_SPMD_MODE"] == "0"
    monkeypatch.setenv("RANK", "1")
    cpu.prepare()
    assert is_in(names[:-1]) == ["RANK"]  # torchrun's


def is_in(names):
    return [name for name in names if name in os.environ]


def test_adapters_are_refused_where_workers_take_whole_models(tmp_path):
    config = room.configuration(tmp_path, {"actor.use_lora": True, "actor.lora_rank": 4})
    config.scheduler.type = "local"
    with pytest.raises(ConfigurationError, match=r"actor\.use_lora"):
        arrange_room(config)


def test_a_whole_batch_that_workers_cant_share_is_refused_before_they_start(tmp_path):
    keys = {"train_dataset.batch_size": 5, "metronome.rollout_source": "bounded"}
    config = room.configuration(tmp_path, keys)
    with pytest.raises(ConfigurationError, match=r"train_dataset\.batch_size"):
        check_controller(config, read(config), 2)
    check_controller(config, read(config), 5)
    config.metronome["rollout_source"] = "periodic"
    config.rollout.max_head_offpolicyness = 0
    check_controller(config, read(config), 2)


class Agent:
    """What AReaL runs behind a proxy."""


class Mine(script.Direct):
    """A workflow of this module."""


@pytest.mark.parametrize(
    ("workflow", "what"),
    [
        (Agent, "RolloutWorkflow"),
        (f"{__name__}.Agent", "RolloutWorkflow"),
        (f"{__name__}.Nobody", "can't import"),
        ("__main__.Mine", "can't import"),
    ],
)
def test_a_workflow_that_workers_cant_run_in_groups_is_refused(workflow, what):
    with pytest.raises(ConfigurationError, match=what):
        workflow_path(RolloutController.__new__(RolloutController), workflow)


def test_a_workflows_class_or_path_is_found_by_workers():
    controller = RolloutController.__new__(RolloutController)
    assert workflow_path(controller, Mine) == workflow_path(controller, f"{__name__}.Mine") == f"{__name__}.Mine"


def test_a_configuration_of_a_class_that_no_worker_has_travels_as_one_that_it_has(tmp_path, monkeypatch):
    config = room.configuration(tmp_path, kind=with_block(script.Config))
    assert type(config).__name__ == "Config"
    assert isinstance(deserialize_value(serialize_value(config)), dict)  # AReaL's worker: "no attribute 'seed'"
    sent = travelling(config)
    assert type(sent) is script.Config
    assert deserialize_value(serialize_value(sent)) == sent
    monkeypatch.setattr(script.Config, "__module__", "__main__")
    sent = travelling(config)
    assert type(sent) is GRPOConfig
    assert deserialize_value(serialize_value(sent)).seed == config.seed
    own = room.configuration(tmp_path)
    assert type(travelling(own)) is type(own)


def test_a_critics_workers_keep_rows_apart(tmp_path):
    critic = MetronomeCritic.as_controller(room.configuration(tmp_path).actor, None)
    assert critic.train_engine is MetronomeCritic


class Finishing:
    """A flow whose groups finish in these numbers."""

    def __init__(self, *counts):
        self.counts, self.taken = list(counts), 0

    def complete(self):
        return not self.counts

    def take(self, most):
        count = min(most, self.counts.pop(0))
        self.taken += count
        return [SimpleNamespace(group={"number": self.taken - count + place}) for place in range(count)]


@pytest.mark.parametrize(
    ("counts", "places", "parts"),
    [((1, 2, 1, 1), 2, [2, 2, 1]), ((3, 2, 2), 4, [4, 3]), ((1, 2), 1, [1, 2]), ((1,), 2, [1]), ((), 2, [])],
)
def test_only_the_last_part_of_a_period_lacks_a_group_for_a_worker(counts, places, parts):
    made = Parts(Finishing(*counts), Ranks(), 8, places)
    found = list(iter(made.next, None))
    assert [len(part) for part in found] == parts
    assert [one["number"] for part in found for one in part] == list(range(sum(counts)))


def test_workers_of_a_trainer_that_didnt_start_are_ended(tmp_path, monkeypatch):
    ended = []

    def failing(self, config, train_dataset=None, valid_dataset=None):
        self.scheduler = SimpleNamespace(delete_workers=lambda: ended.append(True))
        raise RuntimeError("a server didn't come")

    monkeypatch.setattr(HostTrainer, "__init__", failing)
    with pytest.raises(RuntimeError, match="didn't come"):
        room.PPOTrainer(room.configuration(tmp_path), room.dataset(tmp_path))
    assert ended == [True]
