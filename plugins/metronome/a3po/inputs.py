"""A loss batch checked, promoted, and made safe where tokens aren't trained."""

from __future__ import annotations

import torch

from metronome.a3po.tally import Tally
from metronome.contracts import LossBatch
from metronome.errors import MetronomeError

_FLOATS = ("log_probs", "behavior_log_probs", "old_log_probs", "advantages", "proximal_log_probs")


class Inputs:
    """The tensors of one ``LossBatch`` as a loss reads them, and the tally of its checks and metrics.

    Shapes and dtypes are checked here; what depends on values (not finite, row boundaries) is noted in
    ``tally`` and raised by ``tally.read``, so that a batch costs one transfer from the device.

    Attributes:
        dtype: float64 for float64 log-probs, else float32.
        mask: bool ``[T]``.
        staleness: int64 ``[T]``, -1 where the token isn't trained.
        tally: the checks and metrics so far.
    """

    def __init__(self, batch: LossBatch) -> None:
        _check_shapes(batch)
        self.batch = batch
        self.dtype = torch.float64 if batch.log_probs.dtype == torch.float64 else torch.float32
        self.mask = batch.mask
        self.staleness = batch.staleness.masked_fill(~batch.mask, -1)
        self.tally = Tally(batch.mask, self.dtype)
        self._check_rows()

    def log_probs(self) -> torch.Tensor:
        """log pi_theta ``[T]`` with gradient, 0 (and without gradient) where the token isn't trained."""
        return self._safe("log_probs", self.batch.log_probs)

    def take(self, name: str) -> torch.Tensor | None:
        """The detached tensor ``[T]`` called ``name``, 0 where the token isn't trained; None if it's None."""
        tensor: torch.Tensor | None = getattr(self.batch, name)
        return None if tensor is None else self._safe(name, tensor.detach())

    def need(self, name: str, remedy: str) -> torch.Tensor:
        """``take``, but raises MetronomeError with ``remedy`` if the tensor is None."""
        tensor = self.take(name)
        if tensor is None:
            raise MetronomeError(f"{name} is missing", where=f"LossBatch.{name}", remedy=remedy)
        return tensor

    def forbid_overflow(self, *weights: torch.Tensor) -> None:
        """Notes trained tokens whose log-probs lie so far apart that one of ``weights`` isn't finite."""

        def error(count: int, first: int) -> MetronomeError:
            return MetronomeError(
                f"log-probs of {count} trained token(s) lie so far apart that their ratio overflows",
                found=float(self.batch.log_probs.detach()[first]),
                where=f"LossBatch.log_probs against behavior_log_probs, first at token {first}",
                remedy="check that the rollout engine returns log-probs of the sampled tokens",
            )

        finite = torch.stack([weight.detach().isfinite() for weight in weights]).all(0)
        self.tally.refuse(self.mask & ~finite, error)

    def _safe(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        def error(count: int, first: int) -> MetronomeError:
            return MetronomeError(
                f"{name} of {count} trained token(s) isn't finite",
                found=float(tensor.detach()[first]),
                where=f"LossBatch.{name}, first at token {first}",
                remedy="find what produced it, or set the mask to False for tokens that aren't trained",
            )

        self.tally.refuse(self.mask & ~tensor.detach().isfinite(), error)
        # Before any exp: a NaN behind the mask must not reach the gradient as 0 * NaN.
        return torch.where(self.mask, tensor.to(self.dtype), 0.0)

    def _check_rows(self) -> None:
        bounds, tokens = self.batch.cu_seqlens, self.batch.log_probs.shape[0]
        rising = (bounds[1:] < bounds[:-1]).any()
        wrong = (bounds[0] != 0) | (bounds[-1] != tokens) | rising

        def error(_count: int, _first: int) -> MetronomeError:
            return MetronomeError(
                f"row boundaries must rise from 0 to the {tokens} tokens of the batch",
                found=bounds.tolist(),
                where="LossBatch.cu_seqlens",
                remedy="pass the cumulative row lengths, starting at 0",
            )

        self.tally.refuse(wrong.reshape(1), error)


def _check_shapes(batch: LossBatch) -> None:
    if batch.log_probs.dim() != 1:
        raise _wrong("log_probs", "must be packed in one dimension [T]", list(batch.log_probs.shape))
    for name in (*_FLOATS, "mask", "staleness"):
        tensor = getattr(batch, name)
        if tensor is None:  # whether a loss needs it is the loss's to say: Inputs.need
            continue
        if tensor.shape != batch.log_probs.shape:
            shape = list(batch.log_probs.shape)
            raise _wrong(name, f"must have the shape of log_probs, {shape}", list(tensor.shape))
        if name in _FLOATS and not tensor.is_floating_point():
            raise _wrong(name, "must be a floating-point tensor", str(tensor.dtype))
    if batch.mask.dtype != torch.bool:
        raise _wrong("mask", "must be a bool tensor", str(batch.mask.dtype))
    for name in ("staleness", "cu_seqlens"):
        tensor = getattr(batch, name)
        if tensor.is_floating_point() or tensor.dtype == torch.bool:
            raise _wrong(name, "must be an integer tensor", str(tensor.dtype))
    if batch.cu_seqlens.dim() != 1 or batch.cu_seqlens.numel() == 0:
        raise _wrong("cu_seqlens", "must have the shape [rows + 1]", list(batch.cu_seqlens.shape))


def _wrong(name: str, what: str, found: object) -> MetronomeError:
    return MetronomeError(
        f"{name} {what}",
        found=found,
        where=f"LossBatch.{name}",
        remedy="build the batch as metronome.contracts.LossBatch describes",
    )
