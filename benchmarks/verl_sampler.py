"""verl's own replay buffers that note when each group was seen finished, and look more often in every second step.

verl loads them by path (``trainer.v1.sampler.custom_sampler``); used by benchmarks/verl_periodic.py only.
"""

import json
import time

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

SHORT = 0.02  # seconds between two looks in even steps; in odd ones verl's own (2 s)
MARK = "groups-arrived "


class _Noting:
    def sample(self, global_steps, partition_id, batch_size):
        own, self._begun, self._seen = self.poll_interval, time.perf_counter(), {}
        if global_steps % 2 == 0:
            self.poll_interval = SHORT
        try:
            found = super().sample(global_steps, partition_id, batch_size)
        finally:
            self.poll_interval = own
        print(MARK + json.dumps({"step": global_steps, "seconds": sorted(self._seen.values())}), flush=True)
        return found

    def _sync_metadata_from_transfer_queue(self):
        super()._sync_metadata_from_transfer_queue()
        now = time.perf_counter() - self._begun
        for uid in self.finished_keys["train"]:
            self._seen.setdefault(uid, now)


class Colocated(_Noting, ReplayBuffer):
    """For ``trainer.v1.trainer_mode=sync``."""


class Separate(_Noting, ReplayBufferAsync):
    """For ``trainer.v1.trainer_mode=separate_async``."""
