"""OpenRLHF's experience maker with true groups of any size, and without the forward pass that a loss doesn't need."""

from __future__ import annotations

from typing import Any

import ray
import torch
from openrlhf.trainer.ppo_utils import experience as host
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker

from metronome.errors import ConfigurationError, MetronomeError
from metronome_openrlhf.config import bypasses, part_of


class MetronomeMaker(RemoteExperienceMaker):
    """OpenRLHF's ``RemoteExperienceMaker``."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.part = part_of(self.args)

    def make_groups(self, groups: list[list[Any]]) -> list[list[Any]]:
        """Rows of each group with log-probs, KL and advantages; G of a group is the rows that it has."""
        usual = self.args.rollout.n_samples_per_prompt
        made: list[list[Any]] = [[] for _ in groups]
        for size in dict.fromkeys(len(group) for group in groups):
            places = [place for place, group in enumerate(groups) if len(group) == size]
            self.args.rollout.n_samples_per_prompt = size
            try:
                batches = self.make_experience_batch([row for place in places for row in groups[place]])
            finally:
                self.args.rollout.n_samples_per_prompt = usual
            rows = [row for batch in batches for row in _rows(batch)]
            for number, place in enumerate(places):
                made[place] = rows[number * size : (number + 1) * size]
        return made

    def make_experience_batch(self, rollout_samples: list[Any]) -> list[Any]:
        """OpenRLHF's.

        Raises MetronomeError for a sample without a reward that no reward model gives, and ConfigurationError for one
        without log-probs where our loss takes them for the old policy's.
        """
        missing = sum(row.rewards is None for row in rollout_samples)
        if missing and (missing < len(rollout_samples) or self.reward_model_group is None):
            raise MetronomeError(
                "samples came without a reward",
                found=f"{missing} of {len(rollout_samples)}",
                where="--train.agent_func_path" if self.args.train.agent_func_path else "--reward.remote_url",
                remedy="look for 'Failed to fetch reward' in the engines' logs: OpenRLHF writes there what was raised",
            )
        if self.bypasses and any(row.rollout_log_probs is None for row in rollout_samples):
            raise ConfigurationError(
                "a sample has no log-probs that the rollout engine sampled with, and our loss needs them",
                where="rollout_log_probs",
                remedy="an agent that returns rollout_log_probs, or leave --metronome.loss out",
            )
        found: list[Any] = super().make_experience_batch(rollout_samples)
        return found

    def make_experience(self, samples_list: list[Any]) -> list[Any]:
        """OpenRLHF's; where our loss takes the behaviour policy's log-probs, no forward pass of the actor runs."""
        self._samples = samples_list
        found: list[Any] = super().make_experience(samples_list)
        return found

    def _dispatch_forward(self, group: Any, sync_condition: bool, **kwargs: Any) -> Any:
        if group is self.actor_model_group and self.bypasses:
            known = [[one.rollout_log_probs * one.action_mask for one in self._samples]]
            copies = self.args.ds.ring_attn_size * self.args.ds.tensor_parallel_size
            return [ray.put(known[0])] * copies
        handles = group._actor_handlers
        count = len(next(iter(kwargs.values())))
        if count >= len(handles) // group.duplicate_actors:
            return super()._dispatch_forward(group, sync_condition, **kwargs)
        # Fewer batches than ranks, which OpenRLHF refuses: the first ranks take one each.
        refs = []
        for place in range(count):
            one = ray.put({key: value[place : place + 1] for key, value in kwargs.items()})
            first = place * group.duplicate_actors
            for handle in handles[first : first + group.duplicate_actors]:
                refs.append(handle.execute_batch.remote("forward", one, 0, 1))
        if sync_condition:
            ray.get(refs)
            ray.get(group.async_run_method(method_name="empty_cache"))
        return refs

    @property
    def bypasses(self) -> bool:
        """Whether the engines' log-probs stand for the old policy's: our loss, no proximal forward, no KL reward."""
        return bypasses(self.args, self.part)


def _rows(batch: Any) -> list[Any]:
    """Single rows of a batch, each again a batch of one, without padding."""
    rows = host.remove_padding_in_sequences(host.split_experience_batch(batch))
    for row in rows:
        for name, value in vars(row).items():
            if isinstance(value, torch.Tensor):
                setattr(row, name, value[None])
            elif isinstance(value, dict):
                setattr(
                    row,
                    name,
                    {key: one[None] if isinstance(one, torch.Tensor) else [one] for key, one in value.items()},
                )
    return rows
