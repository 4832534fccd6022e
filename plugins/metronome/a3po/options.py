"""Options of the losses ``a3po`` and ``ppo``; nothing here imports torch."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import field_validator, model_validator

from metronome.settings import Options

Proximal = Literal["loglinear", "recompute", "reuse", "behavior"]
Fresh = Literal["behavior", "target"]


class ClipOptions(Options):
    """The clip that both losses share.

    Attributes:
        clip_low: the ratio is clipped from below at ``1 - clip_low``; 0 < clip_low < 1.
        clip_high: the ratio is clipped from above at ``1 + clip_high``; > 0.
        dual_clip: bound ``c > 1`` of the ratio where the advantage is negative, or None (Dual-Clip PPO,
            arXiv 1912.09729: ``max(min(r A, clip(r) A), c A)``).
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None

    @field_validator("clip_low")
    @classmethod
    def _low(cls, value: float) -> float:
        if not 0 < value < 1:
            raise ValueError("set clip_low between 0 and 1, for example 0.2")
        return value

    @field_validator("clip_high")
    @classmethod
    def _high(cls, value: float) -> float:
        if not (value > 0 and math.isfinite(value)):
            raise ValueError("set clip_high above 0, for example 0.2")
        return value

    @field_validator("dual_clip")
    @classmethod
    def _dual(cls, value: float | None) -> float | None:
        if value is not None and not (value > 1 and math.isfinite(value)):
            raise ValueError("set dual_clip above 1, for example 3.0, or null for none")
        return value


class A3poOptions(ClipOptions):
    """Options of ``a3po``.

    Attributes:
        proximal: where ``log pi_prox`` comes from. ``loglinear``: A-3PO's interpolation. ``recompute``: an
            extra forward pass (decoupled PPO). ``reuse``: the log-probs of the first visit, kept for later
            visits. ``behavior``: the behaviour policy, i.e. plain PPO.
        fresh: the anchor of ``loglinear`` at staleness 0: ``behavior`` (alpha 1) or ``target`` (alpha 0).
        cap: bound of the importance weight ``pi_prox / pi_behav``, >= 1, or None.
        cap_mode: ``mask`` drops a token above the cap, ``truncate`` lowers its weight to the cap.
        importance_weight: whether the loss is multiplied by the importance weight. Without it the gradient is
            the tempered estimator with weight ``w^alpha``, ``w = pi_theta / pi_behav`` (ours to name).
        strict: whether a version later than the one in training is an error rather than an unknown one.
    """

    proximal: Proximal = "loglinear"
    fresh: Fresh = "behavior"
    cap: float | None = 5.0
    cap_mode: Literal["mask", "truncate"] = "mask"
    importance_weight: bool = True
    strict: bool = True

    @field_validator("cap")
    @classmethod
    def _cap(cls, value: float | None) -> float | None:
        if value is not None and not (value >= 1 and math.isfinite(value)):
            raise ValueError("set cap to 1 or more, for example 5.0, or null for none")
        return value

    @model_validator(mode="after")
    def _has_effect(self) -> A3poOptions:
        written = self.changed()
        if "fresh" in written and self.proximal != "loglinear":
            raise ValueError("fresh is the anchor of the interpolation: remove fresh, or set proximal: loglinear")
        weighing = [
            name
            for name in ("cap", "cap_mode", "importance_weight")
            if name in written and getattr(self, name) is not None
        ]
        if weighing and self.proximal == "behavior":
            raise ValueError(
                f"the importance weight is 1 under proximal: behavior: remove {', '.join(weighing)}, "
                "or set proximal: loglinear"
            )
        if "cap_mode" in written and self.cap is None:
            raise ValueError("cap_mode says what a cap does: remove cap_mode, or set cap: 5.0")
        bounding = [name for name in ("cap", "cap_mode") if name in written and getattr(self, name) is not None]
        if bounding and not self.importance_weight:
            raise ValueError(
                f"the cap bounds the importance weight: remove {', '.join(bounding)}, or set importance_weight: true"
            )
        return self


class PpoOptions(ClipOptions):
    """Options of ``ppo``.

    Attributes:
        anchor: the ratio's denominator. ``old``: the trainer's log-probs at the sample's version, or the
            behaviour policy's where the host has none. ``behavior``: always the behaviour policy's.
    """

    anchor: Literal["old", "behavior"] = "old"
