"""Prompts as text or chat messages, and their token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from metronome.errors import ConfigurationError

Messages = list[dict[str, str]]
_NO_SYSTEM = {"role": "system", "content": ""}  # keeps templates from adding a system message of their own


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


def chat(question: str, examples: Sequence[tuple[str, str]], system: str | None = "") -> Messages:
    """A conversation with worked examples."""
    messages: Messages = [] if system is None else [{**_NO_SYSTEM, "content": system}]
    for asked, answered in [*examples, (question, "")]:
        messages.append({"role": "user", "content": asked})
        if answered:
            messages.append({"role": "assistant", "content": answered})
    return messages
