"""Bounded staleness on OpenRLHF's asynchronous trainer: each group is judged when it is to be trained.

OpenRLHF's generator puts batches into a queue of fixed length, from which its trainer takes them. Here the trainer
keeps the groups that it took, drops those that are too stale and sends their prompts back, and trains whenever it has
a whole batch; the generator takes prompts that came back before new ones. A checkpoint has OpenRLHF's position in the
data behind the last batch that was taken, and the prompts of what was taken and isn't trained: each is trained once.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import ray
import torch
from openrlhf.trainer import ppo_trainer_async as host
from openrlhf.trainer.ppo_trainer import BasePPOTrainer
from ray.util.queue import Queue

from metronome.contracts import Verdict
from metronome_openrlhf import experience
from metronome_openrlhf.checks import ZeroRate, check_change, check_life, check_received
from metronome_openrlhf.config import part_of
from metronome_openrlhf.generating import DONE, DRAINED, Batch, MetronomeGenerator, Prompt
from metronome_openrlhf.loss import announce
from metronome_openrlhf.maker import MetronomeMaker
from metronome_openrlhf.queueing import window
from metronome_openrlhf.seen import Seen
from metronome_openrlhf.state import restored, saved

_Trainer: Any = host.PPOTrainerAsync.__ray_metadata__.modified_class
_Training: Any = host.TrainingActor.__ray_metadata__.modified_class


class MetronomeLearner(_Training):
    """OpenRLHF's ``TrainingActor`` with our verdict on every group, and the queue ``again`` back to the generator.

    Attributes:
        version: of the weights that the engines hold, or get at the next broadcast: the global step.
        waiting: groups that were taken from the queue and aren't trained.
        away: prompts that went back and whose group hasn't come, by number.
    """

    experience_maker: Any

    def __init__(self, pretrain: str, strategy: Any, *groups: Any, again: Any, **named: Any) -> None:
        experience.install()
        self.part = part_of(strategy.args)
        super().__init__(pretrain, strategy, *groups, **named)
        maker = self.experience_maker
        self.experience_maker = MetronomeMaker(
            maker.actor_model_group,
            maker.critic_model_group,
            maker.reward_model_group,
            maker.initial_model_group,
            maker.kl_ctl,
            maker.strategy,
            maker.tokenizer,
        )
        self.again = again
        self.version = 0
        self.waiting: list[list[Any]] = []
        self.away: dict[int, Prompt] = {}
        self._sent = 0
        self._dropped = self._dropped_since = 0
        self._states: dict[str, Any] = {"episode": 0, "total_consumed_prompts": 0, "data_loader_state_dict": {}}
        self._received: list[float] = []
        self._moved = False
        self._say_rate, self._seen = ZeroRate(strategy.args), Seen()

    # --- the loop -----------------------------------------------------------------------------------

    def fit(self, global_step: int = 0) -> None:
        """OpenRLHF's loop; a batch is trained as soon as ``--rollout.batch_size`` groups may be."""
        self._began = time.monotonic()
        size = int(self.args.rollout.batch_size)
        while (payload := self.rollout_queue.get(block=True)) != DONE:
            if payload == DRAINED:
                global_step = self._end(global_step)
            elif isinstance(payload, Batch):
                self._take(payload, global_step)
                while self._may_train(size, global_step):
                    global_step = self._train(size, global_step, payload)
            else:
                self._note_evaluation(payload, global_step)
        for logger in (self.wandb_logger, self.tensorboard_logger):
            if logger:
                logger.close()

    def _take(self, batch: Batch, global_step: int) -> None:
        self.rollout_slots.put(global_step, block=True)
        if batch.states is not None:
            self._states = batch.states
        for number in batch.served:
            del self.away[number]
        size = int(self.args.rollout.n_samples_per_prompt)
        self.waiting += [batch.rows[at : at + size] for at in range(0, len(batch.rows), size)]

    def _may_train(self, groups: int, global_step: int) -> bool:
        """Whether ``groups`` groups may be trained at ``global_step``; those that are too stale go back."""
        source, kept = self.part.selection.rollout_source, []
        for group in self.waiting:
            versions = versions_of(group)
            if not versions or source.verdict(versions, global_step) is Verdict.TRAIN:  # none: no token is trained
                kept.append(group)
            else:
                self._dropped += 1
                self._send_back(group[0].prompts[0], group[0].labels[0], group[0].images[0])
        self.waiting = kept
        return len(kept) >= groups > 0

    def _send_back(self, prompt: str, label: Any, image: Any) -> None:
        self._sent += 1
        one = Prompt(self._sent, prompt, label, image)
        self.away[one.number] = one
        self.again.put(one)

    def _train(self, groups: int, global_step: int, batch: Batch | None = None) -> int:
        """Trains the ``groups`` oldest groups; returns the next global step."""
        chosen, self.waiting = self.waiting[:groups], self.waiting[groups:]
        rows = [row for group in chosen for row in group]
        found = self._told(chosen, global_step)
        status, global_step = self.train_step(rows, global_step)
        status |= found
        if batch is not None:
            status["timing/generation"] = batch.seconds
            if batch.rate is not None:
                status["dynamic_filtering_pass_rate"] = batch.rate
        now = time.monotonic()
        status["timing/step_total"], self._began = now - self._began, now
        self._seen.add(status)
        shown = {name: value for name, value in status.items() if name != "generated_samples"}
        host.logger.info(f"Global step {global_step}: {shown}")
        self.save_logs_and_checkpoints(global_step, status, self._client_states(global_step))
        return global_step

    def _told(self, groups: list[list[Any]], global_step: int) -> dict[str, float]:
        dropped, self._dropped_since = self._dropped - self._dropped_since, self._dropped
        ages = [global_step - min(versions) for group in groups if (versions := versions_of(group))]
        several = [len(versions_of([row])) > 1 for group in groups for row in group]
        return {
            "metronome/bounded/staleness_mean": sum(ages) / max(1, len(ages)),
            "metronome/bounded/staleness_max": float(max(ages, default=0)),
            "metronome/bounded/rows_over_publications": sum(several) / len(several),
            "metronome/bounded/dropped_groups": float(dropped),
            "metronome/bounded/dropped_groups_total": float(self._dropped),
            "metronome/bounded/waiting_groups": float(len(self.waiting)),
        }

    def _end(self, global_step: int) -> int:
        """After the data: trains what is left in whole windows once nothing is away; then the generator may end."""
        whole = window(self.args)
        size = int(self.args.rollout.n_samples_per_prompt)
        groups = len(self.waiting)
        while groups * size % whole:
            groups -= 1
        trains = groups and not self.away and self._may_train(groups, global_step)
        if self.away:  # the generator finds them, and asks again
            return global_step
        if trains:
            global_step = self._train(groups, global_step)
        if self.waiting:
            left, self.waiting = len(self.waiting) * size, []
            print(f"metronome: leaves out {left} rows at the end of the data", flush=True)
        self.again.put(None)
        return global_step

    def _note_evaluation(self, payload: Any, global_step: int) -> None:
        """As OpenRLHF's trainer does with the generator's evaluation."""
        _, step, found = payload
        self.rollout_slots.put(global_step, block=True)
        host.logger.info(f"Eval at step {step}: {found}")
        for logger in (self.wandb_logger, self.tensorboard_logger):
            if logger:
                logger.log_eval(step, found)
        self.save_best_checkpoint(found, step, self._client_states(global_step))
        self._began = time.monotonic()

    # --- a step -------------------------------------------------------------------------------------

    def train_step(self, rollout_samples: Any, global_step: int) -> tuple[dict[str, Any], int]:
        """OpenRLHF's."""
        self.version = global_step + 1  # what this step publishes
        found: tuple[dict[str, Any], int] = super().train_step(rollout_samples, global_step)
        return found

    def ppo_train(self, global_steps: int) -> dict[str, Any]:
        """OpenRLHF's; a step that changed nothing, or left a hook out, isn't published."""
        announce(self.actor_model_group, self.part, global_steps)
        status: dict[str, Any] = super().ppo_train(global_steps)
        check_change(status, f"step {global_steps + 1}")
        check_life(status, self.part, f"step {global_steps + 1}")
        self._say_rate(status, global_steps)
        self._moved = bool(status.get("metronome/weights/changed", False))
        return status

    def broadcast_to_vllm(self) -> None:
        """OpenRLHF's; before generation goes on, engines learn their version and running requests what becomes of them.

        With ``in_flight: abort`` they begin anew, with ``resume`` they go on; with ``finish`` none is running.
        """
        ray.get(self.vllm_lock.acquire.remote())
        try:
            if self._partial_rollout:
                self._everywhere("pause_generation")
            try:
                before = self._received or self._everywhere("fingerprint")
                BasePPOTrainer.broadcast_to_vllm(self)
                self._everywhere("set_version", self.version)
                self._received = self._everywhere("fingerprint")
                check_received(before, self._received, self._moved, f"publication of version {self.version}")
                if self.part.in_flight == "abort":
                    self._everywhere("abort_running")
            finally:
                if self._partial_rollout:
                    self._everywhere("resume_generation")
        finally:
            ray.get(self.vllm_lock.release.remote())

    def _everywhere(self, method: str, *arguments: Any) -> list[Any]:
        found: list[Any] = ray.get([getattr(engine, method).remote(*arguments) for engine in self.vllm_engines])
        return found

    # --- state --------------------------------------------------------------------------------------

    def _client_states(self, global_step: int) -> dict[str, Any]:
        """OpenRLHF's position in the data behind the last batch taken, and the prompts of what isn't trained."""
        waiting = [(group[0].prompts[0], group[0].labels[0], group[0].images[0]) for group in self.waiting]
        away = [(one.prompt, one.label, one.image) for one in self.away.values()]
        state = {**saved(self.part), "again": waiting + away}
        return {**self._states, "global_step": global_step, "metronome": state}

    def metronome_seen(self) -> Seen:
        """What the run showed, for its last line."""
        return self._seen

    def init_checkpoint_states(self) -> dict[str, Any]:
        """OpenRLHF's; a resumed run generates again what the checkpoint had taken and not trained."""
        states: dict[str, Any] = super().init_checkpoint_states()
        self.version = int(states["global_step"])
        if self.version:
            found = states.get("metronome")
            restored(self.part, found)
            self._states = {name: states[name] for name in self._states}
            for prompt, label, image in (found or {}).get("again", ()):
                self._send_back(prompt, label, image)
        return states


class MetronomeTrainerAsync(_Trainer):
    """OpenRLHF's ``PPOTrainerAsync`` with our two actors, and a queue from the one that trains to the other."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        with _ours(Queue()):
            super().__init__(*arguments, **named)

    def metronome_seen(self) -> Seen:
        """What the actor that trains saw, for the run's last line."""
        found: Seen = ray.get(self.trainer_actor.metronome_seen.remote())
        return found


@contextmanager
def _ours(again: Any) -> Iterator[None]:
    """Our actor classes where OpenRLHF's trainer looks its own up, while it starts them."""
    kept = {name: getattr(host, name) for name in ("GenerateSamplesActor", "TrainingActor")}
    for name, cls in zip(kept, (MetronomeGenerator, MetronomeLearner), strict=True):
        setattr(host, name, SimpleNamespace(remote=functools.partial(ray.remote(cls).remote, again=again)))
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(host, name, value)


def versions_of(rows: list[Any]) -> list[int]:
    """The distinct versions of the rows' sampled tokens, oldest first; -1 where one isn't known."""
    found: set[int] = set()
    for row in rows:
        if row.versions is None:
            found.add(experience.UNKNOWN)
        else:
            found |= set(torch.unique(row.versions[row.action_mask.bool()]).tolist())
    return sorted(found)
