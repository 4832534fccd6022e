"""What a rollout is: prompts, rows, and rollout functions as generators that ask the engine for samples.

A rollout function is a generator: it yields a ``Request`` each time the policy must speak, receives what was
``Sampled``, and returns its rows. Tokens that it adds itself (tool results) stand in the context and out of
the loss.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

UNKNOWN_VERSION = -1


@dataclass(frozen=True)
class Prompt:
    """One prompt: its index in the run's fixed list, token ids, text or chat messages, and data columns."""

    index: int
    ids: tuple[int, ...]
    content: Any
    columns: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """Asks for a continuation of ``ids`` of at most ``max_tokens`` tokens (None: the recipe's limit)."""

    ids: Sequence[int]
    max_tokens: int | None = None


@dataclass(frozen=True)
class Sampled:
    """A continuation: token ids, the log-prob and the version of each, and whether the length limit cut it."""

    ids: list[int]
    log_probs: list[float]
    versions: list[int]
    truncated: bool


@dataclass
class Row:
    """One training row: ``prompt`` tokens, then ``response`` tokens with what is known of each.

    Attributes:
        prompt: token ids of the context before the first sampled token.
        response: token ids, sampled and tool tokens in order.
        trained: per response token, False for tool tokens.
        log_probs: the engine's log-prob per response token, 0 for tool tokens.
        versions: the version that sampled each token, -1 for tool tokens.
        truncated: whether the length limit cut the last turn.
    """

    prompt: list[int]
    response: list[int] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    truncated: bool = False

    @property
    def ids(self) -> list[int]:
        """Prompt and response."""
        return self.prompt + self.response

    def add_sampled(self, sampled: Sampled) -> None:
        """Appends what the policy said; it is trained."""
        self.response += sampled.ids
        self.trained += [True] * len(sampled.ids)
        self.log_probs += sampled.log_probs
        self.versions += sampled.versions
        self.truncated = sampled.truncated

    def add_tool(self, ids: Sequence[int]) -> None:
        """Appends what the environment said: in the context, out of the loss."""
        self.response += ids
        self.trained += [False] * len(ids)
        self.log_probs += [0.0] * len(ids)
        self.versions += [UNKNOWN_VERSION] * len(ids)


@dataclass
class Group:
    """The G rollouts of one prompt. ``rollouts[k]`` are the rows of member k; times are monotonic seconds.

    ``texts`` and ``rewards`` hold one entry a rollout; ``size`` is the G that generated the group.
    """

    prompt: Prompt
    size: int
    rollouts: list[list[Row]]
    start: float
    end: float
    worker: int
    texts: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)

    def rows(self) -> list[Row]:
        """Every row of every rollout."""
        return [row for rows in self.rollouts for row in rows]

    def versions(self) -> list[int]:
        """The distinct versions that sampled this group's trained tokens, ascending."""
        return sorted({v for row in self.rows() for v, t in zip(row.versions, row.trained, strict=True) if t})

    def lengths(self) -> list[int]:
        """Sampled tokens of each rollout."""
        return [sum(sum(row.trained) for row in rows) for rows in self.rollouts]


RolloutGenerator = Generator[Request, Sampled, list[Row]]


def single_turn(prompt: Prompt, tokenizer: Any) -> RolloutGenerator:
    """The default rollout: one prompt, one answer, one row."""
    row = Row(list(prompt.ids))
    row.add_sampled((yield Request(prompt.ids)))
    return [row]


_CALL = re.compile(r"<calc>([0-9+\-*/(). ]{1,60})</calc>\s*$")


def calculator(prompt: Prompt, tokenizer: Any, turns: int = 3) -> RolloutGenerator:
    """An example of tool use: ``<calc>2 * 21</calc>`` at the end of a turn is answered with ``= 42``.

    The result's tokens stand in the context and out of the loss; a turn without a call ends the rollout.
    """
    row = Row(list(prompt.ids))
    for _ in range(turns):
        sampled = yield Request(row.ids)
        row.add_sampled(sampled)
        call = _CALL.search(tokenizer.decode(sampled.ids, skip_special_tokens=True))
        if call is None or sampled.truncated:
            break
        row.add_tool(tokenizer.encode(f" = {_arithmetic(call.group(1))}\n", add_special_tokens=False))
    return [row]


def _arithmetic(expression: str) -> str:
    import ast
    import operator

    operations: dict[type, Any] = {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Div: operator.truediv,
        ast.USub: operator.neg,
    }

    def value(node: ast.AST) -> float:
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in operations:
            return float(operations[type(node.op)](value(node.left), value(node.right)))
        if isinstance(node, ast.UnaryOp) and type(node.op) in operations:
            return float(operations[type(node.op)](value(node.operand)))
        raise ValueError(ast.dump(node))

    try:
        return f"{value(ast.parse(expression, mode='eval').body):g}"
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError):
        return "error"
