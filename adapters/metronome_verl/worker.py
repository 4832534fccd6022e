"""verl's actor worker with our loss and attention, and with gradients that add up over parts of a batch."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDict
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu
from verl.utils.profiler import DistProfiler

from metronome.errors import ConfigurationError
from metronome_verl.accumulate import AccumulatingWorker
from metronome_verl.config import worker_part
from metronome_verl.loss import HostLoss
from metronome_verl.streaming import check_streaming
from metronome_verl.weights import Publication


class MetronomeWorker(DetachActorWorker):
    """verl's actor, rollout and reference worker with our loss, our attention and accumulation."""

    actor_worker_cls = AccumulatingWorker

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """verl's; engines are built with our attention where it is chosen, then the loss is ours.

        Raises ConfigurationError for what the mode or the loss can't do here.
        """
        part = worker_part(self.config)
        engines: list[Any] = []
        if part.attention is None:
            super().init_model()
        else:
            from metronome_verl.engine import building

            if self.config.actor.strategy == "megatron":
                import metronome_verl.megatron_engine  # noqa: F401  (registers itself)
            with building(part.attention) as engines:
                super().init_model()
        if self.actor is None:
            return
        sent = self.actor.engine.get_per_tensor_param
        self.actor.engine.get_per_tensor_param = Publication(sent, self.actor._movement)
        self.actor.attends = self.actor.engine in engines
        if part.attention is not None and not self.actor.attends:
            raise ConfigurationError(
                f"attention {part.attention.name!r} works in verl's FSDP and Megatron engines, and this strategy or"
                " device has another",
                found=self.config.actor.strategy,
                where="actor_rollout_ref.actor.strategy",
                remedy="actor_rollout_ref.actor.strategy=fsdp2, or leave metronome.attention out",
            )
        config = self.actor.loss_fn.keywords["config"]
        if part.loss is not None:
            if self.distillation_enabled:
                raise ConfigurationError(
                    "distillation brings a loss of its own",
                    where="distillation.enabled",
                    remedy="distillation.enabled=False, or leave metronome.loss out",
                )
            self.actor.set_loss_fn(HostLoss(config, part.loss))
        if part.mode == "periodic":
            check_streaming(config, ours=part.loss is not None, distillation=self.distillation_enabled)
            self.actor.longest = int(self.config.rollout.response_length)
            if config.strategy == "megatron":
                from metronome_verl.megatron_accumulate import check_engine

                check_engine(self.actor.engine)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    @DistProfiler.annotate(color="red", role="metronome_accumulate")
    def metronome_accumulate(self, data: TensorDict) -> TensorDict | None:
        """Forward and backward of one part of a batch; the gradient stays."""
        found = self.actor.accumulate(data)
        if not self.actor.engine.is_mp_src_rank_with_outputs():
            return None
        return tu.get_tensordict(tensor_dict={}, non_tensor_dict={"metrics": found})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @DistProfiler.annotate(color="red", role="metronome_step")
    def metronome_step(self, rows: int | None = None) -> dict[str, Any]:
        """One optimiser step with everything accumulated; see ``AccumulatingWorker.step``."""
        return self.actor.step(rows)
