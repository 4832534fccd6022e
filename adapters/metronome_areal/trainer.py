"""``PPOTrainer``: AReaL's, with the engines and the flow of groups that the ``metronome:`` block asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from areal.trainer.rl_trainer import PPOTrainer as HostTrainer
from areal.utils.environ import is_single_controller

from metronome_areal.arrange import arrange
from metronome_areal.config import read, told
from metronome_areal.cpu.arguments import enter
from metronome_areal.flow import NEVER, PromptFlow
from metronome_areal.host import check_host
from metronome_areal.members import Members
from metronome_areal.parts import Parts, Ranks
from metronome_areal.periodic import FlowActor, PeriodicActor, Reference
from metronome_areal.prompts import Prompts


class PPOTrainer(HostTrainer):
    """AReaL's ``PPOTrainer``; the methods it makes its engines with give ours.

    Raises ConfigurationError, before any engine is made, for a block that can't be true with the rest of the
    configuration, and for another AReaL.
    """

    actor: Any
    ref: Any

    def __init__(self, config: Any, train_dataset: Any = None, valid_dataset: Any = None) -> None:
        check_host()
        self.part = read(config)
        for line in [*(enter(config) if self.part.room else []), *arrange(config, self.part)]:
            print(f"metronome: {line}", flush=True)
        super().__init__(config, train_dataset, valid_dataset)

    def train(self, workflow: Any = None, *args: Any, dynamic_filter_fn: Any = None, **named: Any) -> None:
        """AReaL's; where groups are ours its actor is a ``FlowActor`` or a ``PeriodicActor`` meanwhile."""
        if not self.part.owns_rollouts:
            super().train(workflow, *args, dynamic_filter_fn=dynamic_filter_fn, **named)
            return
        actor, reference = self.actor, self.ref
        flow = self._flow()
        ranks = self._ranks()
        parts = Parts(flow, ranks, self.train_dataloader.batch_size)
        shared = (actor, self.part, parts, lambda: self._prompts(ranks), self._beginning(flow))
        if self.part.mode == "periodic":
            self.actor = PeriodicActor(*shared, reference=reference)
            self.ref = None if reference is None else Reference(reference)
        else:
            self.actor = FlowActor(*shared)
        try:
            super().train(workflow, *args, dynamic_filter_fn=dynamic_filter_fn, **named)
        finally:
            self.actor, self.ref = actor, reference

    # --- AReaL's factories ----------------------------------------------------------------------------

    def _create_train_engine(self, actor_config: Any, alloc: Any) -> Any:
        if alloc.backend != "fsdp":
            return super()._create_train_engine(actor_config, alloc)
        from metronome_areal.actor import MetronomeActor

        config = told(actor_config, self.part, int(self.config.seed))
        if is_single_controller():
            from metronome_areal.controller import MetronomeController

            actor: Any = MetronomeController(MetronomeActor, config, self.scheduler)
        else:
            actor = MetronomeActor(config)
        actor.create_process_group(parallel_strategy=alloc.parallel)
        return actor

    def _init_rollout(self, rollout_config: Any, is_eval: bool = False, lora_path: str | None = None) -> Any:
        if not self.part.room:
            return super()._init_rollout(rollout_config, is_eval, lora_path)
        from metronome_areal.cpu import engine

        return engine.make(self, rollout_config, is_eval)

    def _create_dataloader(self, dataset: Any, dataset_config: Any, rank: int, world_size: int) -> Any:
        loader = super()._create_dataloader(dataset, dataset_config, rank, world_size)
        return Prompts(loader) if dataset_config is self.config.train_dataset else loader

    # --- the flow of groups ---------------------------------------------------------------------------

    def _ranks(self) -> Ranks:
        if is_single_controller() or (self.actor.data_parallel_world_size * 1 == 1 and self.actor.world_size == 1):
            return Ranks()
        return Ranks(self.actor.cpu_group, self.actor.data_parallel_rank, self.actor.data_parallel_world_size)

    def _prompts(self, ranks: Ranks) -> int:
        """Prompts a step of this process."""
        size = int(self.train_dataloader.batch_size)
        if not self.part.owns_groups:
            return size
        controller = self.part.selection.group_controller
        budget = size * ranks.places * controller.largest()
        return int(controller.prompts(budget, ranks.places)) // ranks.places

    def _flow(self) -> PromptFlow | None:
        if not self.actor.is_data_parallel_head():
            return None
        manager = _manager(self.rollout)
        manager.max_staleness = NEVER
        flow = PromptFlow(
            self.rollout,
            self.part.selection.rollout_source,
            self.train_dataloader,
            largest=int(self.config.gconfig.max_new_tokens),
            seconds=float(self.config.rollout.request_timeout),
        )
        self.train_dataloader.out = flow.prompts_out
        for name in ("rollout_source", "group_controller"):
            self.train_dataloader.attach(name, getattr(self.part.selection, name))
        return flow

    def _beginning(self, flow: PromptFlow | None) -> Callable[[dict[str, Any]], None]:
        """Tells the flow how ``prepare_batch`` was asked to generate; a workflow is resolved once."""
        resolved: dict[str, Any] = {}

        def begin(named: dict[str, Any]) -> None:
            assert flow is not None
            if not resolved:
                resolved["workflow"] = self.rollout._resolve_workflow(named["workflow"], named["workflow_kwargs"], 1)
                resolved["accept"] = self.rollout._resolve_should_accept_fn(named["should_accept_fn"])
            flow.submit = lambda data, size: self.rollout.workflow_executor.submit(
                data, workflow=Members(resolved["workflow"], size)
            )
            flow.accept = resolved["accept"]

        return begin


def _manager(rollout: Any) -> Any:
    executor = getattr(rollout, "workflow_executor", None)
    return rollout.staleness_manager if executor is None else executor.staleness_manager
