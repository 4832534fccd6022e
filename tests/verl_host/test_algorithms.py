"""Algorithms in periodic mode: verl's own advantages, rewards and filtering, part by part and on the whole batch."""

import asyncio
import copy
from functools import cache
from types import SimpleNamespace

import pytest

pytest.importorskip("verl", reason="the verl adapter's tests need verl (requirements/verl.txt)")
pytest.importorskip("transfer_queue", reason="verl's V1 trainer needs TransferQueue (requirements/verl.txt)")

import numpy as np
import torch
import workers
from tensordict import NonTensorStack, TensorDict
from test_config import POOL
from test_config import composed as composed_anew
from test_worker import close, stock, streamed
from transfer_queue import KVBatchMeta
from verl.experimental.reward_loop.reward_loop import RewardLoopWorker
from verl.experimental.reward_loop.reward_manager.dapo import DAPORewardManager
from verl.protocol import DataProto
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1 import replay_buffer, trainer_base
from verl.trainer.ppo.v1.replay_buffer import DAPO_FILTERED_REWARD_COUNTS_KEY, ReplayBufferAsync
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.workers.engine_workers import TrainingWorker

from metronome.errors import ConfigurationError
from metronome_verl import statistics
from metronome_verl.bounded import BoundedTrainer
from metronome_verl.config import arrange
from metronome_verl.periodic import PeriodicTrainer
from metronome_verl.trainer import MetronomeTrainer, SynchronousTrainer
from metronome_verl.worker import MetronomeWorker, check_streaming

PERIODIC = ["+metronome.rollout_source=periodic", *POOL]
UIDS = ["a"] * 4 + ["b"] * 2 + ["c"] * 2
KEYS = [f"{uid}_{number}_0" for number, uid in enumerate(UIDS)]
PARTS = ([4, 5], [7, 6, 2, 0, 1, 3])
EXTRAS = {"entropy_coeff": 0.05, "use_kl_loss": True, "kl_loss_coef": 0.1}


composed_once = cache(composed_anew)  # it takes a second


def composed(*overrides):
    return copy.deepcopy(composed_once(*overrides))


def arranged(*overrides):
    config = composed(*overrides)
    return config, arrange(config)


class Store:
    """TransferQueue's calls on rows in this process."""

    def __init__(self, **fields):
        self.rows = {key: {name: values[place] for name, values in fields.items()} for place, key in enumerate(KEYS)}

    def pad(self, count):
        """Rows as verl adds them: one uid, no trained token, no reward."""
        keys = [f"pad_{number}_0" for number in range(count)]
        for key in keys:
            self.rows[key] = {name: torch.zeros(1, dtype=value.dtype) for name, value in self.rows[KEYS[0]].items()}
        return keys

    def kv_batch_get(self, keys, partition_id, select_fields):
        found = {}
        for name in select_fields:
            if name in self.rows[keys[0]]:
                rows = [self.rows[key][name] for key in keys]
                found[name] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        made = TensorDict(found, batch_size=[len(keys)])
        made["uid"] = NonTensorStack(*[key.split("_")[0] for key in keys])
        return made

    def kv_batch_put(self, keys, partition_id, fields):
        for name, values in fields.items():
            for key, value in zip(keys, values.unbind(), strict=True):
                self.rows[key][name] = value
        return KVBatchMeta(partition_id=partition_id, keys=keys, tags=[{} for _ in keys])

    def field(self, name):
        return [self.rows[key][name] for key in KEYS]


@pytest.fixture(scope="module")
def worker():
    torch.set_num_threads(1)
    return workers.worker()


@pytest.fixture
def samples():
    """Three groups of 4, 2 and 2 rows, each with one prompt."""
    made = workers.Samples()
    for place, uid in enumerate(UIDS):
        made.prompts[place] = made.prompts[UIDS.index(uid)]
    return made


def scores(samples):
    """A reward at each row's last token."""
    draw = torch.Generator().manual_seed(7)
    found = [torch.zeros(len(row)) for row in samples.responses]
    for row in found:
        row[-1] = torch.rand((), generator=draw)
    return found


def advantages(monkeypatch, samples, parts, *overrides, padding=0):
    """What the periodic trainer's own method writes for the rows, part by part."""
    made = object.__new__(PeriodicTrainer)
    made.config = composed(*overrides)
    if made.config.algorithm.use_kl_in_reward:
        made.kl_ctrl_in_reward = core_algos.get_kl_controller(made.config.algorithm.kl_ctrl)
    store = Store(
        response_mask=samples.masks,
        rm_scores=scores(samples),
        old_log_probs=samples.old,
        rollout_log_probs=samples.old,
        ref_log_prob=samples.reference,
        values=[0.1 * row for row in samples.behavior],
    )
    monkeypatch.setattr(trainer_base, "tq", store)
    for part in parts:
        keys = [KEYS[place] for place in part] + store.pad(padding)
        made._compute_advantage(KVBatchMeta(partition_id="train", keys=keys, tags=[{} for _ in keys]), {})
        assert all(torch.isfinite(store.rows[key]["advantages"]).all() for key in keys)
    return store.field("advantages")


def gap(left, right):
    return max(float((one - other).abs().max()) for one, other in zip(left, right, strict=True))


ALGORITHMS = {
    "grpo": (["algorithm.adv_estimator=grpo"], {}),
    "dapo": (["algorithm.adv_estimator=grpo"], {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 10.0}),
    "dr_grpo": (
        ["algorithm.adv_estimator=grpo", "algorithm.norm_adv_by_std_in_grpo=False"],
        {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 16},
    ),
    "rloo": (["algorithm.adv_estimator=rloo"], {"loss_agg_mode": "seq-mean-token-mean"}),
    "kl_in_reward": (
        ["algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.3"],
        {},
    ),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_advantages_and_gradient_of_parts_are_those_of_one_batch(worker, samples, name, monkeypatch):
    overrides, actor = ALGORITHMS[name]
    arranged(*PERIODIC, *overrides)  # served
    config = workers.actor_config(**EXTRAS, **actor)
    check_streaming(config, ours=False)
    whole = advantages(monkeypatch, samples, [range(8)], *overrides)
    parted = advantages(monkeypatch, samples, PARTS, *overrides)
    assert gap(parted, whole) < 1e-6
    loss = workers.stock_loss(config)
    samples.advantages = whole
    wanted, theirs, weights = stock(worker, samples, loss)
    samples.advantages = parted
    gradient, found, stepped = streamed(worker, samples, loss, PARTS)
    assert close(gradient, wanted)
    assert found["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-6)
    torch.testing.assert_close(stepped, weights, rtol=0, atol=2e-6)
    # Entropy and KL are in it, once: without them, and with them twice, it is another gradient.
    for times in (0, 2):
        other = {"entropy_coeff": 0.05 * times, "use_kl_loss": True, "kl_loss_coef": 0.1 * times}
        without = workers.stock_loss(workers.actor_config(**other, **actor))
        assert not close(streamed(worker, samples, without, PARTS)[0], wanted, 1e-3)


def test_the_settings_that_make_an_algorithm_change_its_gradient(worker, samples, monkeypatch):
    """The other half of the equalities above: each of these would be seen."""
    plain = advantages(monkeypatch, samples, [range(8)], *ALGORITHMS["grpo"][0])
    for name in ("dr_grpo", "rloo", "kl_in_reward"):
        assert gap(advantages(monkeypatch, samples, [range(8)], *ALGORITHMS[name][0]), plain) > 1e-2
    samples.advantages = plain
    usual, higher = (
        streamed(worker, samples, workers.stock_loss(workers.actor_config(**options)), PARTS)
        for options in ({}, ALGORITHMS["dapo"][1])
    )
    assert usual[1]["pg_clipfrac"] > higher[1]["pg_clipfrac"] > 0
    assert not close(usual[0], higher[0], 1e-3)


def test_kl_in_the_reward_is_taken_off_once(samples, monkeypatch):
    overrides = [*ALGORITHMS["kl_in_reward"][0], "algorithm.norm_adv_by_std_in_grpo=False"]
    found = advantages(monkeypatch, samples, PARTS, *overrides)
    penalties = [
        0.3 * ((old - ref) * mask).sum()
        for old, ref, mask in zip(samples.old, samples.reference, samples.masks, strict=True)
    ]
    totals = [score.sum() - penalty for score, penalty in zip(scores(samples), penalties, strict=True)]
    for place, uid in enumerate(UIDS):
        group = [total for total, other in zip(totals, UIDS, strict=True) if other == uid]
        wanted = (totals[place] - sum(group) / len(group)) * samples.masks[place]
        torch.testing.assert_close(found[place], wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus"])
def test_an_estimator_that_whitens_the_batch_gives_others_in_parts(samples, name, monkeypatch):
    overrides = [f"algorithm.adv_estimator={name}"]
    whole = advantages(monkeypatch, samples, [range(8)], *overrides)
    assert gap(advantages(monkeypatch, samples, PARTS, *overrides), whole) > 1e-2
    with pytest.raises(ConfigurationError):
        arranged(*PERIODIC, *overrides)


@pytest.mark.parametrize(
    ("name", "most"),
    [("grpo", 3), ("grpo_vectorized", 3), ("rloo", 3), ("rloo_vectorized", 3), ("opo", 1), ("grpo_passk", 0)],
)
def test_rows_that_verl_adds_for_its_ranks_leave_advantages_alone_or_are_refused(samples, name, most, monkeypatch):
    overrides = [f"algorithm.adv_estimator={name}"]
    whole = advantages(monkeypatch, samples, [range(8)], *overrides)
    for padding in range(most + 1):  # at most one less than there are ranks
        assert gap(advantages(monkeypatch, samples, PARTS, *overrides, padding=padding), whole) < 1e-6
    config = composed(*PERIODIC, *overrides)
    config.trainer.n_gpus_per_node = most + 1
    arrange(copy.deepcopy(config))
    if most < 3:
        with pytest.raises((ValueError, AssertionError)):  # verl's own, and a value that isn't finite
            advantages(monkeypatch, samples, PARTS, *overrides, padding=most + 1)
        config.trainer.n_gpus_per_node = most + 2
        with pytest.raises(ConfigurationError, match=rf"{name} gives no numbers[^$]*{most + 2} devices train"):
            arrange(config)


# --- critics and reward models ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        ("algorithm.adv_estimator", ["algorithm.adv_estimator=gae"]),
        ("critic.enable", ["critic.enable=True"]),
    ],
)
def test_a_critic_is_refused_in_periodic_mode_with_the_reason_and_left_alone_in_the_others(key, overrides):
    with pytest.raises(ConfigurationError, match=r"whitens GAE's advantages[^$]*rollout_source=synchronous") as refused:
        arranged(*PERIODIC, *overrides)
    assert f"in {key}" in str(refused.value)
    for mode, cls, theirs in (
        ([], SynchronousTrainer, Role.ActorRollout),
        (["+metronome.rollout_source=bounded", *POOL], BoundedTrainer, Role.Actor),
    ):
        config, found = arranged(*mode, "algorithm.adv_estimator=gae", "+metronome.loss=ppo")
        made = object.__new__(cls)
        made.config, made.arranged = config, found
        made._enable_hybrid_replicas = found.mode == "synchronous"
        made._init_resource_pool_mgr()
        workers_of = {role: remote.__ray_actor_class__ for role, remote in made.role_worker_mapping.items()}
        assert workers_of == {theirs: MetronomeWorker, Role.Critic: TrainingWorker}
        for name in ("_compute_values", "_update_critic"):
            assert getattr(cls, name) is getattr(PPOTrainer, name)


def test_a_reward_model_on_the_training_devices_is_refused_by_verl_in_periodic_mode():
    """It would score a batch after it was taken; in a pool of its own each sample is scored before it's finished."""
    config = composed(*PERIODIC, "reward.reward_model.enable=True", "data.train_batch_size=4")
    with pytest.raises(AssertionError, match="Colocate reward model"):
        MetronomeTrainer(config)


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **others):
    return {"score": float(len(solution_str)), "acc": 1.0}


def rewards(buffer, batch):
    """What verl's reward loop and its DAPO manager give for rows of 4, 6, 8, 9 and 10 tokens, alone or together."""
    config = SimpleNamespace(reward={"reward_kwargs": {"max_resp_len": 10, "overlong_buffer_cfg": buffer}})
    lengths = [4, 6, 8, 9, 10]
    data = DataProto.from_dict(
        tensors={
            "responses": torch.full((5, 10), 7),
            "attention_mask": torch.tensor([[1] * length + [0] * (10 - length) for length in lengths]),
        },
        non_tensors={
            "data_source": np.array(["tiny"] * 5, dtype=object),
            "reward_model": np.array([{"ground_truth": "x"}] * 5, dtype=object),
            "extra_info": np.array([{}] * 5, dtype=object),
        },
    )

    async def score():
        made = object.__new__(RewardLoopWorker)
        made.config = SimpleNamespace(reward=SimpleNamespace(custom_reward_function=SimpleNamespace(path="reward.py")))
        tokenizer = SimpleNamespace(decode=lambda ids, **_: "." * len(ids))
        made.reward_manager = DAPORewardManager(config, tokenizer, compute_score)
        made.reward_manager.loop = asyncio.get_running_loop()
        if batch:
            found = await made.compute_score_batch(data)
        else:
            found = [await made.compute_score(data[place : place + 1]) for place in reversed(range(5))][::-1]
        return [float(one["reward_score"]) for one in found]

    return asyncio.run(score())


def test_overlong_rewards_of_dapo_are_each_sample_s_own():
    buffer = SimpleNamespace(enable=True, len=4, penalty_factor=2.0, log=True)
    together = rewards(buffer, batch=True)
    assert together == rewards(buffer, batch=False)
    assert together == [4.0, 6.0, 8.0 - 2 / 4 * 2, 9.0 - 3 / 4 * 2, 10.0 - 4 / 4 * 2]
    assert rewards(None, batch=True) == [4.0, 6.0, 8.0, 9.0, 10.0]


# --- dynamic sampling ---------------------------------------------------------------------------------


class Queue:
    """TransferQueue of one partition, and rollouts that finish when told, each with its rewards."""

    def __init__(self, monkeypatch, rewards):
        self.rewards, self.tags, self.sizes, self.scores = iter(rewards), {}, {}, {}
        for module in (replay_buffer, trainer_base):
            monkeypatch.setattr(module, "tq", self)

    def kv_list(self, partition_id=None):
        return {"train": {key: dict(tag) for key, tag in self.tags.items()}}

    def kv_batch_put(self, keys, partition_id, tags, fields=None):
        self.tags.update(zip(keys, tags, strict=True))

    def kv_clear(self, partition_id, keys):
        for key in keys:
            self.tags.pop(key, None)

    def kv_batch_get(self, keys, partition_id, select_fields):
        rows = [torch.tensor([0.0, self.scores[key]]) for key in keys]
        found = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        return {"rm_scores": found, "loss_mask": torch.ones(len(keys), 2)}

    def generate_sequences(self, batch):
        assert batch["global_steps"] == 5
        self.sizes.update(zip(batch["uid"], batch["__rollout_n__"].tolist(), strict=True))

    def finish(self, version):
        """The oldest running group ends."""
        uid = next(key for key, tag in self.tags.items() if tag.get("status") == "pending")
        for number, reward in enumerate(next(self.rewards)[: self.sizes[uid]]):
            key = f"{uid}_{number}_0"
            self.scores[key] = reward
            self.tags[key] = {"min_global_steps": version, "max_global_steps": version, "response_len": 2}
        self.tags[uid]["status"] = "finished"


ALIKE, WRONG, MIXED = [1.0] * 4, [0.0] * 4, [0.0, 1.0, 1.0, 0.0]
GROUPS = (ALIKE, MIXED, WRONG, MIXED, ALIKE, MIXED, MIXED)


def filtering(monkeypatch, enabled):
    """Step 5 of a periodic trainer with verl's own buffer, sampling and submission; one group ends a look."""
    config, found = arranged(
        *PERIODIC,
        "data.train_batch_size=3",
        "data.max_response_length=8",
        "+metronome.group_controller=sagc",
        "+metronome.sagc.sizes=[2,4]",
        f"algorithm.filter_groups.enable={enabled}",
    )
    made = object.__new__(PeriodicTrainer)
    made.config, made.arranged, made.global_steps, made.trainer_mode = config, found, 5, "separate_async"
    made.use_reference_policy = made.use_critic = False
    made.hybrid_rollout_config = SimpleNamespace(enable_switch=False)
    made._step_sample_wait_seconds = 0.0
    made.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])
    for name in ("_balance_batch", "_compute_old_log_prob", "_compute_advantage"):
        setattr(made, name, lambda batch, metrics: batch)

    def update(batch, metrics):
        made._passes += 1
        return batch

    made._update_actor = update
    stepped = {
        "grad_norm": 1.0,
        "metronome/weights/changed": 1.0,
        "metronome/weights/lr": 1e-3,
        "metronome/trained/tokens": 24,
    }
    made.rows, made._get_n_gpus_for_throughput = [], lambda: 2
    made.actor_rollout_wg = SimpleNamespace(metronome_step=lambda rows: made.rows.append(rows) or [stepped])
    queue = made.agent_loop_manager = Queue(monkeypatch, GROUPS)
    monkeypatch.setattr(statistics, "tq", queue)
    drawn = iter(range(100))

    def fetch():
        return TensorDict({"uid": NonTensorStack(f"u{next(drawn)}")}, batch_size=[1])

    made._fetch_one_gen_batch = fetch
    buffer = made.replay_buffer = PPOTrainer._build_replay_buffer(made)
    assert type(buffer) is ReplayBufferAsync
    look = buffer._sync_metadata_from_transfer_queue

    def looked():
        if any(tag.get("status") == "pending" for tag in queue.tags.values()):
            queue.finish(4)
        look()

    buffer._sync_metadata_from_transfer_queue = looked
    return made, queue


def test_dynamic_sampling_refills_with_the_same_g_budget_and_version_and_counts_what_it_drops(monkeypatch):
    made, queue = filtering(monkeypatch, True)
    metrics = {}
    batch = made.step(metrics, {})
    trained = [f"u{number}" for number, group in enumerate(GROUPS[:6]) if group is MIXED]
    assert sorted({key.split("_")[0] for key in batch.keys}) == trained
    assert made.rows == [12]  # three groups of four, whatever was dropped
    assert {tag["max_global_steps"] for tag in batch.tags} == {4}
    assert queue.sizes == {f"u{number}": 4 for number in range(6)}  # nothing was submitted beyond what was dropped
    assert metrics["training/filter_groups/evicted_samples"] == 3
    assert metrics[DAPO_FILTERED_REWARD_COUNTS_KEY] == {1.0: 2, 0.0: 1}
    assert metrics["metronome/group_controller/size"] == 4
    assert sorted(queue.tags) == sorted(batch.keys)  # no group is left behind for the next version


def test_without_dynamic_sampling_the_first_groups_are_trained(monkeypatch):
    made, queue = filtering(monkeypatch, False)
    metrics = {}
    batch = made.step(metrics, {})
    assert sorted({key.split("_")[0] for key in batch.keys}) == ["u0", "u1", "u2"]
    assert sorted(queue.sizes) == ["u0", "u1", "u2"]
    assert "training/filter_groups/evicted_samples" not in metrics


def test_a_sampler_that_would_wait_for_the_whole_batch_waits_for_no_group():
    """verl's ``wait`` at threshold 1 holds every group back while one is running: nothing would overlap."""
    overrides = [f"trainer.v1.sampler.max_off_policy_{name}" for name in ("strategy=wait", "threshold=1")]

    def takes(config):
        made = object.__new__(PeriodicTrainer)
        made.config, made.trainer_mode = config, "separate_async"
        buffer = PPOTrainer._build_replay_buffer(made)
        buffer.running_keys["train"], buffer.prompt_global_steps["train"] = {"running"}, {"running": 5}
        return buffer._has_enough_samples(5, "train", 1, {"finished"})

    assert not takes(composed(*PERIODIC, *overrides))
    config, found = arranged(*PERIODIC, *overrides)
    assert takes(config)
    assert any("max_off_policy_threshold=None" in note for note in found.notes)
