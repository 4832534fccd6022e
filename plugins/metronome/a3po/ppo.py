"""Plain clipped PPO with separate bounds and an optional dual clip (arXiv 1707.06347)."""

from __future__ import annotations

import torch

from metronome.a3po.inputs import Inputs
from metronome.a3po.options import PpoOptions
from metronome.a3po.surrogate import clipped_surrogate
from metronome.contracts import LossBatch, TokenLoss

_BEHAVIOR = "pass the log-probs that the rollout engine sampled with"


class Ppo:
    """``loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`` with ``r = pi_theta / pi_anchor``.

    The anchor is the trainer's policy at the sample's version (``LossBatch.old_log_probs``; the behaviour
    policy where that is None) or, with ``anchor: behavior``, always the behaviour policy. The clipped objective of the
    PPO paper; separate bounds after DAPO (arXiv 2503.14476). On policy the gradient is
    REINFORCE's.

    Shapes: see ``LossBatch`` and ``TokenLoss``; log-probs in nats. Computed in float32, or in float64 for
    float64 log-probs. Raises MetronomeError for wrong shapes and for values of trained tokens that
    aren't finite.
    """

    name = "ppo"
    needs_proximal_forward = False
    keeps_proximal = False

    def __init__(self, options: PpoOptions | None = None) -> None:
        self.options = options or PpoOptions()

    def __call__(self, batch: LossBatch) -> TokenLoss:
        """The un-normalised loss of each token."""
        options, inputs = self.options, Inputs(batch)
        target = inputs.log_probs()
        anchor = inputs.take("old_log_probs") if options.anchor == "old" else None
        if anchor is None:
            anchor = inputs.need("behavior_log_probs", _BEHAVIOR)
        advantages = inputs.need("advantages", "pass one advantage per token")

        drift = target - anchor
        ratio = torch.exp(drift)
        inputs.forbid_overflow(ratio)
        surrogate = clipped_surrogate(ratio, advantages, options.clip_low, options.clip_high, options.dual_clip)
        loss = torch.where(inputs.mask, -surrogate.objective, 0.0)

        tally = inputs.tally
        tally.both("staleness", inputs.staleness, among=inputs.staleness >= 0)
        tally.both("ratio", ratio)
        tally.mean("clipped", surrogate.clipped)
        if surrogate.dual_clipped is not None:
            tally.mean("dual_clipped", surrogate.dual_clipped)
        drift = drift.detach()
        tally.mean("approx_kl", torch.expm1(drift) - drift)
        metrics, maxima = tally.read()
        return TokenLoss(loss, metrics, maxima)
