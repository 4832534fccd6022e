"""Groups from OpenRLHF's rollout engines as they finish, and the version of the weights behind every token."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
from openrlhf.trainer.ppo_utils import samples_generator as host
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator

from metronome.contracts import GroupStats
from metronome.errors import VersionMismatch, WaitTimeout
from metronome_openrlhf.experience import versioned
from metronome_openrlhf.spans import SPANS

_SILENCE = 1800.0  # seconds without a finished group before the wait is given up
_SAY = 60.0  # seconds between two lines that say what is awaited


class MetronomeSamples(SamplesGenerator):
    """OpenRLHF's generator, with versions per token, and in periodic mode batches that are still being generated.

    Attributes:
        part: set by the trainer that owns this generator.
        begin: called before prompts are drawn for a batch; chooses G.
        multiple: rows that a batch which isn't streamed is a multiple of; 1 for any number.
        stats: of every group of the last batch, kept or filtered, where it isn't streamed.
        uncounted: prompts of the last streamed batch that OpenRLHF wasn't told of yet.
    """

    part: Any
    begin: Callable[[], None] | None = None
    multiple: int = 1
    uncounted: int = 0

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.stats: list[GroupStats] = []
        self._evaluates = False

    def generate_samples(self, **generate_kwargs: Any) -> Any:
        """OpenRLHF's; in periodic mode the samples are ``Arriving``, whose first group has finished."""
        if self.begin is not None:
            self.begin()
        if self.part.mode != "periodic":
            rows, rate, drawn, exhausted = super().generate_samples(**generate_kwargs)
            return self._whole(rows), rate, drawn, exhausted
        if getattr(self, "_dataloader_iter", None) is None:
            self._dataloader_iter = iter(self.prompts_dataloader)
        arriving = Arriving(self, self._dataloader_iter, generate_kwargs)
        arriving.draw(int(self.args.rollout.batch_size))
        arriving.begin()
        if arriving.exhausted:
            self._dataloader_iter = None
        arriving.told = arriving.drawn
        drawn = arriving.drawn + self.uncounted
        self.uncounted = 0
        return (arriving if arriving.has_more else None), None, drawn, arriving.exhausted

    def generate_eval_samples(self, **generate_kwargs: Any) -> Any:
        """OpenRLHF's; a group controller isn't told of these groups."""
        self._evaluates = True
        try:
            return super().generate_eval_samples(**generate_kwargs)
        finally:
            self._evaluates = False

    def _generate_vllm(
        self, dataloader_iter: Any, num_prompts: int, dynamic_filtering: Any, **generate_kwargs: Any
    ) -> Any:
        if self._evaluates or not self.part.owns_groups:
            return super()._generate_vllm(dataloader_iter, num_prompts, dynamic_filtering, **generate_kwargs)
        arriving = Arriving(self, dataloader_iter, generate_kwargs)
        arriving.draw(num_prompts)
        rows = []
        while groups := arriving.part():
            rows += [row for group in groups for row in group]
        self.stats = arriving.stats
        return rows, arriving.drawn, arriving.exhausted

    def _whole(self, rows: list[Any]) -> list[Any]:
        """The rows without those that would half fill an accumulation window, at the end of the data."""
        surplus = len(rows) % self.multiple
        if surplus:
            print(f"metronome: leaves out {surplus} rows at the end of the data", flush=True)
        return rows[: len(rows) - surplus]

    def _process_response_into_experience(self, response: dict[str, Any], **generate_kwargs: Any) -> Any:
        plain = super()._process_response_into_experience(response, **generate_kwargs)
        return versioned(plain, token_versions(response, plain.action_mask))


@dataclass
class Arriving:
    """A batch that was dispatched whole and is taken group by group.

    Attributes:
        generator: dispatches prompts and reads responses.
        prompts: OpenRLHF's data, also for groups that replace filtered ones.
        generate_kwargs: as in OpenRLHF.
        stats: of every group that has finished, kept or filtered.
        started: when it was dispatched, in seconds of the monotonic clock.
        waited: seconds in which there was nothing to train.
        drawn: prompts taken from the data.
        told: how many of them OpenRLHF was told of.
        kept: rows that passed the dynamic filter.
        exhausted: whether the data came to its end.
    """

    generator: MetronomeSamples
    prompts: Any
    generate_kwargs: dict[str, Any]
    stats: list[GroupStats] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    waited: float = 0.0
    drawn: int = 0
    told: int = 0
    kept: int = 0
    exhausted: bool = False
    _pending: dict[Any, float] = field(default_factory=dict)
    _first: list[list[Any]] = field(default_factory=list)

    def draw(self, count: int) -> int:
        """Sends up to ``count`` more prompts to the engines; returns how many the data had."""
        if self.exhausted:
            return 0
        prompts, labels, images, self.exhausted = host._collect_prompt_batch(self.prompts, count)
        if prompts:
            now = time.monotonic()
            sent = self.generator._dispatch_prompts_to_vllm(prompts, labels, images=images, **self.generate_kwargs)
            self._pending |= dict.fromkeys(sent, now)
            self.drawn += len(prompts)
        return len(prompts)

    def begin(self) -> None:
        """Waits for the first group: a batch of which the filter keeps nothing is known before it is trained."""
        self._first = self.part()

    @property
    def has_more(self) -> bool:
        """Whether there is a group to train."""
        return bool(self._first or self._pending)

    def part(self) -> list[list[Any]]:
        """The groups that have finished since the last call, at least one; none when the batch is over.

        Raises WaitTimeout after half an hour of silence; an engine's own error goes through.
        """
        if self._first:
            groups, self._first = self._first, []
            return groups
        started = time.monotonic()
        try:
            while self._pending:
                groups = [group for ref in self._finished() if (group := self._group(ref))]
                if groups:
                    return groups
            return []
        finally:
            self.waited += time.monotonic() - started

    def _finished(self) -> list[Any]:
        silent = 0.0
        while True:
            ready, _ = ray.wait(list(self._pending), num_returns=1, timeout=_SAY)
            if ready:
                also, _ = ray.wait(list(self._pending), num_returns=len(self._pending), timeout=0)
                return [*ready, *(one for one in also if one not in ready)]
            silent += _SAY
            print(f"metronome: waits for {len(self._pending)} groups, none finished for {silent:.0f} s", flush=True)
            if silent >= _SILENCE:
                raise WaitTimeout(
                    "no group has finished for half an hour",
                    found=f"{len(self._pending)} groups running",
                    where="OpenRLHF's rollout engines",
                    remedy="look at the engines' logs; --rollout.max_new_tokens bounds a group's time",
                )

    def _group(self, ref: Any) -> list[Any]:
        """The group, or nothing if the dynamic filter replaced it."""
        sent = self._pending.pop(ref)
        generator = self.generator
        group = [
            generator._process_response_into_experience(response, **self.generate_kwargs) for response in ray.get(ref)
        ]
        self.stats.append(_stats(group, sent, time.monotonic()))
        if self._passes(group):
            self.kept += len(group)
            return group
        self.draw(1)
        return []

    def _passes(self, group: list[Any]) -> bool:
        algo = self.generator.args.algo
        if not algo.dynamic_filtering_enable or any(one.scores is None for one in group):
            return True
        mean = sum(float(one.scores[0]) for one in group) / len(group)
        low, high = algo.dynamic_filtering_range
        return bool(low < mean < high)


def token_versions(response: dict[str, Any], action_mask: torch.Tensor) -> torch.Tensor | None:
    """``(1, A)`` version of each action token, from the response's spans; None where the engine stamped none.

    Raises VersionMismatch if the spans cover fewer tokens than were generated.
    """
    spans = response.get(SPANS)
    if spans is None:
        return None
    mask = action_mask.bool()
    sampled = torch.tensor([version for version, _ in spans], dtype=torch.long).repeat_interleave(
        torch.tensor([tokens for _, tokens in spans], dtype=torch.long)
    )
    count = int(mask.sum())
    if len(sampled) < count:
        raise VersionMismatch(
            "the recorded segments cover fewer tokens than were generated",
            found=f"{spans} for {count} tokens",
            where=SPANS,
            remedy="generate every turn through the engine that the executor was given",
        )
    versions = torch.full(mask.shape, -1, dtype=torch.long)
    versions[mask] = sampled[:count]
    return versions


def _stats(group: list[Any], start: float, end: float) -> GroupStats:
    return GroupStats(
        size=len(group),
        lengths=[int(one.response_length[0]) for one in group],
        truncated=[bool(one.truncated[0]) for one in group],
        rewards=[float(one.rewards[0]) if one.rewards is not None else 0.0 for one in group],
        start=start,
        end=end,
    )
