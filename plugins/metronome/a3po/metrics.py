"""The losses' metrics by name, and ``Meter``, which merges them over micro-batches and ranks.

Every metric is over the trained tokens, before the cap:

- ``staleness``: versions, tokens of known version only (mean, max)
- ``importance_weight``: ``pi_prox / pi_behav`` before the cap (mean, max)
- ``ratio``: ``pi_theta / pi_prox``, for ``ppo`` against its anchor (mean, max)
- ``clipped``: fraction of tokens whose minimum is the clipped branch; they carry no gradient
- ``dual_clipped``: fraction bounded by ``dual_clip`` (only where it is set)
- ``capped``: fraction with an importance weight above the cap
- ``proximal_error``: ``|approximated - recomputed log pi_prox|``, nats (mean, max; only where both are there)
- ``approx_kl``: ``w - 1 - log w`` for ``w = pi_theta / pi_behav`` (``ppo``: its ratio), nats; estimates
  KL(behaviour || theta) without bias on the behaviour policy's samples

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping


class Meter:
    """Sums, counts and maxima of ``TokenLoss`` metrics over any number of micro-batches.

    The result doesn't depend on how tokens fell into micro-batches: means are sum of sums / sum of counts.
    """

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, float]] = {}
        self.maxima: dict[str, float] = {}

    def add(self, metrics: Mapping[str, tuple[float, float]], maxima: Mapping[str, float]) -> None:
        """Adds ``TokenLoss.metrics`` and ``TokenLoss.maxima``, or another meter's ``sums`` and ``maxima``."""
        for name, (total, count) in metrics.items():
            so_far = self.sums.get(name, (0.0, 0.0))
            self.sums[name] = (so_far[0] + total, so_far[1] + count)
        for name, value in maxima.items():
            self.maxima[name] = max(value, self.maxima.get(name, value))

    def result(self) -> dict[str, float]:
        """``name`` -> mean (left out where nothing was counted) and ``name_max`` -> maximum."""
        means = {name: total / count for name, (total, count) in self.sums.items() if count}
        return {**means, **{f"{name}_max": value for name, value in self.maxima.items()}}
