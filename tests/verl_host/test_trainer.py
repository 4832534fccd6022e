"""What our trainers refuse, wait for, count, save and load: their real classes, without Ray, around small fakes."""

import math
import os
import shutil
import subprocess
import sys
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("verl", reason="the verl adapter's tests need verl (requirements/verl.txt)")
pytest.importorskip("transfer_queue", reason="verl's V1 trainer needs TransferQueue (requirements/verl.txt)")

import torch
import workers
from omegaconf import OmegaConf
from tensordict import NonTensorData, NonTensorStack, TensorDict
from test_worker import close, stock, streamed
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu
from verl.utils.metric import reduce_metrics

import metronome_patches
import metronome_verl
from metronome.contracts import GroupStats, StepStats
from metronome.device import resolve_device
from metronome.errors import ConfigurationError, MetronomeError, VersionMismatch, WaitTimeout, WorkerFailed
from metronome.plugins import offered_names, plugin_manager, resolve
from metronome.settings import parse_settings
from metronome_verl import entry, samples, statistics
from metronome_verl.bounded import BoundedTrainer
from metronome_verl.checks import check_mini_batch, check_versions
from metronome_verl.groups import group_order
from metronome_verl.periodic import PeriodicTrainer
from metronome_verl.trainer import SynchronousTrainer
from metronome_verl.weights import fingerprint

SAGC = {"group_controller": "sagc", "sagc": {"sizes": [2, 4]}}
STEPPED = {
    "grad_norm": 1.0,
    "metronome/weights/changed": 1.0,
    "metronome/weights/lr": 1e-3,
    "metronome/loss/calls": 2,
    "metronome/attention/calls": 2,
    "metronome/trained/tokens": 16,
}


def arranged(mode, block, shares_prompt=False):
    manager = plugin_manager()
    chosen = resolve(parse_settings(block, offered_names(manager)), resolve_device("cpu"), 0, manager)
    chosen = SimpleNamespace(
        rollout_source=chosen.rollout_source,
        group_controller=chosen.group_controller,
        attention=SimpleNamespace(shares_prompt=shares_prompt),
    )
    return SimpleNamespace(block=block, mode=mode, selection=chosen)


def trainer(cls, mode, block, folder=None, **options):
    made = object.__new__(cls)
    made.arranged = arranged(mode, block, **options)
    made.global_steps = 5
    made.config = OmegaConf.create(
        {
            "data": {"train_batch_size": 2, "max_response_length": 8, "gen_batch_size": 1},
            "algorithm": {"rollout_correction": {"bypass_mode": True}},
            "actor_rollout_ref": {"rollout": {"n": 2}, "actor": {"ppo_mini_batch_size": 1}},
            "trainer": {"critic_warmup": 0, "default_local_dir": str(folder), "resume_mode": "auto"},
        }
    )
    return made


def tag(version, length=4):
    return {"min_global_steps": version, "max_global_steps": version, "response_len": length, "prompt_len": 3}


def periodic(block, stepped=STEPPED, versions=(4, 4), **options):
    """A periodic trainer at step 5 whose two groups of two arrive one after another."""
    made = trainer(PeriodicTrainer, "periodic", block, **options)
    made.submitted, parts = [], deque(enumerate(versions))
    made.replay_buffer = SimpleNamespace(
        wait_for_sampleable=lambda *_: ({"one"}, {}), pending_keys={"train": ()}, running_keys={"train": ()}
    )

    def step_once(metrics, timing_raw, count):
        number, version = parts.popleft()
        made._passes += 1
        return KVBatchMeta(
            partition_id="train",
            keys=[f"{number}_0_0", f"{number}_1_0", f"pad{number}_0_0"],
            tags=[tag(4), tag(version), {**tag(0, 1), "is_padding": True}],
        )

    made._step_once = step_once
    made._next_train_batch = lambda prompts: ["prompt"] * prompts
    made._submit_batch_to_rollout = made.submitted.append
    made._get_n_gpus_for_throughput = lambda: 2
    made.rows = []

    def metronome_step(rows):
        made.rows.append(rows)
        return [stepped]

    made.actor_rollout_wg = SimpleNamespace(metronome_step=metronome_step)
    return made


# --- proof of life ------------------------------------------------------------------------------------


def test_a_periodic_step_submits_its_prompts_once_trains_every_group_and_counts_rows_without_padding():
    made, metrics = periodic({"loss": "a3po"}, shares_prompt=True), {}
    batch = made.step(metrics, {})
    assert made.submitted == [["prompt"] * 2]
    assert made.rows == [4]
    assert len(batch.keys) == 6
    assert metrics["metronome/periodic/parts"] == 2
    assert metrics["actor/grad_norm"] == 1.0
    assert metrics["metronome/tpspd"] > 0


@pytest.mark.parametrize("hook", ["loss", "attention"])
def test_a_hook_that_is_set_and_not_called_stops_the_first_step(hook):
    block = {"loss": "a3po", "attention": "shared_prompt"}
    for stepped in (STEPPED | {f"metronome/{hook}/calls": 0}, {k: v for k, v in STEPPED.items() if hook not in k}):
        with pytest.raises(MetronomeError, match=f"metronome.{hook} is set and wasn't called"):
            periodic(block, stepped, shares_prompt=True).step({}, {})
    periodic({}, {k: v for k, v in STEPPED.items() if hook not in k}).step({}, {})  # nobody asked for it


@pytest.mark.parametrize(
    ("cls", "theirs", "mode"),
    [(SynchronousTrainer, PPOTrainerSync, "synchronous"), (BoundedTrainer, PPOTrainer, "bounded")],
)
def test_the_other_modes_stop_too(cls, theirs, mode, monkeypatch):
    for found, words in (
        ({}, "loss is set and wasn't called"),
        ({"metronome/weights/changed": 0}, "changed no weight"),
    ):
        made, sizes = trainer(cls, mode, {"loss": "a3po"}), []

        def step(self, metrics, timing_raw, sizes=sizes, found=found):
            sizes.append(self.config.data.train_batch_size)
            metrics.update(
                {"actor/grad_norm": 1.0, "metronome/weights/lr": 1.0, "metronome/weights/changed": 1} | found
            )

        monkeypatch.setattr(theirs, "step", step)
        with pytest.raises(MetronomeError, match=words):
            made.step({}, {})
        assert sizes == [2]


def test_while_verl_trains_the_critic_alone_no_hook_is_missed():
    made = trainer(SynchronousTrainer, "synchronous", {"loss": "a3po"})
    made.config.trainer.critic_warmup = 6
    made._prove_life({})
    made.config.trainer.critic_warmup = 5
    with pytest.raises(MetronomeError, match=r"metronome\.loss"):
        made._prove_life({})


# --- versions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "words"), [*((v, r"another version.*\n?.*trained is 4") for v in (3, 5)), (None, "doesn't say which")]
)
def test_a_sample_of_another_version_stops_the_period_before_its_step(version, words):
    made = periodic({}, versions=(4, version))
    with pytest.raises(VersionMismatch, match=words):
        made.step({}, {})
    assert made.rows == []


def test_padding_has_no_version_and_a_sample_over_two_versions_is_refused():
    check_versions([tag(4), {"is_padding": True}], 4, "here")
    with pytest.raises(VersionMismatch, match="versions 3 to 4"):
        check_versions([tag(4) | {"min_global_steps": 3}], 4, "here")


# --- a publication that changes nothing ---------------------------------------------------------------


@pytest.fixture(scope="module")
def worker():
    torch.set_num_threads(1)
    return workers.worker()


def updated(worker, how):
    """The metrics of one update, as the trainer sees them."""
    batch = workers.Samples()
    loss = workers.stock_loss(workers.actor_config())
    if how == "parts":
        found = streamed(worker, batch, loss, [[0, 1, 2], [3, 4, 5, 6, 7]])[1]
    else:
        worker.set_loss_fn(loss)
        settings = {"mini_batch_size": 4, "epochs": 1, "seed": 1, "dataloader_kwargs": {"shuffle": False}}
        with workers.restored(worker):
            found = reduce_metrics(tu.get(worker.train_mini_batch(batch.batch(**settings)), "metrics"))
    return {name if name.startswith("metronome/") else f"actor/{name}": value for name, value in found.items()}


@pytest.mark.parametrize("how", ["parts", "mini-batches"])
def test_a_publication_that_changes_nothing_stops_the_trainer(worker, how, monkeypatch):
    made = trainer(SynchronousTrainer, "synchronous", {})
    found = updated(worker, how)
    assert found["metronome/weights/changed"] == 1
    assert found["metronome/weights/lr"] == 1e-2
    made._prove_life(found)

    # as an optimiser whose parameters are others than the engine's, or whose step rounds to nothing
    monkeypatch.setattr(worker.engine.optimizer, "step", lambda: None)
    found = updated(worker, how)
    assert found["metronome/weights/changed"] == 0
    with pytest.raises(MetronomeError, match=r"changed no weight[^$]*learning rate 0\.01"):
        made._prove_life(found)
    made._prove_life(found | {"actor/grad_norm": math.nan})  # verl steps nowhere
    made._prove_life(found | {"actor/grad_norm": math.inf})
    made._prove_life(found | {"actor/grad_norm": 0.0})


@pytest.mark.parametrize("how", ["parts", "mini-batches"])
def test_a_warm_up_from_a_learning_rate_of_zero_goes_on(worker, how, monkeypatch):
    monkeypatch.setitem(worker.engine.optimizer.param_groups[0], "lr", 0.0)
    found = updated(worker, how)
    assert found["metronome/weights/changed"] == found["metronome/weights/lr"] == 0
    assert found["actor/grad_norm"] > 0
    trainer(SynchronousTrainer, "synchronous", {})._prove_life(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_fingerprint_sees_one_bit_of_one_trained_value(dtype):
    module = torch.nn.Linear(5, 3).to(dtype)
    module.bias.requires_grad_(False)
    before = fingerprint(module)
    with torch.no_grad():
        module.bias.add_(1)
        assert fingerprint(module) == fingerprint([module]) == before
        value = module.weight[1, 2]
        value.copy_(torch.nextafter(value.float(), torch.tensor(9.0)) if dtype is torch.float32 else value * 1.01)
    assert fingerprint(module) != before


# --- waiting ------------------------------------------------------------------------------------------


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self, monkeypatch):
        self.now, self.pauses = 0.0, []
        monkeypatch.setattr(samples.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(samples.time, "sleep", self.sleep)

    def sleep(self, seconds):
        self.pauses.append(seconds)
        self.now += seconds


def buffer(looks, running=("u",)):
    answers = iter(looks)
    return SimpleNamespace(
        wait_for_sampleable=lambda *_: next(answers), pending_keys={"train": ()}, running_keys={"train": running}
    )


def test_groups_that_are_there_are_taken_at_once_and_never_more_than_missing(monkeypatch):
    clock = Clock(monkeypatch)
    assert samples.wait_for_groups(buffer([({"a", "b", "c"}, {})]), 5, 2) == (2, {}, 0.0)
    assert samples.wait_for_groups(buffer([({"a"}, {})], running=()), 5, 2) == (1, {}, 0.0)  # the last one has finished
    assert clock.pauses == []


def test_the_wait_looks_soon_then_less_often_and_keeps_what_was_evicted(monkeypatch):
    clock, name = Clock(monkeypatch), "training/filter_groups/evicted_samples"
    looks = [(set(), {name: 2, "counts": {"0.0": 2}}), *[(set(), {})] * 699]
    looks.append(({"a"}, {name: 1, "counts": {"0.0": 1}}))
    found = samples.wait_for_groups(buffer(looks), 5, 4)
    assert found == (1, {name: 3, "counts": {"0.0": 3}}, pytest.approx(clock.pauses[-1]))
    assert clock.pauses[:80] == pytest.approx([0.005] * 80)
    assert clock.pauses == sorted(clock.pauses)
    for place, pause in enumerate(clock.pauses):  # so a group lies finished for 1 % of the wait, or 5 ms
        assert pause <= max(0.005, 0.01 * sum(clock.pauses[:place]) + 1e-9)
    assert clock.pauses[-1] == 0.5


def test_a_slow_look_is_followed_by_a_pause_as_long_and_counts_as_late(monkeypatch):
    clock = Clock(monkeypatch)
    looks = buffer([(set(), {}), ({"a"}, {})])
    look = looks.wait_for_sampleable

    def slow(*arguments):
        clock.now += 0.25
        return look(*arguments)

    looks.wait_for_sampleable = slow
    assert samples.wait_for_groups(looks, 5, 4) == (1, {}, 0.5)
    assert clock.pauses == [0.25]


def test_nothing_running_and_nothing_finished_is_an_error_at_once(monkeypatch):
    clock = Clock(monkeypatch)
    with pytest.raises(WorkerFailed, match=r"step 5, 4 groups missing"):
        samples.wait_for_groups(buffer([(set(), {})], running=()), 5, 4)
    assert clock.pauses == []


def test_half_an_hour_of_silence_is_given_up_with_what_still_runs(monkeypatch):
    clock = Clock(monkeypatch)
    with pytest.raises(WaitTimeout, match=r"half an hour[^$]*step 5, 3 groups running[^$]*max_response_length"):
        samples.wait_for_groups(buffer([(set(), {})] * 9999, running=("a", "b", "c")), 5, 4)
    assert 1800 < clock.now < 1802


# --- the group controller -----------------------------------------------------------------------------


def queue(monkeypatch, metrics=True):
    """TransferQueue with two rollouts of each of two prompts, and a padding row that mustn't be asked for."""
    scores = {"a_0_0": [0.0, 1.0], "a_1_0": [0.0] * 8, "b_0_0": [0.25, 0.5], "b_1_0": [1.0]}
    spent = {"a_0_0": 1.0, "a_1_0": 4.0, "b_0_0": 2.0, "b_1_0": 0.5}

    def kv_batch_get(keys, partition_id, select_fields):
        assert partition_id == "train"
        assert {"rm_scores", "loss_mask", "metrics"} < set(select_fields)
        rows = [torch.tensor(scores[key]) for key in keys]
        columns = {"rm_scores": rows, "loss_mask": [torch.ones(len(row), dtype=torch.long) for row in rows]}
        columns = {name: torch.nested.as_nested_tensor(of, layout=torch.jagged) for name, of in columns.items()}
        data = TensorDict(columns, batch_size=[len(keys)])
        if metrics:
            found = [NonTensorData({"generate_sequences": spent[key], "tool_calls": 0.0}) for key in keys]
            data["metrics"] = NonTensorStack.from_list(found)
        return data

    monkeypatch.setattr(statistics.tq, "kv_batch_get", kv_batch_get)
    tags = [tag(4, len(scores[key])) for key in scores] + [{"is_padding": True}]
    order = [2, 0, 4, 1, 3]  # balancing over ranks mixes the groups
    keys = [*scores, "pad_0_0"]
    return KVBatchMeta(partition_id="train", keys=[keys[i] for i in order], tags=[tags[i] for i in order])


def test_the_controller_is_told_true_sizes_lengths_truncation_rewards_and_seconds(monkeypatch):
    config = trainer(PeriodicTrainer, "periodic", SAGC).config
    stats = statistics.step_stats(queue(monkeypatch), 5, config, 0.25)
    assert stats == StepStats(
        step=5,
        groups=[
            GroupStats(2, [2, 1], [False, False], [0.75, 1.0], 0.0, 2.0),
            GroupStats(2, [2, 8], [False, True], [1.0, 0.0], 0.0, 4.0),
        ],
        bubble=0.25,
    )
    assert [group.end for group in statistics.step_stats(queue(monkeypatch, False), 5, config, None).groups] == [0, 0]


def test_the_controller_sets_g_and_prompts_and_reports(monkeypatch, capsys):
    made = trainer(PeriodicTrainer, "periodic", SAGC)
    assert made._begin_step() == 2
    assert made.config.actor_rollout_ref.rollout.n == 4
    made.config.actor_rollout_ref.rollout.n = 2
    metrics = {}
    made._observe(queue(monkeypatch), metrics, 0.25)
    assert metrics["metronome/group_controller/size"] == 2
    assert metrics["metronome/group_controller/truncation_rate"] == 0.25
    assert "metronome: G" in capsys.readouterr().out
    unowned = trainer(PeriodicTrainer, "periodic", {})
    unowned.config.actor_rollout_ref.rollout.n = 7
    assert unowned._begin_step() == 2
    assert unowned.config.actor_rollout_ref.rollout.n == 7


# --- G and the ranks ----------------------------------------------------------------------------------


def test_three_responses_a_group_on_two_ranks_have_the_gradient_of_one_batch(worker):
    """verl pads each part to a multiple of the ranks; what it adds has no weight, wherever it lands."""
    made = trainer(PeriodicTrainer, "periodic", {})
    assert made._get_required_batch_multiple(2) == 2
    batch = workers.Samples(rows=6)
    loss = workers.stock_loss(workers.actor_config(entropy_coeff=0.05, use_kl_loss=True, kl_loss_coef=0.1))
    wanted, *_ = stock(worker, batch, loss, mini_batch_size=6)
    worker.set_loss_fn(loss)
    with workers.restored(worker):
        for group in ([0, 1, 2], [3, 4, 5]):  # arrives: three rows, and the one that verl adds
            order = group_order(["g", "g", "g", "pad"], [5, 5, 5, 7], [9, 3, 6, 1], 2)
            assert sorted(order) == [0, 1, 2, 3]
            for share in (order[:2], order[2:]):  # test_worker: ranks add up as parts do
                real = [group[row] for row in share if row < 3]
                worker.accumulate(batch.batch(real, padding=2 - len(real)))
        gradient = workers.gradient(worker) * worker._factor(worker._period, worker._period.counts)
        assert worker.step(rows=6)["metronome/trained/rows"] == 6
    assert close(gradient, wanted)
    assert not close(gradient * 6 / 8, wanted, 0.1)  # had the padding counted


def test_a_g_that_breaks_the_mini_batches_over_ranks_is_refused_where_there_are_any(monkeypatch):
    check_mini_batch(2, 3, 2)
    monkeypatch.setattr(PPOTrainer, "_balance_batch", lambda self, batch, *_: batch)
    for cls, mode in ((SynchronousTrainer, "synchronous"), (BoundedTrainer, "bounded"), (PeriodicTrainer, "periodic")):
        made = trainer(cls, mode, SAGC)
        made.config.actor_rollout_ref.rollout.n = 3
        made.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": [0, 1]})
        if mode == "periodic":
            assert made._balance_batch("batch", {}) == "batch"
        else:
            with pytest.raises(ConfigurationError, match=r"G = 3[^$]*1 prompts x 3 responses over 2 ranks"):
                made._balance_batch("batch", {})


@pytest.mark.parametrize(
    ("size", "prompts", "mini"), [(8, 8, 32), (4, 16, 32), (2, 32, 32)], ids=["largest", "half", "quarter"]
)
def test_a_smaller_g_makes_as_many_optimiser_steps_of_as_many_rows(size, prompts, mini, monkeypatch):
    """Two mini-batches of 4 prompts at G = 8; verl alone would cut 64 rows of G = 2 into eight of 8 rows."""
    made = trainer(SynchronousTrainer, "synchronous", SAGC)
    made.config.data.train_batch_size, made.config.actor_rollout_ref.actor.ppo_mini_batch_size = 8, 4
    made.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": [0, 1]})
    monkeypatch.setattr(type(made.controller), "largest", lambda self: 8)
    monkeypatch.setattr(type(made.controller), "size", lambda self: size)
    monkeypatch.setattr(
        type(made.controller), "prompts", lambda self, budget, multiple=1: budget // size // multiple * multiple
    )
    assert made._begin_step() == prompts
    cut(made, rows=prompts * size, wanted=mini, monkeypatch=monkeypatch)


def test_in_bounded_mode_mini_batches_are_cut_by_the_rows_that_came_not_by_the_g_of_now(monkeypatch):
    made = trainer(BoundedTrainer, "bounded", SAGC)
    made.config.actor_rollout_ref.rollout.n = 4  # sent out now; the rows below are 2 prompts of G = 2
    made.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": [0]})
    cut(made, rows=4, wanted=4, monkeypatch=monkeypatch)


def cut(made, rows, wanted, monkeypatch):
    """What verl's balancing and update see: rows without padding, mini-batches of ``wanted`` rows."""
    seen = []
    monkeypatch.setattr(
        PPOTrainer, "_balance_batch", lambda self, batch, *_: seen.append(self._get_required_batch_multiple(1)) or batch
    )

    def update(self, batch, metrics):
        config = self.config.actor_rollout_ref
        seen.append(int(config.actor.ppo_mini_batch_size) * int(config.rollout.n))
        return batch

    monkeypatch.setattr(PPOTrainer, "_update_actor", update)
    made.local_trigger_step = made.parameter_sync_step = 0
    batch = KVBatchMeta(partition_id="train", keys=[f"{row}_0_0" for row in range(rows)], tags=[tag(4)] * rows)
    size = made.config.actor_rollout_ref.rollout.n
    made._update_actor(made._balance_batch(batch, {}), {})
    assert seen == [wanted, wanted]
    assert rows % wanted == 0
    assert made.config.actor_rollout_ref.rollout.n == size


# --- attaching ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (["+metronome.loss=a3po"], True),
        (["+metronome.loss=a3po", "trainer.v1.trainer_mode=metronome"], False),
        (["+metronome.loss=a3po", "--config-name=mine"], False),
        (["trainer.v1.trainer_mode=sync"], False),
    ],
)
def test_keys_of_ours_without_our_trainer_are_told_before_anything_starts(arguments, wrong):
    assert bool(entry.forgotten(arguments)) is wrong


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("metronome_patches/imports.py", "attaching to verl failed"),
        ("metronome_verl/worker.py", "registering the trainer failed"),
    ],
)
def test_a_failing_import_of_ours_is_loud_and_a_run_that_selects_our_trainer_fails(tmp_path, broken, said):
    """In a process of its own, with copies of our packages in which one module is broken before ours on the path."""
    for package in (metronome_patches, metronome_verl):
        folder = Path(package.__file__).parent
        shutil.copytree(folder, tmp_path / folder.name, ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / broken).open("a") as module:
        module.write("\nraise ImportError('broken on purpose')\n")
    script = (
        "import verl, metronome_verl\n"
        f"assert metronome_verl.__file__.startswith({str(tmp_path)!r}), metronome_verl.__file__\n"
        "from verl.trainer.ppo.v1 import get_trainer_cls\n"  # what main_ppo does
        "get_trainer_cls('metronome')\n"
    )
    paths = os.pathsep.join([str(tmp_path), *[path for path in sys.path if path]])
    without = {name: value for name, value in os.environ.items() if name != "VERL_PLATFORM"}  # as on a user's machine
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={**without, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert f"metronome: error: {said}: ImportError: broken on purpose" in run.stderr
    assert run.returncode == 1
    assert run.stderr.strip().splitlines()[-1].startswith(("ValueError: Unknown trainer 'metronome'", "ImportError"))
