"""From a prompt to a scored group: the pool generates, one thread of its own scores."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for

from metronome.errors import ConfigurationError, WaitTimeout
from metronome_local.pool import RolloutPool
from metronome_local.rollouts import Group, Prompt
from metronome_local.scoring import Scorer
from metronome_local.tasks import Task


class Rollouts:
    """Prompts by index, scored groups as futures, greedy answers."""

    def __init__(self, task: Task, scorer: Scorer, pool: RolloutPool, max_prompt_tokens: int, timeout: float) -> None:
        self.task, self.scorer, self.pool = task, scorer, pool
        self._limit, self._timeout = max_prompt_tokens, timeout
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._unscored = 0
        # A daemon: a reward function that hangs must not keep the process from ending.
        threading.Thread(target=self._score_forever, name="metronome-reward", daemon=True).start()

    def prompt_at(self, index: int) -> Prompt:
        """The task's prompt; raises ConfigurationError if it is empty or longer than the limit."""
        prompt = self.task.prompt(index)
        if not 0 < len(prompt.ids) <= self._limit:
            raise ConfigurationError(
                f"prompt {index} is empty or has more tokens than the limit",
                found=len(prompt.ids),
                where="sampling.max_prompt_tokens",
                remedy=f"raise the limit of {self._limit}, or change the prompt",
            )
        return prompt

    def generate(self, prompt: Prompt, size: int, greedy: bool = False) -> Future[Group]:
        """A future of the scored group; scoring doesn't hold up whoever completes the generation."""
        generated = self.pool.generate(prompt, size, greedy)
        scored: Future[Group] = Future()

        def score() -> None:
            if scored.set_running_or_notify_cancel():  # else the stream was closed meanwhile
                try:
                    scored.set_result(self.scorer.score(generated.result()))
                except BaseException as error:
                    scored.set_exception(error)
            self._unscored -= 1

        def done(_: Future[Group]) -> None:
            if generated.cancelled():
                scored.cancel()
            else:
                self._unscored += 1
                self._waiting.put(score)

        generated.add_done_callback(done)
        return scored

    def accuracy(self, prompts: Sequence[Prompt]) -> float:
        """Mean accuracy of one greedy answer to each prompt; raises WaitTimeout naming who is late."""
        futures = [self.generate(prompt, 1, greedy=True) for prompt in prompts]
        late = wait_for(futures, timeout=self._timeout).not_done
        if late:
            raise WaitTimeout(
                f"waited {self._timeout:g} s for {len(late)} of {len(futures)} held-out answers",
                found=self.describe(),
                where="evaluation",
                remedy="raise machine.timeout, or lower evaluation.max_prompts",
            )
        groups = [future.result() for future in futures]
        return sum(self.task.accuracy(one.prompt, one.texts[0], one.rewards[0]) for one in groups) / len(groups)

    def close(self) -> None:
        """Ends the workers, and the reward thread unless a function hangs."""
        self.pool.close()
        self._waiting.put(None)

    def describe(self) -> str:
        """What the workers and the reward function do, for messages and the progress line."""
        scoring = f"; {self._unscored} groups wait for the reward function" if self._unscored else ""
        return self.pool.describe() + scoring

    def _score_forever(self) -> None:
        while (score := self._waiting.get()) is not None:
            score()
