"""Sums with verifiable answers."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Sequence
from typing import Any

from metronome.errors import ConfigurationError
from metronome_local.recipe import Arithmetic
from metronome_local.rollouts import Prompt
from metronome_local.tasks.chat import chat, encode


class ArithmeticTask:
    """Sums with verifiable answers; a problem and its reorderings are held out together."""

    def __init__(self, settings: Arithmetic, tokenizer: Any, seed: int) -> None:
        self.settings, self.tokenizer, self.seed = settings, tokenizer, seed
        low, high = (1, 9) if settings.digits == 1 else (10 ** (settings.digits - 1), 10**settings.digits - 1)
        self._numbers = (low, high)
        rng = random.Random(f"held out {settings.digits} {settings.terms}")  # the same set for every seed
        problems = math.comb(high - low + settings.terms, settings.terms)
        most = problems // 2 if problems > 100 else problems - settings.shots - 2
        if settings.held_out > most:
            raise ConfigurationError(
                f"the task has too few problems ({problems}) for this held-out set",
                found=settings.held_out,
                where="task.held_out",
                remedy=f"at most {most}",
            )
        if (high - low + 1) ** settings.terms <= 10_000:
            every = list(itertools.combinations_with_replacement(range(low, high + 1), settings.terms))
            self._held = set(rng.sample(every, settings.held_out))
        else:
            self._held = set()
            while len(self._held) < settings.held_out:
                self._held.add(tuple(sorted(self._draw(rng))))
        examples = self._worked_examples(rng)
        self._examples = [(self._question(numbers), str(sum(numbers))) for numbers in examples]

    def _worked_examples(self, rng: random.Random) -> list[tuple[int, ...]]:
        """``shots`` problems outside the held-out set whose sums are spread over all sums, in mixed order."""
        low, high = (bound * self.settings.terms for bound in self._numbers)
        examples: list[tuple[int, ...]] = []
        for place in range(self.settings.shots):
            wanted = low + (high - low) * (place + 0.5) / self.settings.shots
            drawn = [self._draw(rng) for _ in range(64)]
            free = [n for n in drawn if tuple(sorted(n)) not in self._held and n not in examples]
            while not free:
                free = [n for n in [self._draw(rng)] if tuple(sorted(n)) not in self._held and n not in examples]
            examples.append(min(free, key=lambda numbers: abs(sum(numbers) - wanted)))
        rng.shuffle(examples)
        return examples

    def _draw(self, rng: random.Random) -> tuple[int, ...]:
        return tuple(rng.randint(*self._numbers) for _ in range(self.settings.terms))

    @staticmethod
    def _question(numbers: Sequence[int]) -> str:
        return " + ".join(map(str, numbers)) + " ="

    def _prompt(self, index: int, numbers: Sequence[int]) -> Prompt:
        messages = chat(self._question(numbers), self._examples)
        return Prompt(index, encode(self.tokenizer, messages), messages, {"answer": str(sum(numbers))})

    def prompt(self, index: int) -> Prompt:
        """A problem outside the held-out set, drawn by seed and index."""
        rng = random.Random(f"{self.seed} {index}")
        while True:
            numbers = self._draw(rng)
            if tuple(sorted(numbers)) not in self._held:
                return self._prompt(index, numbers)

    def held_out(self) -> list[Prompt]:
        """Every order of each held-out problem of two terms; one order for longer sums."""
        found: list[tuple[int, ...]] = []
        for numbers in sorted(self._held):
            found += sorted(set(itertools.permutations(numbers))) if len(numbers) == 2 else [numbers]
        return [self._prompt(-1 - i, numbers) for i, numbers in enumerate(found)]

    def rewards(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[float]:
        """1 if the whole text is the sum; ``shaped``: else .1 for a bare number and up to .4 more for closeness.

        The scale of closeness is a tenth of the answer, at least 6.
        """
        return [self._reward(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]

    def _reward(self, prompt: Prompt, text: str) -> float:
        if text.strip() == prompt.columns["answer"]:
            return 1.0
        if self.settings.reward == "exact" or not re.fullmatch(r"\d{1,12}", text.strip()):
            return 0.0
        answer = int(prompt.columns["answer"])
        return 0.1 + 0.4 * max(0.0, 1 - abs(int(text.strip()) - answer) / max(6.0, answer / 10))

    def accuracy(self, prompt: Prompt, text: str, reward: float) -> float:
        """1.0 if the whole text is the sum."""
        return float(text.strip() == prompt.columns["answer"])
