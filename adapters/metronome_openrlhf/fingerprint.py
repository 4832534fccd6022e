"""A number that changes with an engine's weights; called by name in vLLM's own process, so it imports torch alone."""

from __future__ import annotations

from typing import Any

import torch


def fingerprint(worker: Any) -> float:
    """The sum over all parameters of this worker of ``|w|``, in float64."""
    weights = worker.model_runner.model.parameters()
    return float(sum(weight.detach().to(torch.float64).abs().sum() for weight in weights))
