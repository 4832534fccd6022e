"""The loss denominator under streaming: a constant scale while groups arrive, one rescale at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from metronome.errors import ConfigurationError, nearest


@dataclass(frozen=True)
class Counts:
    """Rows and trained tokens; they add over micro-batches and over ranks."""

    rows: int = 0
    tokens: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.rows + other.rows, self.tokens + other.tokens)


class StreamingNormalizer:
    """Row factors known before the last arrival, and the one factor on the gradient that makes them exact.

    The objective over the rows i that were trained, with token losses l_it, N rows, lengths |o_i| in
    *trained* tokens (mask True) and L = ``max_tokens``:

        seq-mean            (1/N) sum_i (1/|o_i|) sum_t l_it      GRPO
        token-mean          (1/sum_i |o_i|) sum_i sum_t l_it      DAPO
        dr-grpo             (1/(N L)) sum_i sum_t l_it            Dr.GRPO
        seq-mean-token-sum  (1/N) sum_i sum_t l_it

    With E = ``expected_rows`` each is ``final * sum_i w_i sum_t l_it``:

        mode                w_i            final
        seq-mean            1/(E |o_i|)    E / N
        token-mean          1/(E L)        E L / sum_i |o_i|
        dr-grpo             1/(E L)        E / N
        seq-mean-token-sum  1/E            E / N

    No w_i depends on other rows, so neither order nor split matters. Groups that a filter removed are never
    counted: N is what was trained, and ``final`` makes up for the rows that E expected in vain. A row without
    trained tokens adds nothing to the sum but counts as a row. KL and entropy terms take the same factors.
    Use one object per period. Under data parallelism give every rank the same E, sum the gradients and the
    ``counts`` over ranks, and hand the global counts to ``final_factor``.

    Args:
        mode: one of ``MODES``.
        expected_rows: rows of the whole period, over all ranks (> 0).
        max_tokens: longest response in tokens (> 0); Dr.GRPO's constant, and token-mean's scale.

    Raises ConfigurationError for an unknown mode or a number below 1.
    """

    MODES = ("seq-mean", "token-mean", "dr-grpo", "seq-mean-token-sum")

    def __init__(self, mode: str, *, expected_rows: int, max_tokens: int) -> None:
        if mode not in self.MODES:
            raise ConfigurationError(
                "unknown loss normaliser",
                found=mode,
                where="the loss normaliser",
                remedy=nearest(mode, self.MODES),
            )
        for name, value in (("expected_rows", expected_rows), ("max_tokens", max_tokens)):
            if value < 1:
                raise ConfigurationError(
                    f"{name} must be positive",
                    found=value,
                    where="the loss normaliser",
                    remedy=f"{name}: 1 or more",
                )
        self.mode, self.expected_rows, self.max_tokens = mode, expected_rows, max_tokens
        self._counts = Counts()

    @property
    def counts(self) -> Counts:
        """Rows and trained tokens seen so far on this rank."""
        return self._counts

    def row_weights(self, lengths: Sequence[int]) -> list[float]:
        """``[rows]`` factor of each row on sum_t l_it; counts the rows, so ask once for each row trained.

        Args:
            lengths: ``[rows]`` trained tokens of each row, 0 or more.
        """
        self._counts += Counts(len(lengths), sum(lengths))
        if self.mode == "seq-mean":
            return [1.0 / (self.expected_rows * length) if length else 0.0 for length in lengths]
        return [1.0 / self._scale()] * len(lengths)

    def final_factor(self, counts: Counts | None = None) -> float:
        """The factor on the accumulated gradient, before the clip; 0.0 if nothing was trained.

        Exactly 1.0 when as many rows came as were expected, but for token-mean, which always rescales.

        Args:
            counts: global counts after an all-reduce; this rank's own by default.
        """
        counts = self._counts if counts is None else counts
        if self.mode == "token-mean":
            return self._scale() / counts.tokens if counts.tokens else 0.0
        return self.expected_rows / counts.rows if counts.rows else 0.0

    def _scale(self) -> int:
        return self.expected_rows * (1 if self.mode == "seq-mean-token-sum" else self.max_tokens)
