"""A reward for timing runs: differs between completions, so that every group has something to train."""

from __future__ import annotations

import zlib
from typing import Any


def spread(prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
    """A number in [0, 1) that depends on the completion's text and its place in the group."""
    texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
    return [zlib.crc32(f"{place} {text}".encode()) / 2**32 for place, text in enumerate(texts)]
