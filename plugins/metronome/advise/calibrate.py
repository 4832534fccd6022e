"""A recorded run as a simulated cluster with the run's own lengths: speeds fitted, what is missing named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from metronome.advise.engines import decoding, placement, reading
from metronome.advise.given import Given
from metronome.advise.group_cost import GroupCost, group_cost, padding
from metronome.advise.lengths import StepGroups, step_groups
from metronome.advise.measure import MUCH
from metronome.advise.replay import Replay, replays
from metronome.advise.start_up import without_start_up
from metronome.advise.times import Times, trainer_times
from metronome.errors import ConfigurationError
from metronome.observe.records import RunRecord
from metronome.simulate.cluster import Cluster, EmpiricalLengths, Engines, LawCurve, Trainer
from metronome.simulate.lengths import Recorded
from metronome.simulate.model import simulate
from metronome.simulate.policy import Policy


@dataclass(frozen=True, slots=True)
class Base:
    """The run as the simulator sees it.

    Attributes:
        cluster: its work and times are the run's usual ones; single steps have their own (``of_step``).
        policy: as the run was run. A colocated run is ``synchronous`` here: two sides that take turns, each with all
            devices, have the same timeline.
        steps: the recorded steps and groups that are simulated.
        times: ``[steps]`` of the trainer.
        colocated: whether both sides are the same devices.
        prompts_known: whether the prompts' lengths are.
        attention_known: whether the share of attention in training is.
        cost: of a group's passes, fixed and by tokens; None where it isn't known and all is taken as by tokens.
        replays: ``[steps]`` the periods with their own arrivals; None where these aren't recorded.
        dearest: the engines with the dearest prompts that the record leaves open; None: nothing is left open.
        decode_error: of the fitted decoding curve, a share of the groups' arrival.
        measured, assumed: sentences on where the figures come from.
    """

    cluster: Cluster
    policy: Policy
    steps: tuple[StepGroups, ...]
    times: tuple[Times, ...]
    colocated: bool
    prompts_known: bool
    attention_known: bool
    cost: GroupCost | None
    replays: tuple[Replay, ...] | None
    dearest: Engines | None
    decode_error: float | None
    measured: tuple[str, ...]
    assumed: tuple[str, ...]

    @property
    def seconds(self) -> list[float]:
        """``[steps]`` recorded."""
        return [one.step.seconds for one in self.steps]

    @property
    def recomputes(self) -> bool:
        """Whether a pass for a proximal policy was recorded."""
        return self.policy.proximal == "recompute"

    @property
    def unnamed_share(self) -> float:
        """Share of the steps' seconds in no recorded part."""
        return sum(one.unnamed for one in self.times) / sum(self.seconds)

    @property
    def lengths(self) -> Recorded:
        """All steps' lengths, to be replayed."""
        return Recorded([one.groups for one in self.steps])

    def of_step(self, number: int, cluster: Cluster) -> tuple[Cluster, Recorded]:
        """``cluster`` with the work and the trainer's times of the ``number``-th of ``steps``, and its lengths."""
        groups, trained = self.steps[number].groups, self.steps[number : number + 1]
        changes = _trainer(trained, self.times[number : number + 1], self.policy, self.cluster.trainer, self.cost)
        update = {
            "prompts_per_step": len(groups),
            "group_size": _usual(len(one.responses) for one in groups),
            "trainer": cluster.trainer.model_copy(update=changes),
            "publication_seconds": self.times[number].publication,
        }
        return cluster.model_copy(update=update), Recorded([groups])

    def ends(self) -> tuple[Base, ...]:
        """The ends of what the record leaves open: the fewest fixed seconds of a group; the most, and dear prompts;
        seconds in no recorded part with all standing still.

        What isn't fixed is so much less by tokens. Empty where nothing is left open.
        """
        ends: list[Base] = []
        if self.cost is not None or self.dearest is not None:
            low, high = (None, None) if self.cost is None else map(self.cost.at, (self.cost.low, self.cost.high))
            engines = self.dearest or self.cluster.engines
            ends.append(replace(self, cost=low))
            ends.append(replace(self, cost=high, cluster=self.cluster.model_copy(update={"engines": engines})))
        if self.unnamed_share > MUCH:
            still = (replace(one, unnamed=0.0, publication=one.publication + one.unnamed) for one in self.times)
            ends.append(replace(self, times=tuple(still)))
        return tuple(replace(one, cluster=one.costs(one.cluster)) for one in ends)

    def costs(self, cluster: Cluster) -> Cluster:
        """``cluster`` with the speeds of this base."""
        changes = _trainer(self.steps, self.times, self.policy, self.cluster.trainer, self.cost)
        own = self.cluster.engines
        engines = {"decode": own.decode, "prefill_seconds_per_token": own.prefill_seconds_per_token}
        return cluster.model_copy(
            update={
                "trainer": cluster.trainer.model_copy(update=changes),
                "engines": cluster.engines.model_copy(update=engines),
                "publication_seconds": fmean(one.publication for one in self.times),
            }
        )

    def last(self, count: int) -> Base:
        """The same with the last ``count`` steps."""
        if len(self.steps) <= count:
            return self
        note = f"gains are simulated on the last {count} of {len(self.steps)} steps"
        return replace(
            self,
            steps=self.steps[-count:],
            times=self.times[-count:],
            replays=None if self.replays is None else self.replays[-count:],
            measured=(*self.measured, note),
        )


def calibrate(run: RunRecord, given: Given) -> Base:
    """``run`` as a cluster and a policy.

    Seconds of training are those of a line through single groups' seconds (``metronome.advise.group_cost``) where these
    are recorded, else proportional to tokens (old log-probs and reference are passes of every token too); each step's
    sum is the recorded one. Seconds of a step that belong to no recorded part are serial, like the optimiser's. Leading
    steps that start something up are left out (``metronome.advise.start_up``).

    Raises ConfigurationError for a run without steps or groups, and for what is missing and can't be assumed, with
    the ``KEY=VALUE`` that gives it.
    """
    assumed: list[str] = []
    measured: list[str] = []
    if not run.steps:
        raise ConfigurationError(
            "the run has no steps", found=run.name, remedy="give the records of a run that trained"
        )
    source = _source(run)
    found, prompts_known = step_groups(run, given, assumed)
    if run.host == "csv" and len(found) > 1:
        found = found[:-1]
        measured.append("the last step ends with its last response, without its training: left out of the model")
    steps = without_start_up([one for one in found if one.step.seconds > 0.0], measured)
    if not steps:
        raise ConfigurationError(
            "no recorded step has responses and seconds", found=run.name, remedy="give both, metrics and rollouts"
        )
    size = _usual(len(group.responses) for one in steps for group in one.groups)
    if size < 2:
        raise ConfigurationError(
            "groups of one response: nothing here has anything to compare within a prompt",
            found=f"{sum(len(one.groups) for one in steps)} groups of 1",
            where=run.name,
            remedy="name the responses of one prompt alike",
        )
    colocated = source == "colocated"
    workers, slots, ranks = placement(run, steps, colocated, assumed)
    times = trainer_times(run, source, steps, given, measured)
    policy = Policy.model_validate(
        {
            "source": "synchronous" if colocated else source,
            "max_staleness": _bound(run, assumed) if source == "bounded" else None,
            "shared_prompt": run.settings.get("attention") == "shared_prompt",
            "proximal": "recompute" if any(one.proximal for one in times) else "none",
        }
    )
    if given.attention_share is None:
        assumed.append("attention between tokens takes no share of training: give attention_share=0.2 if it does")
    padded = padding(steps, shared=policy.shared_prompt)
    cost, unknown = group_cost(run, steps, shared=policy.shared_prompt, padded=padded)
    trainer = Trainer(
        ranks=ranks, seconds_per_token=1.0, attention_share=given.attention_share or 0.0, padded=bool(padded)
    )
    usual = _trainer(steps, times, policy, trainer, cost)
    publication = fmean(one.publication for one in times)
    cluster = Cluster(
        engines=Engines(
            count=workers, slots=slots, decode=LawCurve(tokens_per_second=1.0, half=1.0), **reading(run.host)
        ),
        trainer=trainer.model_copy(update=usual),
        lengths=EmpiricalLengths(kind="empirical", file="the record"),
        prompts_per_step=_usual(len(one.groups) for one in steps),
        group_size=size,
        prompt_tokens=steps[0].groups[0].prompt_tokens,
        publication_seconds=publication,
    )
    optimizer, unnamed = fmean(one.optimizer for one in times), fmean(one.unnamed for one in times)
    training = f"training {1e3 * usual['seconds_per_token'] / ranks:.3g} ms a token"
    if cost is None:
        assumed.append(
            f"training is proportional to tokens ({unknown}): a pass costs something whatever its tokens, so that "
            "gains of shared prompts and of a smaller G are upper bounds"
        )
    else:
        training += f" and {_fixed(cost, usual)}"
    if padded:
        training += "; separate rows are padded to their group's longest"
    serial = f"optimiser {optimizer:.3g} s a step, publication {publication:.3g} s"
    measured.insert(0, f"{training}; {serial}")
    part = unnamed / fmean(one.step.seconds for one in steps)
    if part > 0.001:
        caution = ""
        if part > MUCH:
            caution = "; whether they would overlap isn't known: intervals reach to where everything stands still"
        measured.insert(
            1,
            f"{unnamed:.3g} s a step ({100 * part:.0f} %) belong to no recorded part and are taken as serial{caution}",
        )
    base = Base(
        cluster, policy, tuple(steps), tuple(times), colocated, prompts_known, given.attention_share is not None,
        cost, replays(run, steps, times), None, None, (), (),
    )  # fmt: skip

    def seconds(curve: LawCurve) -> float:
        changed = cluster.model_copy(update={"engines": cluster.engines.model_copy(update={"decode": curve})})
        return simulate(changed, policy, steps=len(steps), lengths=base.lengths).seconds

    engines, error, dearest = decoding(
        cluster.engines, steps, source, given.half, seconds, measured, assumed, prompts_known=prompts_known
    )
    return replace(
        base,
        cluster=cluster.model_copy(update={"engines": engines}),
        dearest=dearest,
        decode_error=error,
        measured=tuple(measured),
        assumed=tuple(assumed),
    )


def _usual(values: Any) -> int:
    """The most frequent of some whole numbers."""
    return int(Counter(values).most_common(1)[0][0])


def _fixed(cost: GroupCost, usual: dict[str, float]) -> str:
    """The fixed seconds in words, with the interval in the same unit as the usual step's."""
    scale = usual["seconds_per_group"] / cost.fixed if cost.fixed > 0.0 else 1.0
    between = f"90 %: {scale * cost.low:.3g} to {scale * cost.high:.3g} s; ours"
    return (
        f"{usual['seconds_per_group']:.3g} s a group whatever its tokens ({between}), fitted to the seconds of "
        f"{cost.groups} groups ({100 * cost.error:.1f} % off)"
    )


def _trainer(
    steps: Sequence[StepGroups], times: Sequence[Times], policy: Policy, trainer: Trainer, cost: GroupCost | None
) -> dict[str, float]:
    """The trainer's figures over ``steps``: seconds of one rank for a token, of a group, and of a step.

    The line of ``cost`` is scaled so that the sum is the recorded one.
    """
    fed = [one.fed(shared=policy.shared_prompt, padded=trainer.padded) for one in steps]
    training = sum(one.training for one in times)
    fixed, per_token = (0.0, 1.0) if cost is None else (cost.fixed, cost.per_token)
    scale = training / (fixed * sum(map(len, fed)) + per_token * sum(map(sum, fed)))
    return {
        "seconds_per_token": max(1e-12, scale * per_token * trainer.ranks),
        "seconds_per_group": scale * fixed,
        "forward_share": min(1.0, sum(one.proximal for one in times) / training) if training > 0.0 else 0.0,
        "optimizer_seconds": fmean(one.serial for one in times),
    }


def _source(run: RunRecord) -> str:
    if run.source is None:
        raise ConfigurationError(
            "the records don't tell whether generation and training took turns",
            found=run.name,
            where=f"a run of {run.host}",
            remedy="give source=synchronous (two sides, one waits), colocated (the same devices in turns), periodic or "
            "bounded",
        )
    return run.source


def _bound(run: RunRecord, assumed: list[str]) -> int:
    bound = run.settings.get("staleness")
    if isinstance(bound, int | float):
        return int(bound)
    assumed.append("a bound of 2 versions of staleness: give staleness=N")
    return 2
