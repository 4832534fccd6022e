"""``PPOTrainer``: AReaL's, with the engines and the flow of groups that the ``metronome:`` block asks for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

from areal.trainer.rl_trainer import PPOTrainer as HostTrainer
from areal.utils.dynamic_import import import_from_string
from areal.utils.environ import is_single_controller

from metronome_areal.arguments import WHERE, refuse
from metronome_areal.arrange import arrange
from metronome_areal.bounded import BoundedActor, BoundedFlow, manager_of
from metronome_areal.clip import told_of_clip
from metronome_areal.config import read, told
from metronome_areal.cpu.arguments import enter
from metronome_areal.flow import NEVER, PromptFlow, Task
from metronome_areal.host import check_host
from metronome_areal.in_flight import Anew, Finishing
from metronome_areal.members import Members
from metronome_areal.parts import Parts, Ranks
from metronome_areal.paths import check_paths
from metronome_areal.periodic import FlowActor, PeriodicActor, Reference
from metronome_areal.state import KeptPrompts, data_of, take


class PPOTrainer(HostTrainer):
    """AReaL's ``PPOTrainer``; the methods it makes its engines with give ours.

    Raises ConfigurationError, before any engine is made, for a block that can't be true with the rest of the
    configuration, and for another AReaL.
    """

    actor: Any
    ref: Any
    rollout: Any
    weight_update_meta: Any

    def __init__(self, config: Any, train_dataset: Any = None, valid_dataset: Any = None) -> None:
        check_host()
        self.part = read(config)
        notes = told_of_clip(config.actor, getattr(config, "metronome", None), self.part)
        for line in [*(enter(config) if self.part.room else []), *arrange(config, self.part), *notes]:
            print(f"metronome: {line}", flush=True)
        check_paths(config)
        refuse(
            is_single_controller() and config.scheduler.type is None,
            "AReaL's single controller starts no workers without a scheduler",
            "scheduler.type",
            None,
            f"{WHERE}.cpu=true for the CPU room, torchrun with AREAL_SPMD_MODE=1, or scheduler.type=local",
        )
        take(config, self.part, data_of(config, train_dataset))
        try:
            super().__init__(config, train_dataset, valid_dataset)
        except BaseException:
            if getattr(self, "scheduler", None) is not None:
                self.scheduler.delete_workers()  # AReaL's close() would, of a trainer that was made
            raise
        if self.part.owns_rollouts and self.weight_update_meta.lora_keep_versions:
            # AReaL keeps as many adapters on its servers as its own bound says, which isn't the bound here.
            self.weight_update_meta.lora_keep_versions = self.part.selection.rollout_source.max_staleness + 2

    @functools.wraps(HostTrainer.train, assigned=())  # its arguments are what check_host sees
    def train(self, workflow: Any = None, *args: Any, dynamic_filter_fn: Any = None, **named: Any) -> None:
        """AReaL's; where groups are ours its actor is a ``FlowActor`` or a ``PeriodicActor`` meanwhile."""
        self._tell_finished(named.get("total_epochs"))
        if not self.part.owns_rollouts:
            super().train(workflow, *args, dynamic_filter_fn=dynamic_filter_fn, **named)
            return
        actor, reference, rollout = self.actor, self.ref, self.rollout
        flow = self._flow()
        ranks = self._ranks()
        parts = Parts(flow, ranks, self.train_dataloader.batch_size, self._places() if is_single_controller() else 1)
        shared = (actor, self.part, parts, lambda: self._prompts(ranks), self._beginning(flow))
        if self.part.mode == "periodic":
            self.actor = PeriodicActor(*shared, reference=reference)
            self.ref = None if reference is None else Reference(reference)
        else:
            self.actor = (BoundedActor if self.part.mode == "bounded" else FlowActor)(*shared)
        if self.part.mode == "bounded" and self.part.in_flight == "finish":
            self.rollout = Finishing(rollout, flow if isinstance(flow, BoundedFlow) else None, ranks)
        try:
            super().train(workflow, *args, dynamic_filter_fn=dynamic_filter_fn, **named)
        finally:
            self.actor, self.ref, self.rollout = actor, reference, rollout

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> Any:
        """AReaL's, which logs what ended the training with its traceback: but for Ctrl-C, which isn't an error."""
        if exc_type is None or not issubclass(exc_type, KeyboardInterrupt):
            return super().__exit__(exc_type, exc_value, traceback)
        try:
            self.close()
        except Exception as error:  # a terminal interrupts AReaL's workers too, and they can't be asked to end
            print(f"metronome: the workers are ended: close() raised {type(error).__name__}", flush=True)
            if self.scheduler is not None:
                self.scheduler.delete_workers()
        return False

    def _tell_finished(self, epochs: int | None) -> None:
        """A line where the checkpoint is of the last step: AReaL trains none and says nothing."""
        done = 0 if self.recover_info is None else self.recover_info.last_step_info.global_step + 1
        most = (epochs or self.config.total_train_epochs) * len(self.train_dataloader)
        last = min(most, self.config.total_train_steps or most)
        if done and done >= last:
            text = f"nothing is left to train: the run is finished, step {done} of {last}"
            print(f"metronome: {text}; a larger total_train_steps goes on", flush=True)

    # --- AReaL's factories ----------------------------------------------------------------------------

    def _init_scheduler(self) -> Any:
        from metronome_areal.controller import travelling

        scheduler: Any = super()._init_scheduler()
        scheduler.exp_config = travelling(self.config)
        return scheduler

    def _create_train_engine(self, actor_config: Any, alloc: Any) -> Any:
        if alloc.backend != "fsdp":
            return super()._create_train_engine(actor_config, alloc)
        from metronome_areal.actor import MetronomeActor

        config = told(actor_config, self.part, int(self.config.seed))
        if is_single_controller():
            from metronome_areal.controller import MetronomeController, check_controller

            check_controller(self.config, self.part, int(alloc.parallel.dp_size))
            actor: Any = MetronomeController(MetronomeActor, config, self.scheduler)
        else:
            actor = MetronomeActor(config)
        actor.create_process_group(parallel_strategy=alloc.parallel)
        return actor

    def _create_critic(self, critic_config: Any, alloc: Any) -> Any:
        if alloc.backend != "fsdp":
            return super()._create_critic(critic_config, alloc)
        from metronome_areal.actor import MetronomeCritic

        controlled = is_single_controller()
        critic: Any = (
            MetronomeCritic.as_controller(critic_config, self.scheduler)
            if controlled
            else MetronomeCritic(critic_config)
        )
        critic.create_process_group(parallel_strategy=alloc.parallel)
        return critic

    def _init_rollout(self, rollout_config: Any, is_eval: bool = False, lora_path: str | None = None) -> Any:
        if not self.part.room:
            return super()._init_rollout(rollout_config, is_eval, lora_path)
        from metronome_areal.cpu import engine, worker

        return (worker if is_single_controller() else engine).make(self, rollout_config, is_eval)

    def _create_dataloader(self, dataset: Any, dataset_config: Any, rank: int, world_size: int) -> Any:
        loader = super()._create_dataloader(dataset, dataset_config, rank, world_size)
        if dataset_config is not self.config.train_dataset:
            return loader
        return KeptPrompts(loader, self.part, data_of(self.config, dataset))

    # --- the flow of groups ---------------------------------------------------------------------------

    def _ranks(self) -> Ranks:
        if is_single_controller() or self.actor.world_size == 1:
            return Ranks()
        return Ranks(self.actor.cpu_group, self.actor.data_parallel_rank, self.actor.data_parallel_world_size)

    def _prompts(self, ranks: Ranks) -> int:
        """Prompts a step of this process."""
        size = int(self.train_dataloader.batch_size)
        if not self.part.owns_groups:
            return size
        controller = self.part.selection.group_controller
        budget = size * ranks.places * controller.largest()
        if is_single_controller():
            return int(controller.prompts(budget, self._places()))
        return int(controller.prompts(budget, ranks.places)) // ranks.places

    def _places(self) -> int:
        """Data-parallel ranks of the controller's workers."""
        return int(self.actor_alloc.parallel.dp_size)

    def _flow(self) -> PromptFlow | None:
        if not self.actor.is_data_parallel_head():
            return None
        manager_of(self.rollout).max_staleness = NEVER
        flow = (BoundedFlow if self.part.mode == "bounded" else PromptFlow)(
            self.rollout,
            self.part.selection.rollout_source,
            self.train_dataloader,
            largest=int(self.config.gconfig.max_new_tokens),
            seconds=float(self.config.rollout.request_timeout),
        )
        self.train_dataloader.out = flow.prompts_out
        return flow

    def _beginning(self, flow: PromptFlow | None) -> Callable[[dict[str, Any]], None]:
        """Tells the flow how ``prepare_batch`` was asked to generate; a workflow is resolved once."""
        resolved: dict[str, Any] = {}
        anew = self.part.in_flight == "abort"

        def begin(named: dict[str, Any]) -> None:
            assert flow is not None
            if resolved:
                return
            resolved.update(named)
            accept = named["should_accept_fn"]
            flow.accept = import_from_string(accept) if isinstance(accept, str) else accept
            if is_single_controller():
                from metronome_areal.controller import workflow_path

                path = workflow_path(self.rollout, named["workflow"])
                flow.submit = partial(_submit_path, self.rollout, path, named["workflow_kwargs"], anew=anew)
            else:
                workflow = self.rollout._resolve_workflow(named["workflow"], named["workflow_kwargs"], 1)
                workflow = Anew(workflow) if anew else workflow
                flow.submit = partial(_submit, self.rollout.workflow_executor, workflow, flow)

        return begin


def _submit(executor: Any, workflow: Any, flow: PromptFlow, task: Task) -> int:
    return int(executor.submit(task.data, workflow=Members(workflow, task.size, failed=flow.note, done=task.done)))


def _submit_path(rollout: Any, workflow: Any, named: dict[str, Any] | None, task: Task, anew: bool = False) -> int:
    """AReaL's controller hands its workers import paths and arguments."""
    inner = {"workflow": rollout._resolve_workflow_str(workflow), "named": named or {}}
    if anew:
        inner = {"workflow": _path(Anew), "named": inner}
    return int(rollout.submit(task.data, _path(Members), {**inner, "size": task.size}))


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__name__}"
