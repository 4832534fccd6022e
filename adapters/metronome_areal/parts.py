"""What has finished, agreed by the ranks: each part of a period, or a whole batch."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

from metronome.contracts import GroupStats
from metronome_areal.flow import Arrived, PromptFlow

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

    def everywhere(self, value: Any) -> list[Any]:
        """``value`` of every rank."""
        if self.group is None:
            return [value]
        found: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(found, value, group=self.group)
        return found

    def share(self, groups: list[Arrived]) -> list[Arrived]:
        """This rank's share of ``groups``, the same list on every rank: longest first, to the lightest rank."""
        if self.places == 1:
            return groups
        load, mine = [0] * self.places, []
        weights = [int(one.group["attention_mask"].sum()) for one in groups]
        for number in sorted(range(len(groups)), key=lambda one: -weights[one]):
            place = min(range(self.places), key=lambda one: load[one])
            load[place] += weights[number]
            if place == self.place:
                mine.append(number)
        return [groups[number] for number in sorted(mine)]


class Parts:
    """Parts of one period after another.

    Every rank that heads a data-parallel group has a flow of its own and looks at it; a part is what has finished on
    any of them. Ranks train the same number of parts.

    Args:
        flow: of this process; None on ranks that don't generate.
        ranks: of the run.
        most: groups of this process that a part may have.
    """

    def __init__(self, flow: PromptFlow | None, ranks: Ranks, most: int) -> None:
        self.flow, self.ranks, self._most = flow, ranks, most

    def next(self) -> list[Arrived] | None:
        """The next part's groups of this rank (maybe none), or None when the period is complete on every rank.

        Raises WaitTimeout if nothing arrives, and what ``PromptFlow`` raises.
        """
        flow = self.flow
        if self.ranks.group is None:
            assert flow is not None
            return None if flow.complete() else flow.take(self._most)
        silent = time.monotonic()
        while True:
            found = [] if flow is None or flow.complete() else flow.take(self._most, block=False)
            done = flow is None or flow.complete()
            told = self.ranks.everywhere((found, done))
            groups = [one for theirs, _ in told for one in theirs]
            if groups:
                return self.ranks.share(groups)
            if all(end for _, end in told):
                return None
            if flow is not None:
                flow.check_silence(silent)
            time.sleep(_LOOK)

    def stats(self) -> list[GroupStats]:
        """Every group that was generated for the period, on every rank, in the order of the ranks."""
        mine = [] if self.flow is None else self.flow.generated
        return [one for theirs in self.ranks.everywhere(mine) for one in theirs]
