"""What has finished, agreed by the ranks: each part of a period, or a whole batch."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

from metronome.contracts import GroupStats
from metronome.errors import MetronomeError
from metronome_areal.flow import PromptFlow

_LOOK = 0.02


class Ranks:
    """The ranks of a run, as far as groups are handed over them.

    Args:
        group: gloo group of all ranks; None for one process (a controller, or a single rank).
        place: this rank's data-parallel rank.
        places: data-parallel ranks.
    """

    def __init__(self, group: Any = None, place: int = 0, places: int = 1) -> None:
        self.group, self.place, self.places = group, place, places
        self.begin()

    def begin(self) -> None:
        """A new period: no rank has anything."""
        self._held = [(0, 0)] * self.places

    def everywhere(self, value: Any) -> list[Any]:
        """``value`` of every rank."""
        if self.group is None:
            return [value]
        found: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(found, value, group=self.group)
        return found

    def share(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """This rank's share of ``groups``, the same list on every rank.

        The longest first, to the rank with the fewest groups of the period, and of those to the one with the fewest
        tokens: no rank has two more groups than another.
        """
        if self.places == 1:
            return groups
        mine = []
        weights = [int(one["attention_mask"].sum()) for one in groups]
        for number in sorted(range(len(groups)), key=lambda one: -weights[one]):
            place = min(range(self.places), key=lambda one: self._held[one])
            count, tokens = self._held[place]
            self._held[place] = count + 1, tokens + weights[number]
            if place == self.place:
                mine.append(number)
        return [groups[number] for number in sorted(mine)]


class Parts:
    """Parts of one period after another.

    Every rank that heads a data-parallel group has a flow of its own and looks at it; a part is what has finished on
    any of them, at least a group for every rank but at the end. Ranks train the same number of parts.

    Args:
        flow: of this process; None on ranks that don't generate.
        ranks: of the run.
        most: groups of this process that a part may have.
        least: groups that a part of a controller has but at the end: one for each of its workers.
    """

    def __init__(self, flow: PromptFlow | None, ranks: Ranks, most: int, least: int = 1) -> None:
        self.flow, self.ranks, self._most, self._least = flow, ranks, max(most, least), least
        self._left: list[dict[str, Any]] = []

    def next(self) -> list[dict[str, Any]] | None:
        """The next part's groups of this rank (maybe none), or None when the period is complete on every rank.

        Raises WaitTimeout if nothing arrives, and what ``PromptFlow`` raises; on every rank what one raises.
        """
        if self.ranks.group is None:
            return self._of_one_process()
        groups: list[dict[str, Any]] = []
        while True:
            told = self.ranks.everywhere(self._look())
            error = next((error for *_, error in told if error is not None), None)
            if error is not None:
                raise error
            groups += [one for found, *_ in told for one in found]
            complete = all(done for _, done, _ in told)
            if groups and (complete or len(groups) >= self.ranks.places):
                return self.ranks.share(groups)
            if complete:
                return None
            time.sleep(_LOOK)

    def _of_one_process(self) -> list[dict[str, Any]] | None:
        """As many groups for each worker, but in the period's last part."""
        assert self.flow is not None
        found, complete = self._left, self.flow.complete()
        while len(found) < self._least and not complete:
            found = [*found, *(one.group for one in self.flow.take(self._most - len(found)))]
            complete = self.flow.complete()
        whole = len(found) if complete else len(found) - len(found) % self._least
        self._left = found[whole:]
        return found[:whole] or None

    def stats(self) -> list[GroupStats]:
        """Every group that was generated for the period, on every rank, in the order of the ranks."""
        mine = [] if self.flow is None else self.flow.generated
        return [one for theirs in self.ranks.everywhere(mine) for one in theirs]

    def _look(self) -> tuple[list[dict[str, Any]], bool, MetronomeError | None]:
        """What has finished here, whether the period is complete here, and what is wrong here."""
        flow = self.flow
        if flow is None:
            return [], True, None
        try:
            found = [] if flow.complete() else [one.group for one in flow.take(self._most, block=False)]
        except MetronomeError as error:
            return [], True, error
        except Exception as error:  # a filter's, say: the other ranks would wait for this one
            what = f"{type(error).__name__}: {error}"
            told = MetronomeError(what, where=f"rank {self.ranks.place}", remedy="see the cause in its log")
            told.__cause__ = error
            return [], True, told
        return found, flow.complete(), None
