"""Importance-weighted REINFORCE with a capped weight."""

from __future__ import annotations

import torch

from metronome.contracts import LossBatch, TokenLoss


class Reinforce:
    """loss_t = -min(w_t, cap) A_t log pi_theta(t) with w_t = pi_theta(t) / behavior(t) detached; ``[T]``."""

    name = "reinforce"
    needs_proximal_forward = False
    keeps_proximal = False

    def __init__(self, cap: float | None = 2.0) -> None:
        self.cap = cap

    def __call__(self, batch: LossBatch) -> TokenLoss:
        """The un-normalised loss of each token, zero where the mask is False."""
        dtype = torch.float64 if batch.log_probs.dtype == torch.float64 else torch.float32
        zero = torch.zeros((), dtype=dtype, device=batch.log_probs.device)
        log_probs = torch.where(batch.mask, batch.log_probs.to(dtype), zero)
        behavior = torch.where(batch.mask, batch.behavior_log_probs.detach().to(dtype), zero)
        advantages = torch.where(batch.mask, batch.advantages.detach().to(dtype), zero)
        weights = torch.exp(log_probs.detach() - behavior)
        capped = weights if self.cap is None else weights.clamp(max=self.cap)
        kept = weights[batch.mask]
        return TokenLoss(
            loss=-capped * advantages * log_probs,
            metrics={"reinforce/weight": (float(kept.sum()), float(kept.numel()))},
            maxima={"reinforce/weight": float(kept.max())} if kept.numel() else {},
        )
