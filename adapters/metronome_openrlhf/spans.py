"""Which version of the weights sampled which token: counted while an engine generates, read off a finished response."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

SPANS = "metronome_spans"
"""Key in a response: ``[[version, tokens], ...]`` of its action tokens, in order."""

UNKNOWN = -1
"""Version of tokens that no request of the engine returned."""


@dataclass(eq=False)
class Request:
    """One call of an engine.

    Attributes:
        seen: tokens that have come so far.
        spans: ``[[version, tokens], ...]`` of those that are accounted for.
        tokens: the generated tokens, once finished.
    """

    seen: int = 0
    spans: list[list[int]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def account(self, version: int) -> None:
        """What has come since the last call was sampled by ``version``."""
        _add(self.spans, version, self.seen - sum(tokens for _, tokens in self.spans))


def spans_of(response: dict[str, Any], requests: Iterable[Request]) -> list[list[int]]:
    """``[[version, tokens], ...]`` of a response's action tokens, in order.

    A range of actions is that request's, the earliest unused one, whose tokens begin with it; so an agent may retry,
    cut, ask in parallel, or give several responses. Tokens that no request returned are ``UNKNOWN``.
    """
    left = list(requests)
    found: list[list[int]] = []
    for start, end in response["action_ranges"]:
        actions = list(response["observation_tokens"][start:end])
        match = next((one for one in left if one.tokens[: len(actions)] == actions), None)
        if match is None:
            _add(found, UNKNOWN, len(actions))
            continue
        left.remove(match)
        for version, tokens in _cut(match.spans, len(actions)):
            _add(found, version, tokens)
    return found


def _cut(spans: Sequence[Sequence[int]], count: int) -> list[tuple[int, int]]:
    kept = []
    for version, tokens in spans:
        kept.append((version, min(tokens, count)))
        count -= kept[-1][1]
    return kept


def _add(spans: list[list[int]], version: int, tokens: int) -> None:
    if tokens <= 0:
        return
    if spans and spans[-1][0] == version:
        spans[-1][1] += tokens
    else:
        spans.append([version, tokens])
