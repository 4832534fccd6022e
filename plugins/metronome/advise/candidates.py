"""The techniques that could be turned on in a run, each as the policy that would be simulated for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from metronome.advise.calibrate import Base
from metronome.sagc.options import SagcOptions
from metronome.simulate.cluster import Cluster
from metronome.simulate.policy import Policy, sizes_below

STALENESS = (1, 2, 4)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A technique.

    Attributes:
        key: its name in JSON; ``name`` the one that is printed.
        policy: with it; None: there is nothing to simulate, ``reason`` says why.
        cluster: on which; another split than the run's where that had none.
        keys: of the ``metronome:`` block that turn it on.
        changes: what it costs and changes.
        gradient: whether the gradient changes.
        equal_steps: compare seconds of a step; else seconds of a rollout.
        without: the run without a technique that is on already; ``policy`` is the run's own then.
        against: the policy over which it must gain; None: the run as it was. ``than`` is its name,
            ``than_short`` a short one.
        reason: why nothing is simulated; ``unknown`` if that is for lack of records.
    """

    key: str
    name: str
    policy: Policy | None
    cluster: Cluster
    keys: Sequence[tuple[str, str]]
    changes: str
    gradient: bool
    equal_steps: bool = False
    without: Policy | None = None
    against: Policy | None = None
    than: str = ""
    than_short: str = ""
    reason: str = ""
    unknown: bool = False


def candidates(base: Base, cluster: Cluster | None, loss: object) -> list[Candidate]:
    """All techniques for ``base``.

    Args:
        cluster: what the sources that overlap both sides run on: the run's own, in a colocated run its best split,
            None if there is no split.
        loss: of the run, as its settings name it.
    """
    return [
        _periodic(base, cluster),
        *(_bounded(base, cluster, bound) for bound in STALENESS),
        _a3po(base, loss),
        _shared(base),
        *(_sagc(base, budget) for budget in ("fixed_prompts", "fixed_rollouts")),
        _together(base, cluster),
    ]


def with_source(policy: Policy, source: str) -> Policy:
    """``policy`` with another source that isn't bounded."""
    return _with(policy, source=source, max_staleness=None)


def _with(policy: Policy, **changes: object) -> Policy:
    return Policy.model_validate({**policy.model_dump(exclude={"sagc"}), "sagc": policy.sagc, **changes})


def _split(base: Base) -> str:
    """What a source that overlaps both sides costs a run whose sides are the same devices."""
    return "; needs a split" if base.colocated else ""


_NO_SPLIT = "one device can't be split into a side that generates and one that trains"


def _periodic(base: Base, cluster: Cluster | None) -> Candidate:
    on = base.policy.source == "periodic"
    policy = base.policy if on else with_source(base.policy, "periodic")
    return Candidate(
        "periodic",
        "periodic asynchrony",
        policy if cluster is not None else None,
        cluster or base.cluster,
        (("rollout_source", "periodic"),),
        "same gradient" + _split(base),
        gradient=base.policy.source == "bounded",
        without=with_source(base.policy, "synchronous") if on else None,
        reason="" if cluster is not None else _NO_SPLIT,
    )


def _bounded(base: Base, cluster: Cluster | None, bound: int) -> Candidate:
    on = base.policy.source == "bounded" and base.policy.bound == bound
    less = max((one for one in STALENESS if one < bound), default=0)
    keys = [("rollout_source", "bounded"), ("bounded.max_staleness", str(bound)), ("loss", "a3po")]
    return Candidate(
        f"bounded_{bound}",
        _bounded_name(bound),
        base.policy if on else _stale(base, bound) if cluster is not None else None,
        cluster or base.cluster,
        keys if bound > 1 else keys[:2],
        f"gradient: staleness {bound}" + _split(base),
        gradient=True,
        without=with_source(base.policy, "periodic") if on else None,
        against=_stale(base, less),
        than=_bounded_name(less),
        than_short=f"bounded {less}" if less else "periodic",
        reason="" if cluster is not None else _NO_SPLIT,
    )


def _bounded_name(bound: int) -> str:
    if bound == 0:
        return "periodic asynchrony"
    return f"bounded staleness {bound}" + (" with A-3PO" if bound > 1 else "")


def _stale(base: Base, bound: int) -> Policy:
    """``bounded``, from 2 on with A-3PO; without staleness ``periodic``."""
    if bound == 0:
        return with_source(base.policy, "periodic")
    proximal = "a3po" if bound > 1 else base.policy.proximal
    return _with(base.policy, source="bounded", max_staleness=bound, proximal=proximal)


def _a3po(base: Base, loss: object) -> Candidate:
    reason = ""
    if not base.recomputes:
        reason = "no pass for a proximal policy was recorded, so that there is none to save"
        if base.policy.source != "bounded" or base.policy.bound < 2:
            reason += "; at staleness 0 and 1 A-3PO is plain PPO"
    on = loss == "a3po" and not base.recomputes and base.policy.source == "bounded"
    return Candidate(
        "a3po",
        "A-3PO instead of recompute",
        _with(base.policy, proximal="a3po") if base.recomputes else None,
        base.cluster,
        (("loss", "a3po"),),
        "gradient: interpolated proximal",
        gradient=True,
        without=_with(base.policy, proximal="recompute") if on else None,
        reason=reason,
    )


def _shared(base: Base) -> Candidate:
    on = base.policy.shared_prompt
    known = base.prompts_known
    return Candidate(
        "shared_prompt",
        "shared prompts",
        _with(base.policy, shared_prompt=True) if known else None,
        base.cluster,
        (("attention", "shared_prompt"),),
        "same gradient; training alone",
        gradient=False,
        without=_with(base.policy, shared_prompt=False) if on else None,
        reason="" if known else "the prompts' lengths aren't recorded: give prompt_tokens=N",
        unknown=not known,
    )


def _sagc(base: Base, budget: str) -> Candidate:
    chosen = sizes_below(base.cluster.group_size)
    equal_steps = budget == "fixed_prompts"
    enough = len(chosen) > 1
    spec = SagcOptions.model_validate({"sizes": chosen, "budget": budget}) if enough else SagcOptions()
    return Candidate(
        f"sagc_{budget}",
        "SAGC, at equal steps" if equal_steps else "SAGC, at equal rollouts",
        _with(base.policy, group_controller="sagc", sagc=spec) if enough else None,
        base.cluster,
        _sagc_keys(chosen, budget),
        "gradient: G moves; " + ("fewer rollouts" if equal_steps else "more prompts"),
        gradient=True,
        equal_steps=equal_steps,
        reason="" if enough else f"G is {base.cluster.group_size} already: no smaller size is left",
    )


def _sagc_keys(chosen: Sequence[int], budget: str) -> list[tuple[str, str]]:
    listed = "[" + ",".join(map(str, chosen)) + "]"
    return [("group_controller", "sagc"), ("sagc.sizes", listed), ("sagc.budget", budget)]


def _together(base: Base, cluster: Cluster | None) -> Candidate:
    chosen, known = sizes_below(base.cluster.group_size), base.prompts_known
    enough = len(chosen) > 1 and cluster is not None
    changes: dict[str, object] = {"source": "periodic", "max_staleness": None, "shared_prompt": known}
    if len(chosen) > 1:
        changes |= {"group_controller": "sagc", "sagc": SagcOptions(sizes=chosen)}
    keys = [("rollout_source", "periodic"), ("attention", "shared_prompt"), *_sagc_keys(chosen, "fixed_rollouts")]
    return Candidate(
        "together",
        "periodic + shared prompts + SAGC",
        _with(base.policy, **changes) if enough else None,
        cluster or base.cluster,
        keys if known else [keys[0], *keys[2:]],
        "gradient: G moves" + _split(base),
        gradient=True,
        against=with_source(base.policy, "periodic"),
        than=_bounded_name(0),
        than_short="periodic",
        reason="" if enough else _NO_SPLIT if cluster is None else f"G is {base.cluster.group_size} already",
    )
