"""How many prompt groups a step gets when G changes: two budgets, one rounding rule."""

from __future__ import annotations

from typing import Literal

from metronome.errors import ConfigurationError

Budget = Literal["fixed_rollouts", "fixed_prompts"]


def prompts(budget: Budget, rollout_budget: int, multiple: int, *, size: int, largest: int) -> int:
    """Prompt groups of the next step, P.

    ``fixed_rollouts``: ``floor(R / G)``, as many rollouts whatever G is, so smaller groups mean more prompts.
    ``fixed_prompts``: ``floor(R / largest)``, the same prompts whatever G is, so smaller groups mean fewer
    rollouts (the paper's rows; docs/techniques/sagc.md).

    Then the rule: P is rounded DOWN to ``multiple``, and is at least ``multiple``. Nothing is padded: the
    step has exactly P * G rollouts. That is at most R, except where R itself is too small for one
    ``multiple`` of groups. A host that needs P * G to be a multiple of M passes ``multiple = M / gcd(M, G)``.

    Args:
        budget: which of the two.
        rollout_budget: R, rollouts a step (>= 1).
        multiple: the number of groups that the host can split evenly (>= 1).
        size: G of the next step.
        largest: the largest G that may ever be chosen.

    Raises ConfigurationError for a budget or multiple below 1.
    """
    for name, value in (("rollout_budget", rollout_budget), ("multiple", multiple)):
        if value < 1:
            raise ConfigurationError(
                f"{name} must be at least 1", found=value, where=f"prompts({name})", remedy=f"{name} >= 1"
            )
    groups = rollout_budget // (size if budget == "fixed_rollouts" else largest)
    return max(multiple, groups - groups % multiple)
