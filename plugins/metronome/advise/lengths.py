"""The lengths of a run's groups, step by step: as recorded, or drawn where single responses aren't."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from metronome.advise.given import Given
from metronome.advise.measure import grouped
from metronome.errors import ConfigurationError
from metronome.observe.records import Rollout, RunRecord, Step
from metronome.simulate.lengths import Group
from metronome.simulate.training import row_tokens

_SIGMA = 0.6


@dataclass(frozen=True, slots=True)
class StepGroups:
    """One recorded step and the groups that it trained, in the order of their dispatch.

    Attributes:
        step: as recorded.
        groups: ``[groups]`` lengths.
        rollouts: ``[groups]`` the records behind them; empty where lengths were drawn.
    """

    step: Step
    groups: tuple[Group, ...]
    rollouts: tuple[tuple[Rollout, ...], ...]

    def fed(self, *, shared: bool, padded: bool) -> list[int]:
        """``[groups]`` tokens that training passes: separate rows', ``padded`` or not; ``shared``: each prompt once."""
        if shared:
            return [one.prompt_tokens + sum(one.responses) for one in self.groups]
        return [row_tokens(one, padded=padded) for one in self.groups]


def step_groups(run: RunRecord, given: Given, assumed: list[str]) -> tuple[list[StepGroups], bool]:
    """The steps that have groups, and whether the prompts' lengths are known.

    Appends to ``assumed`` what isn't recorded. Raises ConfigurationError where neither responses nor their mean are, or
    the number of groups or G is missing, and for a sigma that would be ignored.
    """
    recorded = grouped(run.rollouts)
    limit = run.settings.get("max_tokens")
    cap = limit if isinstance(limit, int) else None
    known = True
    result = []
    for step in run.steps:
        members = recorded.get(step.number)
        if run.rollouts and not members:
            continue
        prompt = given.prompt_tokens or step.prompt_tokens
        if members is None:
            groups = _drawn(run, step, given, cap, round(prompt or 1), assumed)
            rollouts: tuple[tuple[Rollout, ...], ...] = ()
        else:
            groups, rollouts = _recorded(members, given.prompt_tokens, prompt, cap)
        known = known and all(one.prompt_tokens > 1 for one in groups)
        result.append(StepGroups(step, groups, rollouts))
    if given.sigma is not None and recorded:
        raise ConfigurationError(
            "single responses are recorded, so no lengths are drawn",
            found=f"sigma={given.sigma:g}",
            where=f"the command line, for {run.name}",
            remedy="leave sigma out",
        )
    if not known:
        assumed.append("the prompts' lengths aren't recorded, and count as nothing: give prompt_tokens=N")
    return result, known


def _recorded(
    members: Mapping[str, Sequence[Rollout]], given: float | None, prompt: float | None, cap: int | None
) -> tuple[tuple[Group, ...], tuple[tuple[Rollout, ...], ...]]:
    groups, rollouts = [], []
    for group in members.values():
        own = next((one.prompt_tokens for one in group if one.prompt_tokens is not None), None)
        tokens = given or own or prompt or 1
        groups.append(Group(max(1, round(tokens)), tuple(max(1, one.response_tokens) for one in group), cap))
        rollouts.append(tuple(group))
    return tuple(groups), tuple(rollouts)


def _drawn(
    run: RunRecord, step: Step, given: Given, cap: int | None, prompt: int, assumed: list[str]
) -> tuple[Group, ...]:
    """Lognormal lengths with the step's mean and, where it is recorded, its longest."""
    prompts = step.prompts or _whole(run.settings.get("prompts"))
    size = step.group_size or _whole(run.settings.get("group_size"))
    missing = [text for text, value in (("prompts=64", prompts), ("group_size=8", size)) if not value]
    if missing:
        raise ConfigurationError(
            "the run doesn't record how many groups a step trains, or rollouts a prompt has",
            found=run.name,
            where=f"a run of {run.host}",
            remedy=f"give {' '.join(missing)}",
        )
    if step.response_tokens is None:
        raise ConfigurationError(
            "neither single responses nor their mean length are recorded",
            found=f"step {step.number}",
            where=run.name,
            remedy="; ".join(run.notes) or "record them",
        )
    assert prompts is not None
    assert size is not None
    mean, longest, count = step.response_tokens, step.response_tokens_max, prompts * size
    if given.sigma is not None:
        sigma, how = given.sigma, "as given"
    elif longest is not None and longest > mean:
        z = NormalDist().inv_cdf(1.0 - 1.0 / (count + 1))
        sigma = z - math.sqrt(max(0.0, z * z - 2.0 * math.log(longest / mean)))
        how = "from the steps' mean and longest"
    else:
        sigma, how = _SIGMA, f"{_SIGMA}, assumed: give sigma=N"
    note = f"single responses aren't recorded: their lengths are drawn, lognormal, sigma {how}"
    if note not in assumed:
        assumed.append(note)
    random = np.random.default_rng([step.number, count])
    drawn = mean * np.exp(sigma * random.standard_normal(count) - sigma * sigma / 2.0)
    top = min(value for value in (cap, longest, math.inf) if value is not None)
    lengths = np.maximum(1, np.rint(np.minimum(drawn, top))).astype(int).tolist()
    return tuple(Group(prompt, tuple(lengths[i * size : (i + 1) * size]), cap) for i in range(prompts))


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
