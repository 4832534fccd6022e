"""Tasks: prompts by a fixed index, rewards, and a held-out set that is never trained on."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from metronome.errors import ConfigurationError
from metronome_local.importing import from_folder, function_at
from metronome_local.recipe import Arithmetic, Dataset, ReasoningGym
from metronome_local.rollouts import Prompt

Messages = list[dict[str, str]]
_NO_SYSTEM = {"role": "system", "content": ""}  # keeps templates from adding a system message of their own


class Task(Protocol):
    """A source of prompts and the judge of completions."""

    def prompt(self, index: int) -> Prompt:
        """Training prompt ``index``; the same index always gives the same prompt."""

    def held_out(self) -> list[Prompt]:
        """The held-out prompts."""

    def rewards(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Any]:
        """One reward a completion."""

    def accuracy(self, prompt: Prompt, text: str, reward: float) -> float:
        """1.0 for an exactly right answer, 0.0 otherwise; ``reward`` where a task has no other notion of it."""


def load_task(settings: Arithmetic | ReasoningGym | Dataset, tokenizer: Any, seed: int, base: Path) -> Task:
    """The task that ``settings`` describe; relative paths start at ``base``."""
    if isinstance(settings, Arithmetic):
        return ArithmeticTask(settings, tokenizer, seed)
    if isinstance(settings, ReasoningGym):
        return ReasoningGymTask(settings, tokenizer, seed)
    return DatasetTask(settings, tokenizer, seed, base)


def encode(tokenizer: Any, content: str | Messages) -> tuple[int, ...]:
    """Token ids of a text, or of chat messages through the tokenizer's template with the answer's opening."""
    if isinstance(content, str):
        return tuple(tokenizer.encode(content))
    if tokenizer.chat_template is None:
        text = "".join(f"{message['content']}\n" for message in content if message["content"])
        return tuple(tokenizer.encode(text))
    try:
        text = tokenizer.apply_chat_template(content, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # templates refuse roles and orders each in its own way
        if content[0] == _NO_SYSTEM:
            return encode(tokenizer, content[1:])
        raise ConfigurationError(
            f"the tokenizer's chat template refuses these messages: {error}",
            found=[message["role"] for message in content],
            where="task",
            remedy="roles in the order that the model's template wants, or prompts as text",
        ) from error
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def _chat(question: str, examples: Sequence[tuple[str, str]], system: str | None = "") -> Messages:
    """A conversation with worked examples."""
    messages: Messages = [] if system is None else [{**_NO_SYSTEM, "content": system}]
    for asked, answered in [*examples, (question, "")]:
        messages.append({"role": "user", "content": asked})
        if answered:
            messages.append({"role": "assistant", "content": answered})
    return messages


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
        examples: list[tuple[int, ...]] = []
        while len(examples) < settings.shots:
            numbers = self._draw(rng)
            if tuple(sorted(numbers)) not in self._held and numbers not in examples:
                examples.append(numbers)
        self._examples = [(self._question(numbers), str(sum(numbers))) for numbers in examples]

    def _draw(self, rng: random.Random) -> tuple[int, ...]:
        return tuple(rng.randint(*self._numbers) for _ in range(self.settings.terms))

    @staticmethod
    def _question(numbers: Sequence[int]) -> str:
        return " + ".join(map(str, numbers)) + " ="

    def _prompt(self, index: int, numbers: Sequence[int]) -> Prompt:
        messages = _chat(self._question(numbers), self._examples)
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
            from metronome.errors import nearest

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
        messages = _chat(self.settings.instruction + entry["question"], self._examples)
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
        return float(dataset.score_answer(answer=text.strip(), entry=prompt.columns["entry"]))

    def rewards(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[float]:
        """reasoning-gym's own score of the whole text, 0..1."""
        return [self._score(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]

    def accuracy(self, prompt: Prompt, text: str, reward: float) -> float:
        """1.0 if reasoning-gym gave the full score."""
        return float(reward >= 1.0)


class DatasetTask:
    """Prompts from a file, rewards from the user's function; epochs repeat the file in a new order."""

    def __init__(self, settings: Dataset, tokenizer: Any, seed: int, base: Path) -> None:
        self.settings, self.tokenizer, self.seed = settings, tokenizer, seed
        self._reward = function_at(from_folder(settings.reward, base), "task.reward")
        path = base / Path(settings.path).expanduser()
        records = _read(path)
        contents = [_content(record, place, settings.system) for place, record in enumerate(records)]
        count = int(len(records) * settings.held_out)
        order = list(range(len(records)))
        random.Random("held out").shuffle(order)
        self._held, self._train = sorted(order[:count]), sorted(order[count:])
        for name in sorted({"prompts", "completions"}.intersection(*(records[:1]))):
            raise ConfigurationError(
                "a column has the name of an argument of the reward function",
                found=name,
                where=str(path),
                remedy="rename the column",
            )
        self._records, self._contents = records, contents
        self._order: tuple[int, list[int]] = (-1, [])

    def _prompt(self, index: int, place: int) -> Prompt:
        columns = {key: value for key, value in self._records[place].items() if key != "prompt"}
        content = self._contents[place]
        return Prompt(index, encode(self.tokenizer, content), content, columns)

    def prompt(self, index: int) -> Prompt:
        """Record by epoch and place in that epoch's own order."""
        epoch, place = divmod(index, len(self._train))
        if self._order[0] != epoch:
            order = list(self._train)
            random.Random(f"{self.seed} {epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._prompt(index, self._order[1][place])

    def held_out(self) -> list[Prompt]:
        """The held-out records."""
        return [self._prompt(-1 - i, place) for i, place in enumerate(self._held)]

    def rewards(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Any]:
        """The user's function on prompts, completions and the columns' lists."""
        names = sorted({name for prompt in prompts for name in prompt.columns})
        columns = {name: [prompt.columns.get(name) for prompt in prompts] for name in names}
        chat = isinstance(prompts[0].content, list)
        completions: list[Any] = [[{"role": "assistant", "content": text}] for text in texts] if chat else list(texts)
        rewards: list[Any] = self._reward([prompt.content for prompt in prompts], completions, **columns)
        return rewards

    def accuracy(self, prompt: Prompt, text: str, reward: float) -> float:
        """The reward: a file has no other notion of a right answer."""
        return reward


def _content(record: Any, place: int, system: str | None) -> str | Messages:
    prompt = record.get("prompt") if isinstance(record, dict) else None
    if isinstance(prompt, str) and prompt:
        return prompt if system is None else _chat(prompt, [], system)
    if (
        isinstance(prompt, list)
        and prompt
        and all(isinstance(m, dict) and isinstance(m.get("content"), str) and "role" in m for m in prompt)
    ):
        messages: Messages = [{"role": m["role"], "content": m["content"]} for m in prompt]
        return messages
    raise ConfigurationError(
        f"record {place} has no usable prompt",
        found=prompt,
        where="task.path",
        remedy="a column `prompt` with text or chat messages [{role, content}]",
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"the file can't be read: {error}", found=str(path), where="task.path", remedy="a JSONL file in UTF-8"
        ) from error


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise ConfigurationError("no such file", found=str(path), where="task.path", remedy="a JSONL or Parquet file")
    records: list[dict[str, Any]] = []
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        try:
            records = pyarrow.parquet.read_table(path).to_pylist()
        except pyarrow.ArrowInvalid as error:
            raise ConfigurationError(
                f"not a Parquet file: {error}",
                found=str(path),
                where="task.path",
                remedy="a JSONL or Parquet file",
            ) from error
    else:
        for number, line in enumerate(_text(path).split("\n"), 1):
            if line.strip():
                try:
                    records.append(json.loads(line))
                except json.JSONDecodeError as error:
                    raise ConfigurationError(
                        f"line {number} isn't JSON: {error}",
                        found=line[:60],
                        where=str(path),
                        remedy="one JSON object a line",
                    ) from error
    if not records:
        raise ConfigurationError("the file holds no records", where=str(path), remedy="at least one prompt")
    return records
