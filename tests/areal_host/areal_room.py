"""AReaL in the CPU room for tests: a tiny model, a configuration, and AReaL's real trainer and FSDP engine here.

folder = tmp_path
config = configuration(folder, {"actor.ppo_n_minibatches": 1, "metronome.rollout_source": "periodic"})
with trainer(config) as one:
    one.train(workflow=workflow(config))
with actor(config) as engine:
    engine.ppo_update(engine.compute_advantages(random_groups([4, 4])))
"""

from metronome_areal.cpu import prepare

prepare()

import contextlib  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import yaml  # noqa: E402
from areal.api import FinetuneSpec  # noqa: E402
from areal.api.cli_args import load_expr_config  # noqa: E402
from areal.utils.hf_utils import load_hf_tokenizer  # noqa: E402
from areal.workflow.rlvr import RLVRWorkflow  # noqa: E402

from metronome_areal.actor import MetronomeActor  # noqa: E402
from metronome_areal.config import GRPOConfig, read, told  # noqa: E402
from metronome_areal.cpu import _free_port, assets  # noqa: E402
from metronome_areal.cpu.arguments import enter  # noqa: E402
from metronome_areal.trainer import PPOTrainer  # noqa: E402

ENDS = (0, 1)
"""The tiny tokenizer's <pad> and <eos>: RLVRWorkflow stops at either."""


def settings(folder):
    """AReaL's configuration of a run in ``folder``, as nested dictionaries."""
    name = {"experiment_name": "room", "trial_name": "t0"}
    saved = {**name, "fileroot": str(folder / "runs")}
    never = {"freq_epochs": None, "freq_steps": None, "freq_secs": None}
    actor = {
        **name,
        "backend": "fsdp:d1",
        "path": str(folder / "model"),
        "disable_dropout": True,
        "mb_spec": {"max_tokens_per_mb": 256},
        "optimizer": {"type": "adam", "lr": 1e-2, "weight_decay": 0.0, "warmup_steps_proportion": 0.0},
        "ppo_n_minibatches": 1,
        "kl_ctl": 0.0,
        "use_decoupled_loss": True,
        "recompute_logprob": True,
        "prox_logp_method": "loglinear",
        "reward_norm": None,
        "adv_norm": {"mean_level": "group", "std_level": "group", "group_size": 4},
        "max_new_tokens": 12,
    }
    return {
        **name,
        "seed": 1,
        "total_train_epochs": 1,
        "total_train_steps": 2,
        "tokenizer_path": str(folder / "model"),
        "cluster": {
            "n_nodes": 1,
            "n_gpus_per_node": 1,
            "fileroot": str(folder / "runs"),
            "name_resolve": {"type": "nfs", "nfs_record_root": str(folder / "names")},
        },
        "rollout": {
            **name,
            "backend": "vllm:d1",
            "max_concurrent_rollouts": 16,
            "consumer_batch_size": 4,
            "max_head_offpolicyness": 0,
            "request_timeout": 60,
        },
        "gconfig": {"n_samples": 4, "max_new_tokens": 12, "temperature": 1.0},
        "actor": actor,
        "ref": None,
        "train_dataset": {"batch_size": 4, "shuffle": False, "path": "none", "type": "rl", "num_workers": 0},
        "valid_dataset": None,
        "saver": {**saved, **never},
        "recover": {**saved, "mode": "disabled"},
        "evaluator": {**saved, **never},
        "stats_logger": {**saved, "wandb": {"mode": "disabled"}},
        "metronome": {"cpu": True},
    }


def configuration(folder, keys=None, kind=GRPOConfig):
    """A configuration read by AReaL itself; makes the model in ``folder`` if it isn't there.

    Args:
        folder: of the run.
        keys: dotted key to value, over ``settings``.
        kind: AReaL's class, or a subclass.
    """
    if not (folder / "model").exists():
        assets.make(folder)
    found = settings(folder)
    for key, value in (keys or {}).items():
        *path, last = key.split(".")
        place = found
        for part in path:
            place[part] = place.get(part) or {}
            place = place[part]
        place[last] = value
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(found))
    config, _ = load_expr_config(["--config", str(path)], kind)
    return config


def dataset(folder):
    """The prompts: ``messages`` and ``answer``."""
    return [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]


@contextlib.contextmanager
def trainer(config, kind=PPOTrainer, **named):
    """Our PPOTrainer over the folder's prompts; closed at the end."""
    _another_port()
    made = kind(config, train_dataset=dataset(Path(config.actor.path).parent), **named)
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def actor(config, kind=MetronomeActor):
    """The training engine alone, initialised; destroyed at the end."""
    enter(config)
    _another_port()
    made = kind(told(config.actor, read(config), int(config.seed)))
    made.create_process_group()
    made.initialize(None, FinetuneSpec(1, 64, 4))
    try:
        yield made
    finally:
        made.destroy()


def reward(prompt, completions, prompt_ids, completion_ids, answer=None, **others):
    """The share of digits."""
    return sum(one.isdigit() for one in completions) / max(1, len(completions))


class Direct(RLVRWorkflow):
    """AReaL's RLVRWorkflow, without a process pool for the reward."""

    async def _compute_rewards(self, response, prompt, data):
        text = self.tokenizer.decode(response.output_tokens)
        return self.reward_fn(prompt, text, response.input_tokens, response.output_tokens, **data)


def workflow(config, kind=Direct, reward_fn=reward):
    """A workflow for ``config``'s sampling."""
    return kind(reward_fn, config.gconfig, load_hf_tokenizer(config.tokenizer_path))


def random_groups(sizes, prompt=5, response=10, version=0, seed=0):
    """Groups as a workflow returns them: one dict a group, ``sizes`` rows, responses of 1 to ``response`` tokens."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for rows in sizes:
        shared = torch.randint(2, 97, (1, prompt), generator=draw).expand(rows, -1)
        lengths = torch.randint(1, response + 1, (rows,), generator=draw)
        columns = torch.arange(prompt + response)[None]
        real = columns < prompt + lengths[:, None]
        mask = real & (columns >= prompt)
        ids = torch.cat([shared, torch.randint(2, 97, (rows, response), generator=draw)], 1)
        width = int(prompt + lengths.max())
        group = {
            "input_ids": (ids * real).int(),
            "attention_mask": real,
            "loss_mask": mask.int(),
            "logprobs": -4.0 * torch.rand(ids.shape, generator=draw) * mask,
            "versions": torch.where(mask, version, -1).int(),
        }
        group = {name: value[:, :width] for name, value in group.items()}
        found.append({**group, "rewards": torch.rand(rows, generator=draw)})
    return found


def _another_port():
    if os.environ["WORLD_SIZE"] == "1":
        os.environ["MASTER_PORT"] = str(_free_port())
