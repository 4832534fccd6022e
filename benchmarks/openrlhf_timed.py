"""OpenRLHF's synchronous trainer and ours, unchanged but for a stopwatch; used by benchmarks/openrlhf_periodic.py.

``python -m openrlhf_timed FLAGS`` is ``python -m metronome_openrlhf FLAGS`` with these. Seconds of a step, from the
call that draws its prompts to the end of its publication, are logged under ``benchmark``. Own time is what is neither
a call of OpenRLHF's (from within ours), nor a wait for groups, nor one of its passes and steps in the actor worker: so
Ray's transport of our calls, and idle seconds of the worker between them, are ours.
"""

from __future__ import annotations

import functools
import sys
import time
from collections import Counter

import openrlhf_room  # noqa: F401  # of tests/openrlhf_host; attaches the CPU room, before the imports below

# isort: split

from openrlhf.trainer import ppo_trainer
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator
from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer

from metronome_openrlhf.policy import MetronomePolicy
from metronome_openrlhf.samples import Arriving
from metronome_openrlhf.trainer import MetronomeTrainer


class Watch:
    """Seconds spent in the functions that it is set over, by kind; of nested ones the outermost counts."""

    def __init__(self):
        self.seconds = Counter()
        self._inside = False

    def over(self, owner, name, kind):
        """Replaces ``owner``'s function ``name`` by itself, timed; ``owner`` is an object or a class."""
        own = getattr(owner, name)

        @functools.wraps(own)
        def timed(*arguments, **named):
            if self._inside:
                return own(*arguments, **named)
            self._inside, started = True, time.perf_counter()
            try:
                return own(*arguments, **named)
            finally:
                self.seconds[kind] += time.perf_counter() - started
                self._inside = False

        setattr(owner, name, timed)

    def taken(self):
        """The seconds so far; they start again at zero."""
        found, self.seconds = dict(self.seconds), Counter()
        return found


class _Timed:
    """A trainer whose steps are timed; ``_parts`` and ``_host`` are set up by the subclass' ``__init__``."""

    def _watch(self):
        self._parts, self._host = Watch(), Watch()
        generate = self.samples_generator.generate_samples

        def generate_samples(**named):
            self._started = time.perf_counter()
            return generate(**named)

        self.samples_generator.generate_samples = generate_samples
        self._parts.over(self.samples_generator, "generate_samples", "generation")
        self._parts.over(self, "broadcast_to_vllm", "publish")

    def train_step(self, rollout_samples, global_step):
        status, done = super().train_step(rollout_samples, global_step)
        seconds = time.perf_counter() - self._started
        status["benchmark"] = {"step": seconds, **self._parts.taken(), **self._noted(status, seconds)}
        return status, done


class Stock(_Timed, ppo_trainer.PPOTrainer.__ray_metadata__.modified_class):
    """OpenRLHF's; it notes when each row came."""

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self._watch()
        self._parts.over(self.experience_maker, "make_experience_batch", "training")
        self._parts.over(self, "ppo_train", "training")
        self._rows = []
        read = self.samples_generator._process_response_into_experience

        def noted(response, **named):
            came = time.perf_counter() - self._started
            row = read(response, **named)
            self._rows.append((came, int(row.total_length[0])))
            return row

        self.samples_generator._process_response_into_experience = noted

    def _noted(self, status, seconds):
        size, rows = self.args.rollout.n_samples_per_prompt, self._rows
        self._rows = []
        groups = [rows[at : at + size] for at in range(0, len(rows), size)]
        return {
            "arrivals": [group[0][0] for group in groups],
            "longest": [max(length for _, length in group) for group in groups],
        }


class Trainer(_Timed, MetronomeTrainer):
    """Ours."""

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self._watch()
        self._parts.over(Arriving, "part", "generation")
        self._parts.over(self.experience_maker, "make_groups", "training")
        self._parts.over(self, "_accumulate", "training")
        for owner, name in (
            (Arriving, "_finished"),
            (SamplesGenerator, "_dispatch_prompts_to_vllm"),
            (SamplesGenerator, "_process_response_into_experience"),
            (RemoteExperienceMaker, "make_experience_batch"),
            (ppo_trainer.BasePPOTrainer, "broadcast_to_vllm"),
            (ppo_trainer.BasePPOTrainer, "_compute_rollout_stats"),
        ):
            self._host.over(owner, name, "host")

    def _noted(self, status, seconds):
        worker = status.pop("worker")
        own = seconds - self._host.taken()["host"] - worker["host"]
        return {"own": own, "optimiser": worker["step"], "own_in_worker": worker["own"]}


class Policy(MetronomePolicy):
    """Our actor worker; its step also returns the seconds of OpenRLHF's calls since the step before."""

    def init_model_from_pretrained(self, *arguments, **named):
        super().init_model_from_pretrained(*arguments, **named)
        self._host, self._all = Watch(), Watch()
        self._host.over(ActorPPOTrainer, "training_step", "host")
        self._host.over(self.actor.model, "step", "host")
        self._host.over(self.strategy, "get_grad_norm", "host")
        self._all.over(self.trainer, "accumulate", "parts")
        self._all.over(self.trainer, "step", "step")

    def metronome_step(self, rows):
        found = super().metronome_step(rows)
        host, whole = self._host.taken()["host"], self._all.taken()
        return {**found, "worker": {"host": host, "own": sum(whole.values()) - host, "step": whole["step"]}}


def main():
    import ray

    from metronome_openrlhf import launch, policy, trainer

    policy.MetronomePolicy, trainer.MetronomeTrainer = Policy, Trainer
    ppo_trainer.PPOTrainer = ray.remote(Stock)  # ours takes its place where a flag of ours is given
    return launch.main(sys.argv[1:])


if __name__ == "__main__":
    from openrlhf_timed import main as imported  # by whose name Ray's workers find the classes

    sys.exit(imported())
