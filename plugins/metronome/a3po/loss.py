"""The A-3PO policy loss (arXiv 2512.06547) and the decoupled losses it is compared with."""

from __future__ import annotations

from functools import partial

import torch

from metronome.a3po.inputs import Inputs
from metronome.a3po.options import A3poOptions
from metronome.a3po.proximal import UNKNOWN, alpha, future_version, loglinear
from metronome.a3po.surrogate import clipped_surrogate
from metronome.contracts import LossBatch, TokenLoss
from metronome.errors import VersionMismatch

_RECOMPUTE = "let the adapter run the extra forward pass (needs_proximal_forward), or set a3po.proximal: loglinear"


class A3po:
    """Decoupled PPO whose proximal policy is interpolated, recomputed, kept or the behaviour policy.

    Per token, everything detached but ``log pi_theta``::

        r = pi_theta / pi_prox        iw = pi_prox / pi_behav
        loss = -iw * min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

    The paper's objective; where ``log pi_prox`` comes from is ``options.proximal`` (see ``A3poOptions``).
    With ``cap_mode: mask`` tokens of ``iw > cap`` have loss zero, with ``truncate`` ``iw = min(iw, cap)``;
    the adapter's denominators count the mask before the cap, in both modes. Always multiplying by iw is
    ours: the authors' released code does so only if its rejection option is set.

    What it is (ours, held by tests): without cap and dual clip the gradient of ``loglinear`` is PPO's on
    ``w = pi_theta / pi_behav`` with the band ``[(1 - clip_low)^(1/alpha), (1 + clip_high)^(1/alpha)]``. At
    staleness 0 and 1 it *is* plain PPO; it acts from staleness 2. The cap drops ``w > cap^(1/(1 - alpha))``.

    Shapes: see ``LossBatch`` and ``TokenLoss``; log-probs in nats. Computed in float32, or in float64 for
    float64 log-probs. In ``reuse`` mode ``TokenLoss.proximal_log_probs`` (0 where not trained) must
    come back in ``LossBatch.proximal_log_probs`` on later visits of the same tokens.

    Raises VersionMismatch for a future version (``strict``), and MetronomeError for wrong shapes, for
    values of trained tokens that aren't finite (how many, and the first), and for missing proximal
    log-probs (``recompute``).
    """

    name = "a3po"

    def __init__(self, options: A3poOptions | None = None) -> None:
        self.options = options or A3poOptions()
        self.needs_proximal_forward = self.options.proximal == "recompute"
        self.keeps_proximal = self.options.proximal == "reuse"

    def __call__(self, batch: LossBatch) -> TokenLoss:
        """The un-normalised loss of each token."""
        options, inputs = self.options, Inputs(batch)
        tally, mask = inputs.tally, inputs.mask
        if options.strict:
            tally.refuse(inputs.staleness < UNKNOWN, partial(_future, inputs.staleness))
        target = inputs.log_probs()
        behavior = inputs.need("behavior_log_probs", "pass the log-probs that the rollout engine sampled with")
        advantages = inputs.need("advantages", "pass one advantage per token")
        proximal = self._proximal(inputs, target, behavior)

        ratio = torch.exp(target - proximal)
        weight = torch.exp(proximal - behavior)
        drift = (target - behavior).detach()
        divergence = torch.expm1(drift) - drift
        inputs.forbid_overflow(ratio, weight, divergence)

        surrogate = clipped_surrogate(ratio, advantages, options.clip_low, options.clip_high, options.dual_clip)
        applied, capped = self._cap(weight)
        trained = mask & ~capped if options.cap_mode == "mask" else mask
        loss = torch.where(trained, -applied * surrogate.objective, 0.0)

        tally.both("staleness", inputs.staleness, among=inputs.staleness >= 0)
        tally.both("importance_weight", weight)
        tally.both("ratio", ratio)
        tally.mean("clipped", surrogate.clipped)
        if surrogate.dual_clipped is not None:
            tally.mean("dual_clipped", surrogate.dual_clipped)
        tally.mean("capped", capped)
        tally.mean("approx_kl", divergence)
        metrics, maxima = tally.read()
        return TokenLoss(loss, metrics, maxima, proximal if self.keeps_proximal else None)

    def _proximal(self, inputs: Inputs, target: torch.Tensor, behavior: torch.Tensor) -> torch.Tensor:
        mode = self.options.proximal
        if mode == "recompute":
            return inputs.need("proximal_log_probs", _RECOMPUTE)
        if mode == "behavior":
            return behavior
        given = inputs.take("proximal_log_probs")
        if mode == "reuse":
            return target.detach() if given is None else given
        share = alpha(
            inputs.staleness,
            inputs.batch.step_fraction,
            self.options.fresh,
            strict=False,  # the tally refuses future versions without a transfer of its own
            dtype=inputs.dtype,
        )
        approximated = loglinear(behavior, target, share)
        if given is not None:
            inputs.tally.both("proximal_error", (approximated - given).abs())
        return approximated

    def _cap(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The factor that is applied, and the tokens whose importance weight is above the cap."""
        if not self.options.importance_weight:
            return torch.ones_like(weight), torch.zeros_like(weight, dtype=torch.bool)
        if self.options.cap is None:
            return weight, torch.zeros_like(weight, dtype=torch.bool)
        return weight.clamp(max=self.options.cap), weight > self.options.cap


def _future(staleness: torch.Tensor, count: int, first: int) -> VersionMismatch:
    return future_version(count, first, int(staleness[first]))
