"""OpenRLHF's actor worker with our trainer inside, and with gradients that add up over parts of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from openrlhf.trainer.ray import ppo_actor

from metronome_openrlhf import experience
from metronome_openrlhf.config import part_of
from metronome_openrlhf.update import MetronomeActorTrainer, Sums

_Base: Any = ppo_actor.PolicyModelActor.__ray_metadata__.modified_class
"""The class behind OpenRLHF's Ray actor, which can't be subclassed itself."""


class MetronomePolicy(_Base):
    """OpenRLHF's ``PolicyModelActor``; what its base builds are our actor model and our trainer."""

    def init_model_from_pretrained(
        self, strategy: Any, pretrain: str, max_steps: int | None = None, vllm_engines: Any = None
    ) -> None:
        """OpenRLHF's, with our classes in place of those that it looks up."""
        experience.install()
        with inside(strategy):
            super().init_model_from_pretrained(strategy, pretrain, max_steps, vllm_engines)

    def metronome_accumulate(self, micro_batches: list[Any], rows: int, kl_ctl: float, filled: int = 0) -> Sums:
        """Forward and backward of this rank's share of a part; the gradient stays. See ``update``."""
        self.actor.train()
        found: Sums = self.trainer.accumulate(micro_batches, rows, kl_ctl, filled)
        return found

    def metronome_step(self, rows: int) -> dict[str, Any]:
        """One optimiser step with everything accumulated. See ``update``."""
        found: dict[str, Any] = self.trainer.step(rows)
        return found

    def metronome_version(self, version: int) -> None:
        """Which version of the weights the next update trains, for our loss."""
        self.trainer.actor_loss_fn.version = version

    def metronome_window(self, rows: int) -> None:
        """How many rows an optimiser step takes from now on, over all ranks."""
        self.trainer.set_window(rows)


@contextmanager
def inside(strategy: Any) -> Iterator[None]:
    """Our actor model and trainer where ``PolicyModelActor`` looks its own up, while it builds them."""
    part = part_of(strategy.args)
    kept = {"Actor": ppo_actor.Actor, "ActorPPOTrainer": ppo_actor.ActorPPOTrainer}
    ppo_actor.ActorPPOTrainer = MetronomeActorTrainer
    if part.shares_prompt:
        from metronome_openrlhf.shared import sharing_actor

        ppo_actor.Actor = sharing_actor(part)
    if part.mode == "periodic":
        own_steps(strategy)
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(ppo_actor, name, value)


def own_steps(strategy: Any) -> None:
    """Tells DeepSpeed that ``step()`` alone ends an accumulation (its ``managed_gradient_accumulation``).

    Then it has no number of accumulation steps to keep: a batch may have any number of rows.
    """
    made = strategy.get_ds_train_config

    def get_ds_train_config(*arguments: Any, **named: Any) -> Any:
        config = {**made(*arguments, **named), "managed_gradient_accumulation": False}
        config.pop("train_batch_size", None)
        return {**config, "gradient_accumulation_steps": 1}

    strategy.get_ds_train_config = get_ds_train_config
