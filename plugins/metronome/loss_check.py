"""A policy loss called by an adapter: what a stranger's loss gets wrong is one PluginError that names it."""

from __future__ import annotations

from typing import NoReturn

import torch

from metronome.contracts import LossBatch, PolicyLoss, TokenLoss
from metronome.errors import PluginError, guarded

_SHAPE = "return one un-normalised loss per packed token, the shape of LossBatch.log_probs"


def checked_token_loss(loss: PolicyLoss, batch: LossBatch) -> TokenLoss:
    """``loss(batch)``, held to the part of the contract that tensors show without their values.

    The loss must be a floating-point ``[T]`` tensor on the device of ``log_probs`` and carry a gradient where
    they do (T > 0). Nothing is read from the device.

    Raises PluginError, naming ``loss.name``, for a breach and for whatever the loss raises; a MetronomeError of
    its own goes through.
    """
    result = guarded(lambda: loss(batch), f"policy loss {loss.name!r} raised", where="metronome.loss")
    if not isinstance(result, TokenLoss):
        _breach(loss, "returned no TokenLoss", type(result).__name__, "return metronome.contracts.TokenLoss(loss)")
    tokens, wanted = result.loss, batch.log_probs
    if not isinstance(tokens, torch.Tensor):
        _breach(loss, "returned a loss that is no tensor", type(tokens).__name__, _SHAPE)
    if tokens.shape != wanted.shape:
        _breach(loss, f"must return a loss of shape {list(wanted.shape)}", list(tokens.shape), _SHAPE)
    if not tokens.is_floating_point():
        _breach(loss, "must return a floating-point loss", str(tokens.dtype), "float32, or float64 for float64 inputs")
    if tokens.device != wanted.device:
        _breach(loss, f"must return its loss on {wanted.device}", str(tokens.device), "compute where log_probs are")
    if wanted.requires_grad and wanted.numel() and not tokens.requires_grad:
        _breach(loss, "returned a loss without a gradient", None, "don't detach log_probs, nor compute under no_grad")
    return result


def _breach(loss: PolicyLoss, what: str, found: object, remedy: str) -> NoReturn:
    raise PluginError(f"policy loss {loss.name!r} {what}", found=found, where="metronome.loss", remedy=remedy)
