"""From a prompt to a scored group: the pool generates, one thread of its own scores."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="metronome-reward")

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
            try:
                scored.set_result(self.scorer.score(generated.result()))
            except BaseException as error:
                scored.set_exception(error)

        def done(_: Future[Group]) -> None:
            if generated.cancelled():
                scored.cancel()
            else:
                self._threads.submit(score)

        generated.add_done_callback(done)
        return scored

    def accuracy(self, prompts: Sequence[Prompt]) -> float:
        """Mean accuracy of one greedy answer to each prompt; raises WaitTimeout naming who is late."""
        futures = [self.generate(prompt, 1, greedy=True) for prompt in prompts]
        late = wait_for(futures, timeout=self._timeout).not_done
        if late:
            raise WaitTimeout(
                f"waited {self._timeout:g} s for {len(late)} of {len(futures)} held-out answers",
                found=self.pool.describe(),
                where="evaluation",
                remedy="raise machine.timeout, or lower evaluation.max_prompts",
            )
        groups = [future.result() for future in futures]
        return sum(self.task.accuracy(one.prompt, one.texts[0], one.rewards[0]) for one in groups) / len(groups)

    def close(self) -> None:
        """Ends the workers and the reward thread."""
        self.pool.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
