"""Checks and metric sums of one batch, kept on its device and read in one transfer."""

from __future__ import annotations

from collections.abc import Callable

import torch

from metronome.errors import MetronomeError

Error = Callable[[int, int], MetronomeError]
"""(number of offending tokens, position of the first) -> the error."""


class Tally:
    """Collects device scalars; ``read`` brings them over at once.

    Args:
        mask: bool ``[T]``, the trained tokens; every mean and maximum is over these.
        dtype: of the sums.
    """

    def __init__(self, mask: torch.Tensor, dtype: torch.dtype) -> None:
        self._mask, self._dtype = mask, dtype
        self._means: list[str] = []
        self._maxima: list[str] = []
        self._refusals: list[tuple[torch.Tensor, Error]] = []
        self._mean_scalars: list[torch.Tensor] = []
        self._max_scalars: list[torch.Tensor] = []
        self._counts: list[torch.Tensor] = []

    def mean(self, name: str, values: torch.Tensor, among: torch.Tensor | None = None) -> None:
        """Adds sum and count of ``values [T]`` over the trained tokens (of them, those in ``among``)."""
        where = self._mask if among is None else self._mask & among
        kept = torch.where(where, values.detach().to(self._dtype), 0.0)
        self._means.append(name)
        self._mean_scalars += [kept.sum(), where.sum().to(self._dtype)]

    def largest(self, name: str, values: torch.Tensor, among: torch.Tensor | None = None) -> None:
        """Adds the largest of ``values [T]``; no entry if there is no such token."""
        if values.numel() == 0:
            return
        where = self._mask if among is None else self._mask & among
        kept = torch.where(where, values.detach().to(self._dtype), float("-inf"))
        self._maxima.append(name)
        self._max_scalars.append(kept.amax())

    def both(self, name: str, values: torch.Tensor, among: torch.Tensor | None = None) -> None:
        """``mean`` and ``largest`` under one name."""
        self.mean(name, values, among)
        self.largest(name, values, among)

    def refuse(self, offending: torch.Tensor, error: Error) -> None:
        """Makes ``read`` raise ``error(count, first)`` if any of ``offending`` is True."""
        self._refusals.append((offending, error))
        self._counts.append(offending.sum().to(self._dtype))

    def read(self) -> tuple[dict[str, tuple[float, float]], dict[str, float]]:
        """Metrics name -> (sum, count) and maxima name -> value; raises the first refusal that holds."""
        scalars = [*self._counts, *self._mean_scalars, *self._max_scalars]
        values: list[float] = torch.stack(scalars).tolist() if scalars else []
        for (offending, error), count in zip(self._refusals, values, strict=False):
            if count:
                raise error(int(count), int(offending.nonzero()[0]))
        rest = values[len(self._counts) :]
        metrics = {name: (rest[2 * i], rest[2 * i + 1]) for i, name in enumerate(self._means)}
        highest = zip(self._maxima, rest[2 * len(self._means) :], strict=True)
        return metrics, {name: value for name, value in highest if value != float("-inf")}
