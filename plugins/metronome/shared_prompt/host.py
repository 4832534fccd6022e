"""``attention: host``: the host's own attention, one row a rollout, nothing shared."""

from __future__ import annotations

from typing import TYPE_CHECKING

from metronome.contracts import AttentionNeed
from metronome.errors import ConfigurationError

if TYPE_CHECKING:
    from torch import Tensor

    from metronome.shared_prompt.plan import SharedPromptPlan


class HostAttention:
    """Tells an adapter to leave rows and attention as the host has them."""

    name = "host"
    shares_prompt = False

    def supports(self, need: AttentionNeed) -> str | None:
        """Always None: the host knows its own model."""
        return None

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: SharedPromptPlan,
        scale: float,
        *,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Raises ConfigurationError: rows whose prompt is shared need a backend that shares it."""
        raise ConfigurationError(
            "the host's own attention can't read a row whose prompt stands once",
            where="metronome.attention",
            remedy="attention: shared_prompt",
        )
