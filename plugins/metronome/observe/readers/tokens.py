"""Token counts of responses that a host dumped as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from metronome.errors import ConfigurationError

NOTE = (
    "The dump holds texts without token counts: lengths are estimated from characters, scaled to each step's recorded "
    "mean and bounds. Give tokenizer=FOLDER (with tokenizer.json) to count them."
)


def counter(folder: object) -> Callable[[str], int]:
    """A function that counts a text's tokens with ``tokenizer.json`` of ``folder``, without special tokens.

    Raises ConfigurationError if the package tokenizers isn't installed or the file can't be read.
    """
    path = Path(str(folder), "tokenizer.json")
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ConfigurationError(
            "counting tokens needs a package that isn't installed",
            found="tokenizers",
            where="tokenizer",
            remedy="pip install tokenizers, or leave tokenizer out: lengths are estimated then",
        ) from None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ConfigurationError(
            f"the tokenizer can't be read: {error}",
            found=str(path),
            where="tokenizer",
            remedy="give the model's folder",
        ) from None
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def scaled(texts: Sequence[str], mean: float, least: float | None, most: float | None) -> list[int]:
    """Token counts in proportion to the texts' characters, with the given mean, then put within [least, most]."""
    characters = [max(1, len(text)) for text in texts]
    ratio = mean * len(texts) / sum(characters) if texts else 0.0
    return [round(min(most or ratio * one, max(least or 0.0, ratio * one))) for one in characters]
