"""What passes through the group stream: tickets out, arrivals in, a report for each period."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

PromptT = TypeVar("PromptT")
GroupT = TypeVar("GroupT")


class Aborted(Exception):
    """Raised in a group's future that was aborted, at a publication say: its prompt goes out again."""


@dataclass(frozen=True)
class Ticket(Generic[PromptT]):
    """One prompt sent out.

    Attributes:
        index: the prompt's fixed place in the run; sampling seeds follow it, and nothing else.
        prompt: what ``prompt_at(index)`` gave.
        version: the version being trained when it was sent out.
        attempt: how many times the prompt was sent out before.
    """

    index: int
    prompt: PromptT
    version: int
    attempt: int


@dataclass(frozen=True)
class Arrival(Generic[PromptT, GroupT]):
    """A finished group.

    Attributes:
        ticket: what was sent out.
        group: what came back.
        versions: the versions that sampled the group's tokens.
        arrived: the clock's seconds when it arrived.
    """

    ticket: Ticket[PromptT]
    group: GroupT
    versions: tuple[int, ...]
    arrived: float


@dataclass(frozen=True)
class PeriodReport:
    """What one period did.

    Attributes:
        version, batch: as ``open_period`` was given them.
        arrivals: seconds from the period's opening to each trained group's arrival, in the order trained;
            0.0 for a group that had been waiting.
        waits: seconds that the trainer waited in all.
        trained, filtered, dropped, aborted: groups.
        indices: the trained prompts, in the order trained.
    """

    version: int
    batch: int
    arrivals: tuple[float, ...]
    waits: float
    trained: int
    filtered: int
    dropped: int
    aborted: int
    indices: tuple[int, ...]
