"""Periodic asynchrony in verl: a batch's groups are trained as they finish, one step and one publication a batch.

verl's separate trainer already generates in a pool of its own and trains parts of a batch; here the batch is
submitted at the step's start and nothing before it, each part is whatever has finished, gradients add up without a
step, and the sum is rescaled once to that of one batch (arXiv 2511.18871).
"""

from __future__ import annotations

from typing import Any

from omegaconf import open_dict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.utils import MetricsAggregator
from verl.utils import tensordict_utils as tu
from verl.utils.debug import marked_timer
from verl.utils.metric import reduce_metrics
from verl.utils.py_functional import rename_dict

from metronome_verl.checks import check_versions, named
from metronome_verl.own import OwnTime
from metronome_verl.samples import wait_for_groups
from metronome_verl.trainer import MetronomeTrainer


class PeriodicTrainer(MetronomeTrainer, PPOTrainerSeparateAsync):
    """One policy and one optimiser step a period, so that the gradient is the synchronous one."""

    _own: OwnTime

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        with open_dict(self.config):  # verl counts a step a part; a period has one
            self.config.actor_rollout_ref.actor.optim.total_training_steps = self.total_training_steps

    def on_train_begin(self) -> None:
        """No batch goes out before the first step: every sample is of the version that it trains."""

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        return dp_size  # a part is any number of groups; ranks only have to get equally many rows

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        return PPOTrainer._compute_old_log_prob(self, batch, metrics)  # weights stand still within a period

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, Any]) -> Any:
        """Submits the batch, trains groups as they finish, steps once."""
        self._own = own = OwnTime()
        prompts = self._begin_step()
        with own.elsewhere():
            self._submit_batch_to_rollout(self._next_train_batch(prompts))
        self.local_trigger_step = 0
        aggregator, keys, tags = MetricsAggregator(), [], []
        remaining, waited = prompts, 0.0
        self._passes = 0
        while remaining:
            before = own.elapsed
            with own.elsewhere():
                ready, evicted, late = wait_for_groups(self.replay_buffer, int(self.global_steps), remaining)
            own.late += late
            waited += own.elapsed - before
            aggregator.add_step_metrics(evicted)  # apart: verl's own look below would write over these counts
            part: dict[str, Any] = {}
            with own.elsewhere():
                batch = self._step_once(part, timing_raw, ready)
            check_versions(batch.tags, int(self.global_steps) - 1, "trainer.v1, periodic")
            aggregator.add_step_metrics(part, sample_count=sum(not tag.get("is_padding", False) for tag in batch.tags))
            keys += batch.keys
            tags += batch.tags
            remaining -= ready
        metrics.update(aggregator.get_aggregated_metrics())
        with own.elsewhere(), marked_timer("optimizer_step", timing_raw):
            rows = sum(not tag.get("is_padding", False) for tag in tags)
            stepped = self.actor_rollout_wg.metronome_step(rows=rows)[0]
        metrics.update(named({f"actor/{name}": value for name, value in stepped.items()}))
        whole = KVBatchMeta(partition_id="train", keys=keys, tags=tags)
        elapsed = own.elapsed
        metrics["metronome/periodic/parts"] = self._passes
        metrics["metronome/periodic/seconds_waiting"] = waited
        metrics["metronome/periodic/idle"] = waited / elapsed
        metrics["metronome/tpspd"] = stepped["metronome/trained/tokens"] / elapsed / self._get_n_gpus_for_throughput()
        self._prove_life(metrics)
        self._observe(whole, metrics, waited / elapsed)
        metrics["metronome/periodic/seconds_late"] = own.late
        metrics["metronome/periodic/overhead"] = own.seconds / own.elapsed
        return whole

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Forward and backward of one part; the gradient stays."""
        rollout, actor = self.config.actor_rollout_ref.rollout, self.config.actor_rollout_ref.actor
        with self._own.here():
            batch.extra_info.update(
                {
                    "calculate_entropy": actor.calculate_entropy or actor.entropy_coeff != 0.0,
                    "distillation_use_topk": False,
                    "distillation_only": False,
                    "global_batch_size": int(self.config.data.train_batch_size) * int(rollout.n),
                    "temperature": rollout.temperature,
                }
            )
            self._tell_worker(batch)
        output = self.actor_rollout_wg.metronome_accumulate(batch)
        with self._own.here():
            found = rename_dict(tu.get(output, "metrics"), "actor/")
            found.pop("actor/mfu", None)
            metrics.update(named(reduce_metrics(found)))
        self._passes += 1
        return batch
