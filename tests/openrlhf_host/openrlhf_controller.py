"""OpenRLHF's controller with its actor and reference workers in one process; only Ray and the engines are stand-ins."""

import random
from types import SimpleNamespace

import local_ray
import torch
import workers
from openrlhf.trainer import ppo_trainer
from openrlhf.trainer.ppo_utils import experience, experience_maker, samples_generator
from openrlhf.trainer.ppo_utils.experience import Experience as experience_of_openrlhf
from openrlhf.trainer.ray import launcher
from openrlhf.utils import get_strategy

from metronome_openrlhf import loss, maker, samples, trainer
from metronome_openrlhf.policy import MetronomePolicy
from metronome_openrlhf.trainer import MetronomeTrainer

STOCK = ppo_trainer.PPOTrainer.__ray_metadata__.modified_class
REFERENCE = launcher.ReferenceModelActor.__ray_metadata__.modified_class
MODULES = (ppo_trainer, experience_maker, samples_generator, launcher, loss, maker, samples, trainer)


def install(patch):
    """Puts the stand-in for Ray where the controller's classes look it up."""
    local_ray.install(patch, *MODULES)


class Group(launcher.RayActorGroup):
    """OpenRLHF's own dispatch over workers that are here."""

    def __init__(self, workers, calls=None):
        self._actor_handlers = [local_ray.Handle(one, calls) for one in workers]
        self.duplicate_actors = 1


class Engine:
    """Answers drawn from the prompt alone, of unequal lengths, sampled by the version that it was told.

    Attributes:
        score: ``(prompt, member) -> score``, which is the reward too.
        served: ``(prompt, samples)`` of every call.
        deaf: weights don't reach it.
        error: raised by the next call.
    """

    def __init__(self, longest=12):
        self.version, self.weights, self.longest = 0, 0.0, longest
        self.served, self.versions = [], []
        self.deaf, self.error, self.stamp = False, None, None
        self.score = lambda prompt, member: random.Random(f"{prompt}{member}").random()

    def get_num_unfinished_requests(self):
        return 0

    def set_version(self, version):
        self.version = version
        self.versions.append(version)

    def fingerprint(self):
        return self.weights

    def generate_responses(self, prompt, label, sampling_params, max_length, hf_tokenizer, num_samples=1, images=None):
        if self.error is not None:
            raise self.error
        self.served.append((prompt, num_samples))
        return [self.response(prompt, label, hf_tokenizer, member) for member in range(num_samples)]

    def response(self, prompt, label, tokenizer, member):
        draw = random.Random(f"{prompt}/{member}")
        tokens = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        length = self.longest if not member else draw.randint(1, self.longest)
        score = self.score(prompt, member)
        return {
            "prompt": prompt,
            "label": label,
            "observation_tokens": tokens + [draw.randint(3, 90) for _ in range(length)],
            "action_ranges": [(len(tokens), len(tokens) + length)],
            "rollout_log_probs": [0.0] * len(tokens) + [-4.8 + 0.2 * draw.random() for _ in range(length)],
            "reward": score,
            "scores": score,
            "truncated": length == self.longest,
            "extra_logs": {"seconds": draw.random()},
            "metronome_spans": [[self.version if self.stamp is None else self.stamp, length]],
        }


def _publishing(cls):
    """The worker, which tells the engines a number instead of sending them its weights."""

    class Publishing(cls):
        engines = ()

        def broadcast_to_vllm(self):
            for engine in self.engines:
                if not engine.deaf:
                    engine.weights = float(workers.weights(self).double().abs().sum())

    return Publishing


def build(folder, block=None, engines=None, kl=False, **flags):
    """A controller of ours, of OpenRLHF's own where ``block`` is None, with everything that it drives.

    Args:
        folder: the assets.
        block: the ``metronome:`` block.
        engines: stand-ins for rollout engines.
        kl: whether there is a reference model (other weights than the actor's).
        flags: OpenRLHF's, with ``__`` for the dot.

    The controller gets ``worker``, ``calls`` (to the actor), ``engines`` and ``logs`` (of each step).
    """
    assets = workers.model(folder)
    given = dict(zip(assets.flags()[::2], assets.flags()[1::2], strict=True))
    given = {name.removeprefix("--").replace(".", "__"): value for name, value in given.items()}
    defaults = {"data__max_len": 64, "data__max_samples": 16, "ckpt__path": str(folder / "checkpoints")}
    args = workers.arguments(block, **{**given, **defaults, **flags})
    experience.Experience = experience_of_openrlhf  # which ours replaces
    cls = _publishing(workers.STOCK if block is None else MetronomePolicy)
    worker = workers.policy(args, assets.model, cls)
    worker.engines = engines = engines or [Engine()]
    strategy = get_strategy(args)
    strategy.ds_device_mesh = worker.strategy.ds_device_mesh
    reference = None
    if kl:
        reference = object.__new__(REFERENCE)
        reference.init_model_from_pretrained(get_strategy(args), str(assets.model))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for one in reference.model.parameters():
                one.add_(0.02 * torch.randn(one.shape, generator=generator))
    calls = []
    made = (STOCK if block is None else MetronomeTrainer)(
        str(assets.model),
        strategy,
        Group([worker], calls),
        None,
        None,
        Group([reference]) if kl else None,
        [local_ray.Handle(one) for one in engines],
        do_sample=True,
        max_len=args.data.max_len,
        max_new_tokens=args.rollout.max_new_tokens,
        temperature=1.0,
        top_p=1.0,
    )
    logs = []
    save = made.save_logs_and_checkpoints

    def saved(step, status, states):
        save(step, status, states)
        logs.append(SimpleNamespace(step=step, status=dict(status), states=dict(states)))

    made.save_logs_and_checkpoints = saved
    made.worker, made.calls, made.engines, made.logs = worker, calls, engines, logs
    return made
