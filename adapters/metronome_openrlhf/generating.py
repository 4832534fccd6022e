"""OpenRLHF's generator of its asynchronous trainer, which generates again what the trainer found too stale."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from queue import Empty
from typing import Any

import ray
from openrlhf.trainer import ppo_trainer_async as host

from metronome_openrlhf import experience
from metronome_openrlhf.config import part_of
from metronome_openrlhf.samples import MetronomeSamples

_Generating: Any = host.GenerateSamplesActor.__ray_metadata__.modified_class

DONE = "done"  # the generator's last word, as in OpenRLHF
DRAINED = "drained"  # its question, when the data are at their end: has something to be generated again?


@dataclass
class Prompt:
    """What is generated again: a line of OpenRLHF's data, under a number of its own."""

    number: int
    prompt: str
    label: Any
    image: Any = None

    def line(self) -> tuple[list[str], list[str], list[Any], list[Any]]:
        """As OpenRLHF's data loader gives it."""
        return ["again"], [self.prompt], [self.label], [self.image]


@dataclass
class Batch:
    """What the generator puts into the queue.

    Attributes:
        rows: single rows, those of a group next to each other.
        states: OpenRLHF's position in the data behind it; None when the data had come to their end.
        rate: OpenRLHF's pass rate of the dynamic filter.
        seconds: of generation.
        served: numbers of the prompts that came back and are in it.
    """

    rows: list[Any]
    states: dict[str, Any] | None
    rate: float | None
    seconds: float
    served: list[int] = field(default_factory=list)


class MetronomeGenerator(_Generating):
    """OpenRLHF's ``GenerateSamplesActor``, which also generates again what comes back in the queue ``again``."""

    _eval_just_done: bool

    def __init__(self, pretrain: str, strategy: Any, vllm_engines: Any, *, again: Any, **named: Any) -> None:
        experience.install()
        super().__init__(pretrain, strategy, vllm_engines, **named)
        own = self.samples_generator
        self.samples_generator: Any = MetronomeSamples(
            own.strategy, own.prompts_dataloader, own.eval_dataloader, own.tokenizer, own.vllm_engines
        )
        self.samples_generator.part = part_of(strategy.args)
        self.again = again

    def fit(self, episode: int, total_consumed_prompts: int) -> None:
        """As OpenRLHF's; after the data it goes on until nothing comes back."""
        self._consumed = total_consumed_prompts
        for number in range(episode, int(self.args.train.num_episodes)):
            data, exhausted = iter(self.prompts_dataloader), False
            while not exhausted:
                exhausted = self._batch(data, self._back(), number)
        self.rollout_queue.put(DRAINED, block=True)
        while (first := self.again.get(block=True)) is not None:
            self._batch(iter(()), [first, *self._back()], None)
            self.rollout_queue.put(DRAINED, block=True)
        self.rollout_queue.put(DONE, block=True)

    def _back(self) -> list[Prompt]:
        found: list[Prompt] = []
        while True:
            try:
                found.append(self.again.get(block=False))
            except Empty:
                return found

    def _batch(self, data: Iterator[Any], back: list[Prompt], episode: int | None) -> bool:
        """Puts one batch into the queue, when there is a place; returns whether the data came to their end."""
        while self._evaluated(global_step := self.rollout_slots.get(block=True)):
            pass
        prompts, rows, taken = int(self.args.rollout.batch_size), [], 0
        if episode is None:
            prompts = len(back)
        # More came back than a batch has: what is left over is the beginning of the next one.
        used, rest = back[:prompts], back[prompts:]
        for one in rest:
            self.again.put(one)
        started = time.monotonic()
        if not self._partial_rollout:
            ray.get(self.vllm_lock.acquire.remote())
        try:
            rows, taken, exhausted = self.samples_generator._generate_vllm(
                dataloader_iter=chain((one.line() for one in used), data),
                num_prompts=prompts,
                dynamic_filtering=self.args.algo.dynamic_filtering_enable,
                **self.generate_kwargs,
            )
        finally:
            if not self._partial_rollout:
                ray.get(self.vllm_lock.release.remote())
        self._consumed += taken - len(used)
        if not taken:
            self.rollout_slots.put(global_step, block=True)
            return bool(exhausted)
        states = None
        if episode is not None:
            states = {
                "episode": episode,
                "total_consumed_prompts": self._consumed,
                "data_loader_state_dict": self.prompts_dataloader.state_dict(),
            }
        rate = len(rows) / taken * 100 if self.args.algo.dynamic_filtering_enable else None
        served = [one.number for one in used]
        self.rollout_queue.put(Batch(rows, states, rate, time.monotonic() - started, served), block=True)
        return bool(exhausted)

    def _evaluated(self, global_step: int) -> bool:
        """OpenRLHF's evaluation, where it is due; its result takes the place in the queue, which is given back."""
        if self._eval_just_done or not self._should_eval(global_step):
            self._eval_just_done = False
            return False
        self._eval_just_done, self._last_eval_step = True, global_step
        ray.get(self.vllm_lock.acquire.remote())
        try:
            found = self._run_eval()
        finally:
            ray.get(self.vllm_lock.release.remote())
        self.rollout_queue.put(("eval", global_step, found), block=True)
        return True
