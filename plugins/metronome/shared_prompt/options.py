"""The options of ``attention: shared_prompt``."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field, model_validator

from metronome.settings import Options

Backend = Literal["auto", "reference", "cascade", "varlen", "flex", "npu", "npu_cascade"]
BACKENDS: tuple[str, ...] = get_args(Backend)[1:]
"""What computes attention; ``auto`` chooses among them."""


class SharedPromptOptions(Options):
    """Options under ``metronome.shared_prompt``.

    Attributes:
        backend: ``auto`` picks by device, dtype, lengths and what is installed, and says what it picked and why.
        self_check: compare with the reference, and with separate rows, at the first use and its real lengths.
        self_check_tolerance: largest difference of a response token's log-prob, relative to ``1 + |log p|``, that
            passes (their mean may reach a tenth of it); None: 3e-6 in float64, 1e-3 in float32, 0.5 in half
            precision.
    """

    backend: Backend = "auto"
    self_check: bool = True
    self_check_tolerance: float | None = Field(default=None, gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _has_effect(self) -> SharedPromptOptions:
        if "self_check_tolerance" in self.changed() and not self.self_check:
            raise ValueError("self_check_tolerance is the self-check's: remove it, or set self_check: true")
        return self
