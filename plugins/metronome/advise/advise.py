"""A run's record as advice: facts, how well the model fits, and a row for each technique.

Verdicts, from the 90 % interval [low, high] of the gain:

- already on: the run has it; the gain is that of the run over the same run without.
- turn on: low above 1.03, and the gradient stays the same.
- try: low above 1.03, but the gradient changes, so that learning has to be watched; or low above 1 and the gain above
  1.03.
- no gain over ...: it would be worth a try, but not over a lesser change. Bounded staleness is judged by what it gains
  over the next less stale source (1 over periodic asynchrony, 2 over 1, 4 over 2), and all together by what they gain
  over periodic asynchrony alone.
- not worth it: anything else; the interval reaches 1, or the gain is below 1.03.
- not known: fewer than three steps, a model that is more than 10 % off, or something that isn't recorded.
- refused: the host refuses the combination.
"""

from __future__ import annotations

from dataclasses import dataclass

from metronome.advise import why
from metronome.advise.calibrate import Base, calibrate
from metronome.advise.candidates import Candidate, candidates
from metronome.advise.flags import BESIDE, flag, refusal
from metronome.advise.gain import Calibration, Gain
from metronome.advise.given import Given
from metronome.advise.measure import Facts, measure
from metronome.advise.model import Model
from metronome.observe.records import RunRecord
from metronome.simulate.cluster import Cluster
from metronome.simulate.split import best_split

WORTH = 1.03
"""Gain below which nothing is worth a change."""


@dataclass(frozen=True, slots=True)
class Row:
    """Advice on one technique.

    Attributes:
        key, name: of the technique.
        gain: simulated, times as fast; None where nothing could be simulated.
        over: the gain over a lesser change, which ``than`` names; None where there is none.
        per: what the gain counts: ``rollout`` or ``step``.
        method: ``replayed`` on the run's own arrivals, or ``simulated``; empty without a gain.
        changes: what it costs and changes; ``changes_gradient`` whether that is the gradient.
        flag: to add on the host's command line.
        verdict: see the module.
        why: in words.
    """

    key: str
    name: str
    gain: Gain | None
    over: Gain | None
    than: str
    per: str
    method: str
    changes: str
    changes_gradient: bool
    flag: str
    verdict: str
    why: str


@dataclass(frozen=True, slots=True)
class Advice:
    """What ``metronome advise`` says of a run.

    Attributes:
        name, host, source: of the run.
        facts: measured.
        base: the run as it was calibrated, its last steps.
        simulated, replayed: the run as it was, simulated and from its own arrivals, against the record; replayed is
            None where arrivals aren't recorded.
        split: (engines, trainer ranks) that would be fastest; for a colocated run only.
        beside: where the host's flags go.
        rows: the techniques.
        notes: of the reader.
    """

    name: str
    host: str
    source: str
    facts: Facts
    base: Base
    simulated: Calibration
    replayed: Calibration | None
    split: tuple[int, int] | None
    beside: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...]


def advise(run: RunRecord, given: Given | None = None) -> Advice:
    """Advice on ``run``; what its records lack stands in ``given`` and ``run.settings``.

    Raises ConfigurationError for a run that can't be simulated, naming what is missing.
    """
    base = calibrate(run, given or Given())
    facts = measure(run)
    model = Model(base)
    split = _split(model.base)
    cluster = split if base.colocated else model.base.cluster
    judge = _Judge(run, model, facts, split)
    rows = tuple(judge.row(one) for one in candidates(model.base, cluster, run.settings.get("loss")))
    return Advice(
        name=run.name,
        host=run.host,
        source=str(run.source),
        facts=facts,
        base=model.base,
        simulated=model.fits("simulated"),
        replayed=model.fits("replayed") if model.can_replay else None,
        split=None if split is None else (split.engines.count, split.trainer.ranks),
        beside=BESIDE[run.host],
        rows=rows,
        notes=run.notes,
    )


def _split(base: Base) -> Cluster | None:
    """A colocated run's devices split so that periodic asynchrony is fastest; None for others and for one device."""
    devices = base.cluster.engines.count
    if not base.colocated or devices < 2 or base.cluster.trainer.ranks != devices:
        return None
    halves = base.cluster.with_split(devices // 2, devices - devices // 2)
    halves = halves.model_copy(update={"steps": len(base.steps)})
    fastest = best_split(halves, lengths=base.lengths).fastest
    return halves.with_split(fastest.engines, fastest.ranks)


@dataclass(frozen=True)
class _Judge:
    """What every row needs to know."""

    run: RunRecord
    model: Model
    facts: Facts
    split: Cluster | None

    def row(self, candidate: Candidate) -> Row:
        policy, model = candidate.policy, self.model
        found = over = None
        compared = candidate.without or policy
        way = "" if compared is None else model.way(compared, candidate.cluster)
        if candidate.without is not None:
            found = model.given_by(candidate.without)
        elif policy is not None:
            found = model.gain(policy, candidate.cluster, candidate.equal_steps)
            if candidate.against is not None:
                over = model.over(policy, candidate.against, candidate.cluster)
        refused = None
        if policy is not None and policy.group_controller == "sagc":
            refused = refusal(self.run.host, policy.source, policy.sagc.budget)
        fits = model.fits(way)
        return Row(
            key=candidate.key,
            name=candidate.name,
            gain=found,
            over=over,
            than="" if over is None else candidate.than,
            per="step" if candidate.equal_steps else "rollout",
            method=way.replace("in a row", "simulated"),
            changes=candidate.changes,
            changes_gradient=candidate.gradient,
            flag=flag(self.run.host, candidate.keys),
            verdict="refused" if refused else self._verdict(candidate, found, over, fits),
            why=refused or why.sentence(candidate, found, over, model.base, self.facts, fits, self.split),
        )

    def _verdict(self, candidate: Candidate, found: Gain | None, over: Gain | None, fits: Calibration) -> str:
        adaptive = self.run.settings.get("group_controller") == "sagc" and candidate.key.startswith("sagc")
        if candidate.without is not None or adaptive:
            return "already on"
        if found is None:
            return "not known" if candidate.unknown else "not worth it"
        if found.low is None or not fits.trusted:
            return "not known"
        value, low = found.value, found.low
        if over is not None and over.low is not None:
            value, low = min(value, over.value), min(low, over.low)
        if low > WORTH:
            return "try" if candidate.gradient else "turn on"
        if low > 1.0 and value > WORTH:
            return "try"
        alone = found.low > 1.0 and found.value > WORTH
        return f"no gain over {candidate.than_short}" if alone else "not worth it"
