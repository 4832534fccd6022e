"""What sharing a prompt saves, in theory: pure integers, no torch (the layout is arXiv 2511.18871's).

One group: a prompt of ``Lp`` tokens and K responses. Separate rows hold the prompt K times, a shared row
once.
"""

from __future__ import annotations

from collections.abc import Sequence

from metronome.errors import ConfigurationError


def causal_pairs(length: int) -> int:
    """Query-key pairs of a causal row: ``c(n) = n (n + 1) / 2``."""
    return length * (length + 1) // 2


def attention_ratio(prompt: int, responses: Sequence[int]) -> float:
    """Attention work of K separate rows over that of one shared row, in query-key pairs.

    ``sum_r c(Lp + Lr) / (c(Lp) + sum_r (Lr Lp + c(Lr)))``; for equal lengths
    ``K c(Lp + Lr) / (c(Lp) + K (Lr Lp + c(Lr)))``. Lengths in tokens.

    Raises ConfigurationError for an empty prompt, no response, or a negative length.
    """
    _check(prompt, responses)
    separate = sum(causal_pairs(prompt + length) for length in responses)
    shared = causal_pairs(prompt) + sum(length * prompt + causal_pairs(length) for length in responses)
    return separate / shared


def token_ratio(prompt: int, responses: Sequence[int]) -> float:
    """Tokens of K separate rows over those of one shared row: linear layers and activations follow it.

    ``sum_r (Lp + Lr) / (Lp + sum_r Lr)``. Lengths in tokens.

    Raises ConfigurationError for an empty prompt, no response, or a negative length.
    """
    _check(prompt, responses)
    return (prompt * len(responses) + sum(responses)) / (prompt + sum(responses))


def _check(prompt: int, responses: Sequence[int]) -> None:
    if prompt < 1 or not responses or min(responses) < 0:
        raise ConfigurationError(
            "a group needs a prompt of at least one token and at least one response of length >= 0",
            found=(prompt, list(responses)),
            where="shared_prompt cost",
            remedy="pass (prompt_len >= 1, [response_len, ...])",
        )
