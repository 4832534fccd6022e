"""Bounded staleness in verl: its separate trainer, with our verdict on every group when it is to be trained."""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync

from metronome.contracts import RolloutSource, Verdict
from metronome_verl.config import fixed_prompts_only
from metronome_verl.trainer import MetronomeTrainer
from metronome_verl.versions import SpanRecordingClient


class VerdictBuffer(ReplayBufferAsync):
    """verl's buffer, in which the rollout source says which finished groups are too stale; they are replaced."""

    rollout_source: RolloutSource

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


class BoundedTrainer(MetronomeTrainer, PPOTrainerSeparateAsync):
    """Groups are trained as they arrive, over publications; versions are recorded token by token."""

    def _build_replay_buffer(self) -> Any:
        buffer = super()._build_replay_buffer()
        buffer.__class__ = VerdictBuffer
        buffer.max_off_policy_threshold = None  # one owner of admission: the verdict above
        buffer.rollout_source = self.arranged.selection.rollout_source
        buffer.poll_interval = 0.05
        return buffer

    def get_llm_client(self) -> Any:
        """A client that records which version sampled which tokens."""
        return self.standalone_server_manager.get_client(client_cls=SpanRecordingClient)

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, Any]) -> Any:
        """verl's step, with G and proof of life.

        Raises ConfigurationError for a controller that changes the number of prompts: verl's separate trainer has
        batches in flight, all of one size.
        """
        prompts, usual = self._begin_step(), int(self.config.data.train_batch_size)
        if prompts != usual:
            raise fixed_prompts_only(f"{prompts} prompts instead of {usual}")
        batch = super().step(metrics, timing_raw)
        self._prove_life(metrics)
        self._observe(batch, metrics, None)
        return batch
