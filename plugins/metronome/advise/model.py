"""The run as it was and with other policies, each computed once, and what one gains over another."""

from __future__ import annotations

from dataclasses import replace

from metronome.advise.calibrate import Base, calibrate
from metronome.advise.gain import (
    Calibration,
    Computed,
    Gain,
    calibration,
    carries,
    gain,
    replayable,
    replayed,
    simulated,
)
from metronome.advise.given import Given
from metronome.observe.records import RunRecord
from metronome.simulate.cluster import Cluster
from metronome.simulate.policy import Policy

# Rollouts that one simulation of the recorded steps may hold; a longer run's last steps are taken.
_ROLLOUTS = 20_000


def predicted(run: RunRecord, policy: Policy, given: Given | None = None, *, group_size: int | None = None) -> Gain:
    """What ``policy`` would gain over ``run`` as it was, on the same devices; for checks against a measurement.

    Args:
        group_size: another G at as many prompts; None: the run's. The gain is then that of a step, not of a rollout.
    """
    model = Model(calibrate(run, given or Given()))
    base = model.base
    if group_size is None:
        return model.gain(policy, base.cluster)
    changed = base.cluster.model_copy(update={"group_size": group_size})
    before, after = (base.policy, base.cluster), (policy, changed)
    return model.compared(before, after, "in a row", model.fits("simulated").margin, equal_steps=True)


class Model:
    """The run as it was and with other policies, each computed once, in one of three ways.

    ``replayed``: on the run's own arrivals. ``simulated``: each step alone. ``in a row``: simulated one step after the
    other, for policies that carry something from one to the next. A gain compares two that were computed alike.

    Attributes:
        base: the run; of a long one the last steps.
        can_replay: whether its own arrivals are known, and nothing goes from one step to the next.
    """

    def __init__(self, base: Base) -> None:
        rollouts = sum(len(group.responses) for group in base.steps[-1].groups)
        self.base = base = base.last(max(3, _ROLLOUTS // rollouts))
        self.can_replay = replayable(base, base.policy, base.cluster)
        self._ends = base.ends()
        self._known: dict[tuple[str, int, str, int], Computed] = {}

    def computed(self, policy: Policy, cluster: Cluster, way: str, base: Base | None = None) -> Computed:
        """``policy`` on ``cluster``; with the speeds of ``base`` where it is another than the run's."""
        key = (policy.model_dump_json(), id(cluster), way, id(base))
        if key not in self._known:
            used = base or self.base
            if way == "replayed":
                self._known[key] = replayed(used, policy)
            else:
                on = cluster if base is None else base.costs(cluster)
                self._known[key] = simulated(used, policy, on, alone=way == "simulated")
        return self._known[key]

    def compared(
        self,
        before: tuple[Policy, Cluster],
        after: tuple[Policy, Cluster],
        way: str,
        margin: float,
        *,
        equal_steps: bool = False,
    ) -> Gain:
        """Of one policy over another. The interval reaches over those at the ends of what the record leaves open."""
        found, *ends = (
            gain(self.computed(*before, way, base), self.computed(*after, way, base), margin, equal_steps=equal_steps)
            for base in (None, *self._ends)
        )
        lows = [one.low for one in (found, *ends) if one.low is not None]
        highs = [one.high for one in (found, *ends) if one.high is not None]
        return replace(found, low=min(lows), high=max(highs)) if lows and highs else found

    def way(self, policy: Policy, cluster: Cluster) -> str:
        """How the gain of ``policy`` over the run is computed."""
        if replayable(self.base, policy, cluster):
            return "replayed"
        return "in a row" if carries(policy) or carries(self.base.policy) else "simulated"

    def fits(self, way: str) -> Calibration:
        """The run as it was against the record."""
        own = "replayed" if way == "replayed" else "in a row" if carries(self.base.policy) else "simulated"
        return calibration(self.base, self.computed(self.base.policy, self.base.cluster, own))

    def gain(self, policy: Policy, cluster: Cluster, equal_steps: bool = False) -> Gain:
        """Of ``policy`` on ``cluster`` over the run as it was."""
        way = self.way(policy, cluster)
        own = self.base.policy, self.base.cluster
        return self.compared(own, (policy, cluster), way, self.fits(way).margin, equal_steps=equal_steps)

    def given_by(self, without: Policy) -> Gain:
        """Of the run as it was over ``without``, a technique of its own left out."""
        way = self.way(without, self.base.cluster)
        cluster = self.base.cluster
        return self.compared((without, cluster), (self.base.policy, cluster), way, self.fits(way).margin)

    def over(self, policy: Policy, lesser: Policy, cluster: Cluster) -> Gain:
        """Of ``policy`` over another one on the same cluster."""
        return self.compared((lesser, cluster), (policy, cluster), "in a row", 0.0)
