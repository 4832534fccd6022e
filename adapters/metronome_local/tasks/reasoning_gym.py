"""Any data set of reasoning-gym by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from metronome.errors import ConfigurationError, nearest
from metronome_local.recipe import ReasoningGym
from metronome_local.rollouts import Prompt
from metronome_local.tasks.chat import chat, encode


class ReasoningGymTask:
    """A reasoning-gym data set; its generator makes the prompts and its scorer the rewards."""

    _CHUNK = 512

    def __init__(self, settings: ReasoningGym, tokenizer: Any, seed: int) -> None:
        import warnings

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # one of its dependencies has invalid escapes
                import reasoning_gym
                from reasoning_gym.factory import DATASETS
        except ImportError:
            raise ConfigurationError(
                "this task needs reasoning-gym",
                found=settings.name,
                where="task.name",
                remedy='pip install "metronome-rl[reasoning-gym]"',
            ) from None
        if settings.name not in DATASETS:
            raise ConfigurationError(
                "reasoning-gym has no such task",
                found=settings.name,
                where="task.name",
                remedy=nearest(settings.name, DATASETS),
            )
        self.settings, self.tokenizer, self.seed = settings, tokenizer, seed
        self._create = reasoning_gym.create_dataset
        self._chunks: dict[int, Any] = {}
        entries = self._dataset(0, settings.shots + settings.held_out)
        self._held = [entries[settings.shots + i] for i in range(settings.held_out)]
        self._held_questions = {entry["question"] for entry in self._held}
        self._examples = [
            (settings.instruction + entry["question"], str(entry["answer"]))
            for entry in (entries[i] for i in range(settings.shots))
            if entry["question"] not in self._held_questions  # tasks with few questions repeat them
        ]

    def _dataset(self, seed: int, size: int) -> Any:
        try:
            return self._create(self.settings.name, size=size, seed=seed, **self.settings.config)
        except (TypeError, ValueError, AssertionError) as error:
            raise ConfigurationError(
                f"reasoning-gym refuses this configuration: {error}",
                found=self.settings.config,
                where="task.config",
                remedy=f"see the options of {self.settings.name}",
            ) from error

    def _prompt(self, index: int, entry: Any) -> Prompt:
        messages = chat(self.settings.instruction + entry["question"], self._examples)
        return Prompt(index, encode(self.tokenizer, messages), messages, {"entry": entry})

    def prompt(self, index: int) -> Prompt:
        """Entry ``index`` of an endless list; a question of the held-out set is replaced by the next one."""
        for offset in range(1000):
            chunk, place = divmod(index + offset * 7919, self._CHUNK)
            if chunk not in self._chunks:
                self._chunks = {chunk: self._dataset(1 + self.seed * 1_000_003 + chunk, self._CHUNK)}
            entry = self._chunks[chunk][place]
            if entry["question"] not in self._held_questions:
                return self._prompt(index, entry)
        raise ConfigurationError(
            "nearly every question of this task is held out",
            found=self.settings.name,
            where="task.held_out",
            remedy="a smaller held_out, or a task with more questions",
        )

    def held_out(self) -> list[Prompt]:
        """The held-out entries."""
        return [self._prompt(-1 - i, entry) for i, entry in enumerate(self._held)]

    def _score(self, prompt: Prompt, text: str) -> float:
        dataset = next(iter(self._chunks.values()), None) or self._dataset(0, 1)
        try:
            return float(dataset.score_answer(answer=text.strip(), entry=prompt.columns["entry"]))
        except Exception:  # some of its scorers raise on text that they can't parse: a wrong answer
            return 0.0

    def rewards(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[float]:
        """reasoning-gym's own score of the whole text, 0..1; 0 where its scorer can't parse the text."""
        return [self._score(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]

    def accuracy(self, prompt: Prompt, text: str, reward: float) -> float:
        """1.0 if reasoning-gym gave the full score."""
        return float(reward >= 1.0)
