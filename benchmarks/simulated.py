"""Responses of an engine that decodes by sleeping: the same lengths in every batch, tokens that differ.

An engine that sleeps takes no processor time from training: it stands for a device of its own.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence

TOKENS = (3, 97)
"""The tiny tokenizers' letters."""
SPREAD = 0.6
"""Of the logarithm of a length."""


def lengths(count: int, longest: int) -> list[int]:
    """Lognormal lengths from ``longest / 16`` to ``longest``, a quarter of it in the middle: some are stragglers."""
    draw = random.Random(0)
    found = [draw.lognormvariate(math.log(longest / 4), SPREAD) for _ in range(count)]
    return [round(min(max(one, longest / 16, 1), longest)) for one in found]


def decode_steps(found: Sequence[int], slots: int) -> int:
    """Steps in which ``slots`` requests at a time, first come first served, decode them all."""
    free = [0] * slots
    for length in found:
        heapq.heappush(free, heapq.heappop(free) + length)
    return max(free)


def response(number: int, longest_of_all: Sequence[int]) -> list[int]:
    """The tokens of a run's ``number``-th request; ``longest_of_all`` are the lengths of a batch."""
    draw = random.Random(number)
    return [draw.randint(*TOKENS) for _ in range(longest_of_all[number % len(longest_of_all)])]


def balanced(training: float, found: Sequence[int], slots: int) -> float:
    """Seconds a token with which generation takes as long as ``training`` seconds."""
    return round(training / decode_steps(found, slots), 5)
