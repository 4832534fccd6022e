"""OpenRLHF's reference worker, over shared prompts where the actor's are."""

from __future__ import annotations

from typing import Any

from openrlhf.trainer.ray import launcher

from metronome_openrlhf.config import part_of

_Base: Any = launcher.ReferenceModelActor.__ray_metadata__.modified_class
"""The class behind OpenRLHF's Ray actor, which can't be subclassed itself."""


class MetronomeReference(_Base):
    """OpenRLHF's ``ReferenceModelActor``; its model shares prompts if the run does."""

    def init_model_from_pretrained(self, strategy: Any, pretrain: str) -> None:
        """OpenRLHF's, with our actor model where it looks its own up."""
        part = part_of(strategy.args)
        if not part.shares_prompt:
            super().init_model_from_pretrained(strategy, pretrain)
            return
        from metronome_openrlhf.shared import sharing_actor

        kept, launcher.Actor = launcher.Actor, sharing_actor(part)
        try:
            super().init_model_from_pretrained(strategy, pretrain)
        finally:
            launcher.Actor = kept
