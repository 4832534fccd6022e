"""AReaL: metronome's trainer and configuration classes in place of AReaL's.

from metronome_areal import GRPOConfig, PPOTrainer
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from metronome_areal.config import GRPOConfig, PPOConfig
    from metronome_areal.trainer import PPOTrainer

__all__ = ["GRPOConfig", "PPOConfig", "PPOTrainer"]


def __getattr__(name: str) -> Any:
    # Importing AReaL takes seconds: `metronome doctor` and recipes do without.
    if name == "PPOTrainer":
        from metronome_areal.trainer import PPOTrainer

        return PPOTrainer
    if name in ("GRPOConfig", "PPOConfig"):
        from metronome_areal import config

        return getattr(config, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
