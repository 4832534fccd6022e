"""verl's actor worker with our loss and attention, and with gradients that add up over parts of a batch."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDict
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu
from verl.utils.profiler import DistProfiler

from metronome.errors import ConfigurationError, nearest
from metronome_verl.accumulate import NORMALISERS, AccumulatingWorker
from metronome_verl.config import worker_part
from metronome_verl.loss import HostLoss
from metronome_verl.megatron_limits import check_settings
from metronome_verl.weights import Publication

_PER_MICRO_BATCH = ("clip_cov", "kl_cov", "geo_mean")
"""verl's losses that rank or average over whatever is in a micro-batch; their sum depends on the split."""


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


def check_streaming(config: Any, *, ours: bool, distillation: bool = False) -> None:
    """Raises ConfigurationError if gradients of parts don't add up to that of one batch under verl's ``ActorConfig``.

    Args:
        config: verl's ``ActorConfig``.
        ours: whether the policy loss is a plug-in's rather than verl's.
        distillation: whether verl's distillation is on.
    """
    if config.strategy == "megatron":
        check_settings(config.megatron)
    elif config.strategy not in ("fsdp", "fsdp2"):
        raise ConfigurationError(
            "it isn't known where this engine keeps the gradients of parts",
            found=config.strategy,
            where="actor_rollout_ref.actor.strategy",
            remedy="actor_rollout_ref.actor.strategy=fsdp2 | fsdp | megatron, or metronome.rollout_source=synchronous",
        )
    mode = config.loss_agg_mode
    if mode != "token-sum" and mode not in NORMALISERS:
        raise ConfigurationError(
            "this way of averaging the loss can't be added up over parts of a batch",
            found=mode,
            where="actor_rollout_ref.actor.loss_agg_mode",
            remedy=nearest(mode, NORMALISERS),
        )
    if mode == "seq-mean-token-sum-norm" and config.loss_scale_factor is None:
        raise ConfigurationError(
            "without a constant verl divides by the longest response of each micro-batch, which depends on the split",
            where="actor_rollout_ref.actor.loss_scale_factor",
            remedy="actor_rollout_ref.actor.loss_scale_factor=<data.max_response_length>",
        )
    if not ours and config.policy_loss.loss_mode in _PER_MICRO_BATCH:
        raise ConfigurationError(
            "this loss ranks or averages over a micro-batch, so that parts of a batch don't add up",
            found=config.policy_loss.loss_mode,
            where="actor_rollout_ref.actor.policy_loss.loss_mode",
            remedy="actor_rollout_ref.actor.policy_loss.loss_mode=vanilla, or metronome.loss=ppo",
        )
    if distillation:
        raise ConfigurationError(
            "distillation in parts of a batch isn't tested",
            where="distillation.enabled",
            remedy="distillation.enabled=False, or metronome.rollout_source=synchronous",
        )
