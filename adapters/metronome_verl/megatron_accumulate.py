"""Gradients of parts in Megatron-core's buffers: they add up unreduced, meet other ranks once, and are rescaled once.

Megatron's schedule ends every forward and backward with ``finalize_model_grads``: the data-parallel all-reduce or
reduce-scatter of the buffers, and sums over tensor- and pipeline-parallel ranks for norms and tied embeddings. A part
finalised on top of an earlier, finalised one counts that one again (norms with sequence parallelism, tied embeddings)
or mixes sums with shares (reduce-scatter). So parts leave it out, and ``finish`` calls it with what the schedule
handed over. The schedule's division by the number of micro-batches is undone by verl's engine itself.

Run with verl's engine and mbridge on a CPU and gloo: data-, tensor- (with sequence parallelism) and
pipeline-parallel, with and without the distributed optimiser. Not run: Megatron-Bridge, a card.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.utils import get_model_config

from metronome.errors import ConfigurationError

_BLOCK = "actor_rollout_ref.actor.megatron"


class BufferedGradients:
    """The gradient buffers of verl's Megatron engine, kept from part to part.

    Raises ConfigurationError for an engine whose parts wouldn't add up; see ``check_engine``.
    """

    def __init__(self, engine: Any) -> None:
        check_engine(engine)
        self._engine = engine
        self._finalise: Callable[[], None] | None = None

    @contextmanager
    def part(self) -> Iterator[None]:
        """Around forward and backward of one part: nothing is finalised."""
        configs = [get_model_config(chunk) for chunk in self._engine.module]
        before = [config.finalize_model_grads_func for config in configs]

        def hold(*values: Any, **named: Any) -> None:
            self._finalise = lambda: before[0](*values, **named)

        for config in configs:
            config.finalize_model_grads_func = hold
        try:
            yield
        finally:
            for config, finalise in zip(configs, before, strict=True):
                config.finalize_model_grads_func = finalise

    def finish(self, factor: float) -> None:
        """Finalises the sum of all parts and multiplies it by ``factor``; every rank must call, after ``part``."""
        assert self._finalise is not None, "no part was trained"
        self._finalise()
        self._finalise = None
        for chunk in self._engine.module:
            chunk.scale_gradients(factor)

    def of_last_stage(self, found: dict[str, Any]) -> dict[str, Any]:
        """What the last pipeline stage, where the loss is, has found; every rank must call."""
        group = parallel_state.get_pipeline_model_parallel_group()
        carried = [found]
        torch.distributed.broadcast_object_list(
            carried, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=group
        )
        return carried[0]


def check_engine(engine: Any) -> None:
    """Raises ConfigurationError, with the line that mends it, where parts in Megatron's buffers wouldn't add up."""
    for chunk in engine.module:
        if not isinstance(chunk, DistributedDataParallel):
            raise _refused(
                "gradients of this wrapper aren't in Megatron's own buffers",
                type(chunk).__name__,
                "actor_rollout_ref.actor.strategy=fsdp2",
            )
        if chunk.ddp_config.overlap_grad_reduce:
            raise _refused(
                "each part would be reduced while its backward runs, and a reduced part can't take another",
                "overlap_grad_reduce",
                f"{_BLOCK}.override_ddp_config.overlap_grad_reduce=False",
            )
        config = get_model_config(chunk)
        if config.calculate_per_token_loss:
            raise _refused(
                "gradients are divided by each part's own number of tokens",
                "calculate_per_token_loss",
                f"{_BLOCK}.override_transformer_config.calculate_per_token_loss=False",
            )
        if config.num_moe_experts:
            raise _refused(
                "router losses are averaged over each part's micro-batches, and experts weren't run",
                f"{config.num_moe_experts} experts",
                "metronome.rollout_source=synchronous",
            )
        if config.mtp_num_layers:
            raise _refused(
                "the loss of multi-token prediction is averaged over each part's micro-batches",
                f"mtp_num_layers={config.mtp_num_layers}",
                "actor_rollout_ref.model.mtp.enable=False",
            )


def _refused(what: str, found: str, remedy: str) -> ConfigurationError:
    return ConfigurationError(
        f"parts of a batch don't add up in this Megatron engine: {what}", found=found, where=_BLOCK, remedy=remedy
    )
