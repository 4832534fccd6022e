"""Bounded staleness in verl: its separate trainer, with our verdict on every group when it is to be trained."""

from __future__ import annotations

import time
from typing import Any

import transfer_queue as tq
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.utils import tensordict_utils as tu

from metronome.contracts import RolloutSource, Verdict
from metronome_verl.needs import fixed_prompts_only
from metronome_verl.publication import OneVersionClient, finished, make_door
from metronome_verl.trainer import MetronomeTrainer
from metronome_verl.versions import SpanRecordingClient


class VerdictBuffer(ReplayBufferAsync):
    """verl's buffer, in which the rollout source says which finished groups are too stale.

    verl gives up their prompts and draws others; here they are kept for ``BoundedTrainer``, which sends them out again.
    """

    rollout_source: RolloutSource
    again: Any = None

    def _stale_terminal_keys(self, global_steps: int, partition_id: str) -> set[str]:
        if partition_id == "val":
            return set()
        oldest: dict[str, list[int]] = {}
        for key, tag in self.partitions[partition_id].items():
            version = tag.get("min_global_steps")
            oldest.setdefault(key.split("_")[0], []).append(-1 if version is None else int(version))
        return {
            uid
            for uid in self.finished_keys[partition_id]
            if self.rollout_source.verdict(oldest.get(uid, []), global_steps - 1) is Verdict.DROP
        }

    def _evict_terminal_groups(self, global_steps: int, partition_id: str, eviction_reasons: Any) -> Any:
        stale, filtered, failed, _ = eviction_reasons
        if kept := sorted(stale - filtered - failed):  # the others count as used, as in verl
            self.again = tq.kv_batch_get(keys=kept, partition_id=partition_id)
        return super()._evict_terminal_groups(global_steps, partition_id, eviction_reasons)


class BoundedTrainer(MetronomeTrainer, PPOTrainerSeparateAsync):
    """Groups are trained as they arrive, over publications; versions are recorded token by token."""

    def _build_replay_buffer(self) -> Any:
        buffer = super()._build_replay_buffer()
        buffer.__class__ = VerdictBuffer
        buffer.rollout_source = self.arranged.selection.rollout_source
        buffer.poll_interval = 0.05
        buffer.refill_fn = self._replace
        return buffer

    def _replace(self, count: int) -> None:
        """``count`` groups for as many evicted ones: the prompts of stale groups again, new prompts for the rest.

        They begin with the weights of now, so that they can't be stale while the trainer waits for them; with G of now.
        """
        again, self.replay_buffer.again = self.replay_buffer.again, None
        if again is not None:
            tu.assign_non_tensor_data(again, "global_steps", int(self.global_steps))
            count -= self._submit_batch_to_rollout(self._with_size(again))
        if count:
            self._add_prompts_to_generate(count)

    # --- publication: metronome.in_flight ---------------------------------------------------------

    _door: Any = None

    def get_llm_client(self) -> Any:
        """A client that records which version sampled which tokens, and treats aborted requests as chosen."""
        manager, in_flight = self.standalone_server_manager, self.arranged.in_flight
        if in_flight == "resume":
            return manager.get_client(client_cls=SpanRecordingClient)
        if in_flight == "finish":
            self._door = make_door()
        return manager.get_client(client_cls=OneVersionClient, door=self._door)

    def on_step_end(self) -> None:
        """verl's publication; with ``finish``, once the running requests have ended."""
        if self._door is None:
            super().on_step_end()
            return
        with finished(self._door, int(self.global_steps)) as waited:
            super().on_step_end()
        self._pending_sync_metrics["metronome/publication/seconds_waiting"] = waited

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, Any]) -> Any:
        """verl's step, with G and proof of life.

        Raises ConfigurationError for a controller that changes the number of prompts: verl's separate trainer has
        batches in flight, all of one size.
        """
        prompts, usual = self._begin_step(), int(self.config.data.train_batch_size)
        if prompts != usual:
            raise fixed_prompts_only(f"{prompts} prompts instead of {usual}")
        started = time.perf_counter()
        batch = super().step(metrics, timing_raw)
        seconds = time.perf_counter() - started
        self._prove_life(metrics)
        self._throughput(batch, metrics, seconds)
        self._observe(batch, metrics, None)
        return batch
