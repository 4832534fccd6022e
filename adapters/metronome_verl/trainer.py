"""``trainer.v1.trainer_mode=metronome``: verl's V1 trainer with our hooks, one class for each rollout source.

verl looks the name up, constructs the class with its configuration and calls ``fit``. Construction arranges the
configuration and gives an object of the class that the rollout source needs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import torch
from omegaconf import DictConfig
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY, PPOTrainer, register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from metronome.controller_check import checked_metrics, checked_prompts, checked_size, explained
from metronome.errors import MetronomeError
from metronome_patches.ledger import apply
from metronome_verl import state
from metronome_verl.checks import check_change, check_mini_batch, check_rows, named
from metronome_verl.config import Arranged, arrange
from metronome_verl.flush import FLUSH
from metronome_verl.groups import group_order
from metronome_verl.host import check_host
from metronome_verl.statistics import GROUP_SIZE, step_stats
from metronome_verl.worker import MetronomeWorker

NAME = "metronome"


def register() -> None:
    """Registers the trainer with verl; harmless when repeated."""
    if NAME not in TRAINER_REGISTRY:
        register_trainer(NAME)(MetronomeTrainer)


class MetronomeTrainer(PPOTrainer):
    """What every mode shares: workers, group controller, groups kept together, proof of life, state.

    verl constructs this class; ``__new__`` gives that of the rollout source which the configuration names.
    """

    arranged: Arranged

    def __new__(cls, config: DictConfig) -> MetronomeTrainer:
        """Checks verl, arranges ``config`` and prints what was set.

        Raises ConfigurationError for a verl that we don't know and for settings that can't be true together.
        """
        if cls is not MetronomeTrainer:
            return object.__new__(cls)
        check_host()
        arranged = arrange(config)
        if arranged.mode != "synchronous":
            apply(FLUSH)
        made: MetronomeTrainer = object.__new__(_classes()[arranged.mode])
        made.arranged = arranged
        for line in (f"rollout source {arranged.mode}", *arranged.notes):
            print(f"metronome: {line}", flush=True)
        return made

    # --- workers ------------------------------------------------------------------------------------

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        mapping = self.role_worker_mapping
        for role in (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef, Role.RefPolicy):
            if role in mapping:
                mapping[role] = ray.remote(MetronomeWorker)

    # --- group controller ---------------------------------------------------------------------------

    @property
    def controller(self) -> Any:
        """The group controller."""
        return self.arranged.selection.group_controller

    @property
    def owns_groups(self) -> bool:
        """Whether G is ours to choose: ``metronome.group_controller`` was set."""
        return "group_controller" in self.arranged.block

    def _next_train_batch(self, num_prompts: int | None = None) -> Any:
        return self._with_size(super()._next_train_batch(num_prompts))

    def _with_size(self, prompts: Any) -> Any:
        """``prompts`` with the G of now, where G is ours to choose."""
        if self.owns_groups:
            size = torch.full((len(prompts),), int(self.config.actor_rollout_ref.rollout.n))
            # Tensors, since verl leaves other values out of what it keeps to send a prompt again after a resume.
            prompts["__rollout_n__"], prompts[GROUP_SIZE] = size, size.clone()
        return prompts

    def _begin_step(self) -> int:
        """Sets G everywhere and returns the step's prompt groups, by the controller's budget or verl's batch size."""
        prompts = self._usual_prompts = int(self.config.data.train_batch_size)
        if not self.owns_groups:
            return prompts
        self.config.actor_rollout_ref.rollout.n = checked_size(self.controller, f"step {self.global_steps}")
        budget = prompts * self.controller.largest()  # data.train_batch_size is the prompts of the largest G
        return checked_prompts(self.controller, budget, self._prompts_multiple())

    def _prompts_multiple(self) -> int:
        """What the number of prompts is a multiple of, so that the step's rows fill its updates and ranks evenly."""
        if self.arranged.mode == "periodic":
            return 1
        wanted, size = self._updates() * self._ranks(), int(self.config.actor_rollout_ref.rollout.n)
        return wanted // math.gcd(wanted, size)

    def _updates(self) -> int:
        """Optimiser steps an epoch of a batch, whatever G is: as many as verl makes at the largest G."""
        if self.arranged.mode == "bounded":
            return 1  # of each part between two publications
        config = self.config
        return max(1, self._usual_prompts // int(config.actor_rollout_ref.actor.ppo_mini_batch_size))

    def _ranks(self) -> int:
        group = self.actor_rollout_wg
        if "actor" not in group._dispatch_info:
            group._dispatch_info["actor"] = group._query_dispatch_info("actor")
        return int(max(group._dispatch_info["actor"])) + 1

    def _observe(self, batch: Any, metrics: dict[str, Any], bubble: float | None) -> None:
        if not self.owns_groups:
            return
        stats = step_stats(batch, int(self.global_steps), self.config, bubble)
        found = checked_metrics(self.controller, stats)
        metrics.update({f"metronome/group_controller/{name}": value for name, value in found.items()})
        metrics["metronome/group_controller/size"] = int(self.config.actor_rollout_ref.rollout.n)
        print(f"metronome: {explained(self.controller)}", flush=True)

    def _throughput(self, batch: Any, metrics: dict[str, Any], seconds: float) -> None:
        """TPSPD: trained tokens (those of responses, tools left out) a second and device."""
        tokens = sum(int(tag["response_len"]) for tag in batch.tags if not tag.get("is_padding", False))
        metrics["metronome/tpspd"] = tokens / seconds / self._get_n_gpus_for_throughput()

    # --- batches ------------------------------------------------------------------------------------

    def _balance_batch(self, batch: Any, metrics: Any, logging_prefix: str = "global_seqlen", **options: Any) -> Any:
        """verl's balancing, then groups put together again where attention shares their prompts.

        Where G is ours, rows may be of several G: mini-batches are cut by the rows that came, not by the G of now.
        """
        ranks = self._ranks()
        if self.arranged.mode != "periodic":
            actor, size = self.config.actor_rollout_ref.actor, int(self.config.actor_rollout_ref.rollout.n)
            check_mini_batch(int(actor.ppo_mini_batch_size), size, ranks)
            if self.owns_groups:
                share = -(-len(batch.keys) // (self._updates() * ranks))
                self._mini_batch = share * ranks
        batch = super()._balance_batch(batch, metrics, logging_prefix, **options)
        if self.arranged.selection.attention.shares_prompt:
            uids = [key.split("_")[0] for key in batch.keys]
            lengths = [(int(tag["prompt_len"]), int(tag["response_len"])) for tag in batch.tags]
            batch.reorder(group_order(uids, [p for p, _ in lengths], [r for _, r in lengths], ranks))
        return batch

    _mini_batch, _usual_prompts = 0, 1
    """Rows of a mini-batch of the batch in training where G is ours, and ``data.train_batch_size`` as it was set."""

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        return self._mini_batch if self._mini_batch else super()._get_required_batch_multiple(dp_size)

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        check_rows(batch.keys, str(self.config.algorithm.adv_estimator))
        return super()._compute_advantage(batch, metrics)

    def _tell_worker(self, batch: Any) -> None:
        """What our loss asks the batch: the version in training, whose old log-probs these are, how far a cycle is."""
        bypassed = self.config.algorithm.rollout_correction.bypass_mode
        batch.extra_info["metronome_version"] = int(self.global_steps) - 1
        batch.extra_info["metronome_old_log_probs"] = "behavior" if bypassed else "trainer"
        progress = (self.local_trigger_step, self.parameter_sync_step)
        batch.extra_info["metronome_progress"] = progress if self.arranged.mode == "bounded" else (0, 1)

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        self._tell_worker(batch)
        found: dict[str, Any] = {}
        with self._rows_of_mini_batches():
            batch = super()._update_actor(batch, found)
        metrics.update(named(found))
        return batch

    @contextmanager
    def _rows_of_mini_batches(self) -> Iterator[None]:
        """verl takes mini-batches of ``ppo_mini_batch_size`` prompts times one G: here of the rows that came."""
        actor, rollout = self.config.actor_rollout_ref.actor, self.config.actor_rollout_ref.rollout
        kept = actor.ppo_mini_batch_size, rollout.n
        if self._mini_batch:
            actor.ppo_mini_batch_size, rollout.n = self._mini_batch, 1
        try:
            yield
        finally:
            actor.ppo_mini_batch_size, rollout.n = kept

    # --- proof of life ------------------------------------------------------------------------------

    def _prove_life(self, metrics: dict[str, Any]) -> None:
        """Stops the first step in which a hook that is set wasn't called, or the weights to publish haven't changed.

        Raises MetronomeError naming the hook, or the learning rate and the gradient's norm.
        """
        if self.config.trainer.critic_warmup > self.global_steps:
            return  # verl trains the critic alone
        check_change(metrics, f"step {self.global_steps}")
        wanted = []
        if "loss" in self.arranged.block:
            wanted.append("loss")
        if self.arranged.selection.attention.shares_prompt:
            wanted.append("attention")
        for hook in wanted:
            calls = metrics.get(f"metronome/{hook}/calls", 0)
            if not calls:
                raise MetronomeError(
                    f"metronome.{hook} is set and wasn't called in this step",
                    found=f"metronome/{hook}/calls = {calls}",
                    where="verl worker",
                    remedy=f"leave metronome.{hook} out, or report the versions that metronome doctor prints",
                )
        fed, separate = (metrics.get(f"metronome/attention/tokens_{name}") for name in ("fed", "separate"))
        if fed and fed == separate:
            print("metronome: no prompt was shared in this step: each micro-batch had one row of a group", flush=True)

    # --- state --------------------------------------------------------------------------------------

    def _save_checkpoint(self) -> None:
        folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"
        mine = state.of(self)
        state.write(folder, mine)  # ours first: verl's ends by naming the checkpoint as the one to resume from
        super()._save_checkpoint()
        state.tell_unsaved(folder, len(mine["in_flight"]))

    def _load_checkpoint(self) -> None:
        mine = state.take(self)
        super()._load_checkpoint()
        if mine is not None:
            state.settle(self, mine)


class SynchronousTrainer(MetronomeTrainer, PPOTrainerSync):
    """verl's colocated trainer: generation and training take turns on the same devices."""

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, Any]) -> Any:
        """One batch, with the controller's G and number of prompts."""
        started = time.perf_counter()
        self.config.data.train_batch_size = self._begin_step()
        try:
            batch = super().step(metrics, timing_raw)
        finally:
            self.config.data.train_batch_size = self._usual_prompts
        seconds = time.perf_counter() - started
        self._prove_life(metrics)
        self._throughput(batch, metrics, seconds)
        self._observe(batch, metrics, None)
        return batch


def _classes() -> dict[str, type[MetronomeTrainer]]:
    from metronome_verl.bounded import BoundedTrainer
    from metronome_verl.periodic import PeriodicTrainer

    return {"synchronous": SynchronousTrainer, "periodic": PeriodicTrainer, "bounded": BoundedTrainer}
