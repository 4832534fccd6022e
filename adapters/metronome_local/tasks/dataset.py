"""Prompts from a JSONL or Parquet file, rewards from a function given by its path."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from metronome.errors import ConfigurationError
from metronome_local.importing import from_folder, function_at
from metronome_local.recipe import Dataset
from metronome_local.rollouts import Prompt
from metronome_local.tasks.chat import Messages, chat, encode


class DatasetTask:
    """Prompts from a file, rewards from the user's function; epochs repeat the file in a new order."""

    def __init__(self, settings: Dataset, tokenizer: Any, seed: int, base: Path) -> None:
        self.settings, self.tokenizer, self.seed = settings, tokenizer, seed
        self._reward = function_at(from_folder(settings.reward, base), "task.reward")
        path = base / Path(settings.path).expanduser()
        records = read_records(path)
        contents = [_content(record, place, settings.system) for place, record in enumerate(records)]
        count = min(max(int(len(records) * settings.held_out), settings.held_out > 0), len(records) - 1)
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
        return prompt if system is None else chat(prompt, [], system)
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


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a JSONL or Parquet file; raises ConfigurationError, naming the line, for what can't be read."""
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
