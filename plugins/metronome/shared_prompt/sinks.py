"""Attention sinks, added to a softmax that is already done: a sink s of a head adds ``exp(s)`` to the denominator.

With output o and log-sum-exp l of the softmax without it: ``l' = log(exp l + exp s)``, ``o' = o exp(l - l')``.
The kernels' backward, given o' and l', is the joint softmax's; the sink's own gradient is
``-sum exp(s - l') (dO o')``.
"""

from __future__ import annotations

import torch
from torch import Tensor


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """``out [..,H,V], lse [..,H], sinks [H]``: the output and log-sum-exp with the sinks in the denominator."""
    total = torch.logaddexp(lse, sinks.to(lse.dtype))
    return out * torch.exp(lse - total)[..., None].to(out.dtype), total


def sinks_gradient(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """``[H]``, from what ``add_sinks`` returned: ``grad [S,H,V], out [S,H,V], lse [S,H]``."""
    dot = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return -(torch.exp(sinks.to(lse.dtype) - lse) * dot).sum(0).to(sinks.dtype)
