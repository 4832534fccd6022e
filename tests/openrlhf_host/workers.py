"""OpenRLHF's real classes in one process: arguments, actor workers on DeepSpeed ZeRO-2 and gloo, made-up groups."""

import os
import runpy
import socket
import sys

import openrlhf_room  # noqa: F401  # before the imports below

# isort: split

import openrlhf.utils.config
import openrlhf.utils.utils
import torch
from openrlhf.trainer.ray import ppo_actor
from openrlhf.utils import get_strategy

from metronome_openrlhf.config import arrange
from metronome_openrlhf.cpu import assets
from metronome_openrlhf.experience import VersionedExperience, install
from metronome_openrlhf.policy import MetronomePolicy

STOCK = ppo_actor.PolicyModelActor.__ray_metadata__.modified_class
FLAGS = {
    "ds.attn_implementation": "eager",
    "ds.zero_stage": 2,
    "ds.grad_accum_dtype": "fp32",
    "train.micro_batch_size": 2,
    "train.batch_size": 16,
    "rollout.batch_size": 4,
    "rollout.n_samples_per_prompt": 4,
    "rollout.max_new_tokens": 12,
    "algo.advantage.estimator": "group_norm",
    "algo.kl.init_coef": 0,
    "actor.adam.lr": 1e-3,
    "actor.lr_scheduler": "constant",
    "actor.lr_warmup_ratio": 0,
    "actor.max_norm": 0,
    "actor.num_gpus_per_node": 1,
    "vllm.num_engines": 1,
}

_dtype = openrlhf.utils.utils.convert_to_torch_dtype


def _with_fp32(name):
    return torch.float32 if name == "fp32" else _dtype(name)


torch.compiler.set_stance("force_eager")  # OpenRLHF compiles its entropy, which takes a compiler and a minute

# OpenRLHF knows bf16 and fp16; DeepSpeed trains in fp32 where neither is named, so that equalities can be tight.
openrlhf.utils.utils.convert_to_torch_dtype = _with_fp32


class _Parsed(Exception):
    pass


def parsed(flags):
    """OpenRLHF's own arguments, nested, as its main has them when it calls ``hierarchize``."""
    hierarchize = openrlhf.utils.config.hierarchize

    def caught(args):
        raise _Parsed(hierarchize(args))

    words = []
    for name, value in flags.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not None and value is not False:
            words += [f"--{name}", *(map(str, value) if isinstance(value, (list, tuple)) else [str(value)])]
    kept, openrlhf.utils.config.hierarchize = sys.argv, caught
    sys.argv = ["train_ppo_ray", *words]
    try:
        runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__", alter_sys=False)
    except _Parsed as found:
        return found.args[0]
    finally:
        sys.argv, openrlhf.utils.config.hierarchize = kept, hierarchize
    raise AssertionError("OpenRLHF's main parsed no arguments")


def arguments(block=None, fp32=True, **flags):
    """Arguments as they reach the workers; ``block`` is the ``metronome:`` block, None for OpenRLHF alone.

    Keywords are flags with ``__`` for the dot.
    """
    args = parsed({**FLAGS, **{name.replace("__", "."): value for name, value in flags.items()}})
    if block is not None:
        arrange(args, dict(block), "cpu")
    if args.actor.eps_clip_low_high is None:
        args.actor.eps_clip_low_high = (args.actor.eps_clip, args.actor.eps_clip)
    args.critic.model_name_or_path = None
    if args.reward.remote_url:
        args.reward.remote_url = args.reward.remote_url.split(",")
    if len(args.algo.advantage.is_correction_threshold) == 1:
        args.algo.advantage.is_correction_threshold.insert(0, 0.0)
    args.rollout.vllm_generate_batch_size = args.rollout.vllm_generate_batch_size or args.rollout.batch_size
    if fp32:
        args.ds.param_dtype = "fp32"
    args.local_rank = -1
    return args


def distributed(rank=0, world=1, port=None):
    """The variables that OpenRLHF's actor workers set."""
    if port is None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(world), RANK=str(rank), LOCAL_RANK="0"
    )


def policy(args, model, cls=MetronomePolicy, max_steps=100):
    """An actor worker without Ray and without rollout engines."""
    if "MASTER_ADDR" not in os.environ:
        distributed()
    made = object.__new__(cls)
    cls.init_model_from_pretrained(made, get_strategy(args), str(model), max_steps, None)
    return made


def stock(args, model, **options):
    """OpenRLHF's own actor worker."""
    return policy(args, model, STOCK, **options)


def moments(worker):
    """Adam's first moment after one step, flat: 0.1 times the gradient as it was clipped; this rank's share."""
    optimizer = worker.actor_optim.optimizer
    return torch.cat(
        [optimizer.state[one]["exp_avg"].flatten() for group in optimizer.param_groups for one in group["params"]]
    )


def weights(worker):
    return torch.cat([one.detach().flatten() for one in worker.actor.model.module.parameters()])


def groups(sizes=(4, 4, 4, 4), seed=0, version=0, longest=12):
    """Groups of rows as the experience maker leaves them: unequal lengths, one advantage a row.

    Rows of a group share a prompt; old log-probs are near a random model's, so that ratios aren't one.
    """
    install()
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number, size in enumerate(sizes):
        prompt = torch.randint(3, 98, (3 + number,), generator=generator)
        group = []
        for member in range(size):
            length = longest if not member else int(torch.randint(1, longest + 1, (1,), generator=generator))
            response = torch.randint(3, 98, (length,), generator=generator)
            group.append(row(prompt, response, generator, version))
        found.append(group)
    return found


def row(prompt, response, generator, version=0):
    tokens = torch.cat([prompt, response])
    mask = torch.zeros(len(tokens) - 1, dtype=torch.long)
    mask[len(prompt) - 1 :] = 1
    near = -4.85 + 0.1 * torch.randn(3, 1, len(mask), generator=generator)
    advantage = torch.randn(1, 1, generator=generator)
    return VersionedExperience(
        sequences=tokens[None],
        attention_mask=torch.ones_like(tokens)[None],
        action_mask=mask[None],
        action_log_probs=near[0],
        base_action_log_probs=near[1],
        rollout_log_probs=near[2],
        advantages=(advantage * mask)[:, : len(mask)],
        returns=(advantage * mask)[:, : len(mask)],
        versions=torch.full((1, len(mask)), version),
        rewards=advantage[0],
        response_length=torch.tensor([len(response)]),
        truncated=torch.tensor([False]),
        total_length=torch.tensor([float(len(tokens))]),
        prompts=["prompt"],
        labels=["label"],
        images=[None],
        mm_train_inputs=[None],
        info={"reward": advantage[0].clone()},
    )


def copied(rows):
    return [VersionedExperience(**{**vars(one), "info": dict(one.info)}) for one in rows]


def together(rows):
    return VersionedExperience.concat_experiences(copied(rows), 0)


def whole_step(worker, batch, kl=0.0):
    """OpenRLHF's own update of a whole batch."""
    for one in [row for group in batch for row in group]:
        worker.append(together([one]))
    return worker.fit(kl)


def model(folder):
    """A tiny model in fp32 precision of its bfloat16 weights."""
    return assets.make(folder)
