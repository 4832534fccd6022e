"""A bounded trainer around a queue, rollout servers and data in this process; its steps as ``fit`` makes them."""

import copy
import json
import pickle
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import transfer_queue as tq
from tensordict import NonTensorData
from test_trainer import trainer
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.trainer.ppo.utils import create_rl_sampler
from verl.trainer.ppo.v1.trainer_separate_async import HybridEngineMode
from verl.utils import tensordict_utils as tu

from metronome_verl.bounded import BoundedTrainer

BLOCK = {"rollout_source": "bounded", "bounded": {"max_staleness": 1}}
SAMPLER = {"max_off_policy_threshold": 8, "max_off_policy_strategy": "drop", "sampler_kwargs": {}}


class Queue:
    """What verl's trainer asks of TransferQueue, with its meaning of keys, tags, fields and checkpoints."""

    def __init__(self):
        self.tags, self.rows, self.saves_rows = {}, {}, True

    def kv_list(self, partition_id=None):
        return {"train": copy.deepcopy(self.tags)}

    def kv_batch_put(self, keys, partition_id, tags=None, fields=None):
        for place, key in enumerate(keys):
            self.tags.setdefault(key, {}).update(tags[place] if tags else {})
            row = self.rows.setdefault(key, {})
            for name in fields.keys() if fields is not None else ():
                value = fields.get(name)
                assert not isinstance(value, NonTensorData)  # said once a batch; verl can't save it
                row[name] = value[place] if isinstance(value, torch.Tensor) else value[place].data

    def kv_batch_get(self, keys, partition_id, select_fields=None):
        names = select_fields or sorted({name for key in keys for name in self.rows[key]})
        columns = {name: [self.rows[key][name] for key in keys] for name in names}  # as in verl: a lack is an error
        return tu.get_tensordict(
            {
                name: torch.stack(values) if isinstance(values[0], torch.Tensor) else np.array(values, dtype=object)
                for name, values in columns.items()
            }
        )

    def kv_clear(self, keys, partition_id):
        for key in [keys] if isinstance(keys, str) else keys:
            self.tags.pop(key)
            self.rows.pop(key)

    def save_checkpoint(self, path, metadata):
        Path(path).mkdir(parents=True)
        (Path(path) / "all.pkl").write_bytes(pickle.dumps((self.tags, self.rows)))
        (Path(path) / "metadata.json").write_text(
            json.dumps({"storage_saved": self.saves_rows, "user_metadata": metadata})
        )

    def load_checkpoint(self, path):
        self.tags, self.rows = pickle.loads((Path(path) / "all.pkl").read_bytes())

    @property
    def prompts(self):
        return {key for key, tag in self.tags.items() if tag.get("is_prompt")}


class Servers:
    """Generates a group at a call, oldest first, with the weights that the trainer had when it was sent."""

    def __init__(self, made):
        self.made, self.running, self.sent, self.rewards = made, [], Counter(), {}

    def generate_sequences(self, batch):
        sizes = batch["__rollout_n__"].tolist() if "__rollout_n__" in batch else [2] * len(batch)
        assert batch["global_steps"] == self.made.global_steps
        for uid, index, size in zip(batch["uid"], batch["index"], sizes, strict=True):
            self.sent[uid] += 1
            tq.kv_batch_put([uid], "train", tags=[{"status": "running"}])
            self.running.append((uid, index, size, self.made.global_steps - 1))

    def finish(self):
        uid, index, size, version = self.running.pop(0)
        keys = [f"{uid}_{session}_0" for session in range(size)]
        rewards = self.rewards.get(index, [0.0, 1.0, 0.0, 1.0])
        tags = [{"min_global_steps": version, "max_global_steps": version, "index": index}] * size
        fields = tu.get_tensordict({"rm_scores": torch.tensor(rewards[:size])[:, None]})
        tq.kv_batch_put(keys, "train", tags=tags, fields=fields)
        tq.kv_batch_put([uid], "train", tags=[{"status": "finished"}])


class Rows(torch.utils.data.Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return index


def collate(indices):
    return {"raw_prompt": np.array([f"prompt {i}" for i in indices]), "index": np.array(indices, dtype=object)}


def maker(monkeypatch, folder):
    """Makes bounded trainers, each with a queue and servers of its own, as in a process of its own."""

    def make(block=BLOCK, *, rows=7, warm_up=1, filtered=False, shuffle=True):
        made = trainer(BoundedTrainer, "bounded", block, folder)
        made.config.data.shuffle = shuffle
        made.config.trainer.update(
            {
                "del_local_ckpt_after_load": False,
                "default_hdfs_dir": None,
                "v1": {"sampler": SAMPLER, "separate_async": {"num_warmup_batches": warm_up}},
            }
        )
        made.config.skip = {"rollout_tq": {"enable": False}}
        made.config.algorithm.filter_groups = {"enable": filtered, "metric": "reward"}
        made.config.reward = {"reward_model": {"enable": False}}
        made.trainer_mode, made.global_steps, made._restored_tq_prompt_count = "separate_async", 0, 0
        made.use_critic, made.current_mode = False, HybridEngineMode.TRAINER
        made.checkpoint_callback = SimpleNamespace(on_save=lambda **_: None)
        made.actor_rollout_wg = SimpleNamespace(load_checkpoint=lambda **_: None, save_checkpoint=lambda *_, **__: None)
        made.train_dataset, made.train_dataloader_it = Rows(rows), None
        made.train_dataloader = StatefulDataLoader(
            made.train_dataset, 1, sampler=create_rl_sampler(made.config.data, made.train_dataset), collate_fn=collate
        )
        made.queue, made.agent_loop_manager = Queue(), Servers(made)
        for name in ("kv_list", "kv_batch_put", "kv_batch_get", "kv_clear", "save_checkpoint", "load_checkpoint"):
            monkeypatch.setattr(tq, name, getattr(made.queue, name))
        made.replay_buffer = made._build_replay_buffer()
        made.replay_buffer._wait_for_next_poll = lambda *_: made.agent_loop_manager.finish()
        made.trained, made.staleness = [], []
        return made

    return make


def begin(made):
    """What ``fit`` does before its first step."""
    made._load_checkpoint()
    made.global_steps += 1
    made._reissue_inflight_prompts()
    made.on_train_begin()
    return made


def step(made, save=False, more=0):
    """A step as ``fit`` makes it: its rows are still in the queue while it saves. ``more`` groups finish meanwhile."""
    made.prepare_step()
    batch, metrics = made.replay_buffer.sample(made.global_steps, "train", 2)
    for _ in range(more):
        made.agent_loop_manager.finish()
    made.staleness += [made.global_steps - 1 - tag["min_global_steps"] for tag in batch.tags]
    made.trained += [(key.split("_")[0], tag["index"]) for key, tag in zip(batch.keys, batch.tags, strict=True)]
    if save:
        made._save_checkpoint()
    tq.kv_clear(batch.keys, "train")
    made.global_steps += 1
    return metrics


def drawn(make, count, **options):
    """The first ``count`` rows that the data loader gives."""
    made = make(**options)
    return [int(made._fetch_one_gen_batch()["index"][0]) for _ in range(count)]


def trained_once(*parts):
    """The rows trained over ``parts`` of a run, each of its groups once."""
    groups = [dict.fromkeys(part) for part in parts]
    uids = [uid for part in groups for uid, _ in part]
    assert len(uids) == len(set(uids))
    return [index for part in groups for _, index in part]
