"""The facts of a recorded run that decide what pays: stragglers, lengths, idle time, staleness, the proximal pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from metronome.observe.records import Rollout, RunRecord, Step
from metronome.sagc.events import straggler_ratio
from metronome.sagc.options import SagcOptions

TAU = SagcOptions().tau

MUCH = 0.2
"""Share of the steps' seconds in no recorded part from which on that is said beside what is derived from them."""

_PARTS = ("training", "proximal", "old_log_probs", "reference", "optimizer", "publication")


@dataclass(frozen=True, slots=True)
class Facts:
    """Measured, nothing simulated; None: not recorded.

    Attributes:
        steps, groups, rollouts: how many were recorded.
        step_seconds: mean of a step.
        straggler_ratio: mean over groups of longest over median response.
        straggler_rate: share of groups whose ratio is above SAGC's default ``tau`` (2.0, ours).
        straggling_steps: share of steps whose mean ratio is above it.
        prompt_tokens, response_tokens: mean; ``response_tokens_max`` the longest.
        truncated: share of responses at the length limit.
        trainer_idle: share of the steps' seconds in which the trainer had nothing to train.
        rollout_idle: share of the workers' seconds outside their generation.
        unrecorded: share of the steps' seconds in no recorded part; None where that can't be told.
        staleness_mean, staleness_max: of trained responses, in versions, by their first token.
        proximal_share, old_log_probs_share: of the steps' seconds.
        degenerate: share of groups whose rewards are all alike.
    """

    steps: int
    groups: int
    rollouts: int
    step_seconds: float
    straggler_ratio: float | None
    straggler_rate: float | None
    straggling_steps: float | None
    prompt_tokens: float | None
    response_tokens: float | None
    response_tokens_max: float | None
    truncated: float | None
    trainer_idle: float | None
    rollout_idle: float | None
    unrecorded: float | None
    staleness_mean: float | None
    staleness_max: int | None
    proximal_share: float | None
    old_log_probs_share: float | None
    degenerate: float | None


def grouped(rollouts: Iterable[Rollout]) -> dict[int, dict[str, list[Rollout]]]:
    """Step -> prompt -> its responses, prompts in the order of their first start (else as recorded)."""
    steps: dict[int, dict[str, list[Rollout]]] = defaultdict(dict)
    for one in rollouts:
        steps[one.step].setdefault(one.prompt, []).append(one)
    for step, groups in steps.items():
        order = sorted(
            groups.items(), key=lambda item: min((r.start for r in item[1] if r.start is not None), default=0.0)
        )
        steps[step] = dict(order)
    return steps


def measure(run: RunRecord) -> Facts:
    """The facts of ``run``; it has at least one step."""
    steps = grouped(run.rollouts)
    groups = [group for of_step in steps.values() for group in of_step.values()]
    by_step = [
        [straggler_ratio([one.response_tokens for one in group]) for group in of_step.values()]
        for of_step in steps.values()
    ]
    ratios = [ratio for of_step in by_step for ratio in of_step]
    limit = run.settings.get("max_tokens")
    lengths = [one.response_tokens for one in run.rollouts]
    stale = [
        one.trained_version - one.version
        for one in run.rollouts
        if one.version is not None and one.trained_version is not None
    ]
    rewarded = [[one.reward for one in group] for group in groups if all(one.reward is not None for one in group)]
    total = sum(step.seconds for step in run.steps)
    prompts = [one.prompt_tokens for one in run.rollouts if one.prompt_tokens is not None]
    return Facts(
        steps=len(run.steps),
        groups=len(groups) or sum(step.prompts or 0 for step in run.steps),
        rollouts=len(lengths) or sum((step.prompts or 0) * (step.group_size or 0) for step in run.steps),
        step_seconds=total / len(run.steps),
        straggler_ratio=_mean(ratios),
        straggler_rate=_mean([float(ratio > TAU) for ratio in ratios]),
        straggling_steps=_mean([float(fmean(of_step) > TAU) for of_step in by_step]),
        prompt_tokens=_mean(prompts) or _mean(_recorded(run.steps, "prompt_tokens")),
        response_tokens=_mean(lengths) or _mean(_recorded(run.steps, "response_tokens")),
        response_tokens_max=max([*map(float, lengths), *_recorded(run.steps, "response_tokens_max")], default=None),
        truncated=_mean([float(one >= limit) for one in lengths]) if isinstance(limit, int) else None,
        trainer_idle=_trainer_idle(run, total),
        rollout_idle=_rollout_idle(run, total),
        unrecorded=_unrecorded(run, total),
        staleness_mean=_mean(stale),
        staleness_max=max(stale, default=None),
        proximal_share=_share(run.steps, "proximal", total),
        old_log_probs_share=_share(run.steps, "old_log_probs", total),
        degenerate=_mean([float(len(set(rewards)) == 1) for rewards in rewarded]),
    )


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _recorded(steps: Sequence[Step], name: str) -> list[float]:
    return [value for step in steps if (value := getattr(step, name)) is not None]


def _share(steps: Sequence[Step], name: str, total: float) -> float | None:
    values = _recorded(steps, name)
    return sum(values) / total if values and total > 0.0 else None


def _trainer_idle(run: RunRecord, total: float) -> float | None:
    """Waiting; in turns with generation, where waiting isn't recorded, the generation."""
    waiting = _share(run.steps, "waiting", total)
    if waiting is None and run.source in ("synchronous", "colocated"):
        return _share(run.steps, "generation", total)
    return waiting


def _unrecorded(run: RunRecord, total: float) -> float | None:
    """What waiting (in turns: generation) and the trainer's parts leave of the steps' seconds."""
    idle = _trainer_idle(run, total)
    if idle is None or total <= 0.0 or any(step.training is None for step in run.steps):
        return None
    return max(0.0, 1.0 - idle - sum(sum(_recorded(run.steps, name)) for name in _PARTS) / total)


def _rollout_idle(run: RunRecord, total: float) -> float | None:
    lanes = [(span.lane, span.start, span.end) for span in run.spans if span.kind == "generate"]
    if not lanes or total <= 0.0:
        return None
    busy = 0.0
    for lane in {one[0] for one in lanes}:
        reached = float("-inf")
        for _, start, end in sorted(one for one in lanes if one[0] == lane):
            busy += max(0.0, end - max(start, reached))
            reached = max(reached, end)
    return max(0.0, 1.0 - busy / total / len({one[0] for one in lanes}))
