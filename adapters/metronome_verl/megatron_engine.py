"""Shared prompts in verl's Megatron engine: a group's prompt is computed once, everything else is verl's.

As in ``fsdp_engine``: micro-batches keep groups whole, each is one packed row in which a prompt stands once, and verl
gets its own nested layout back. The model is built by verl; its attention is overridden afterwards on the instance
(``metronome.shared_prompt.megatron``), for tensor (with sequence parallelism) and pipeline parallelism alike.

Run with mbridge on a CPU and gloo, on one rank and on two. Not run: Megatron-Bridge, Transformer Engine, a card.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.utils.megatron.tensor_parallel import vocab_parallel_entropy
from verl.utils.megatron_utils import unwrap_model
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.megatron import transformer_impl
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

from metronome.errors import ConfigurationError
from metronome.shared_prompt.megatron import MegatronSharedPrompt, attach_megatron, packed
from metronome_verl.engine import VENDOR, joined
from metronome_verl.fsdp_engine import Counts
from metronome_verl.groups import micro_batches
from metronome_verl.limits import why_separate
from metronome_verl.rows import PackedRow, read_rows

_CUT = "prepare_micro_batches"  # the function of verl that cuts a batch, as its engine's module names it
_log = logging.getLogger(__name__)

if _CUT not in MegatronEngineWithLMHead.forward_backward_batch.__code__.co_names:
    raise ConfigurationError(
        "verl's Megatron engine doesn't cut its batches as ours knows it",
        found=f"forward_backward_batch without {_CUT}",
        where="verl.workers.engine.megatron",
        remedy="verl 0.9.x, or attention: host",
    )


@EngineRegistry.register(model_type="language_model", backend="megatron", device=["cpu", "cuda"], vendor=VENDOR)
class SharedPromptMegatronEngine(MegatronEngineWithLMHead):
    """verl's Megatron engine with a language-model head, over shared rows; made inside ``building`` only.

    Attributes:
        attention: what computes attention.
        counts: what went through shared rows.
    """

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        self.attention = joined(self)
        _refuse_settings(model_config, engine_config)
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)
        self.counts = Counts()
        self._own_path = False  # verl's path, rows apart
        self._warned: set[str] = set()
        self._shared: MegatronSharedPrompt

    def drain(self) -> Counts:
        """The counts so far, which start again at zero."""
        counts, self.counts = self.counts, Counts()
        return counts

    def _build_megatron_module(self) -> Any:
        module = super()._build_megatron_module()
        self._shared = attach_megatron(module, self.attention)
        return module

    # --- a batch ----------------------------------------------------------------------------------

    def forward_backward_batch(self, data: TensorDict, loss_function: Any, forward_only: bool = False) -> Any:
        """verl's, over micro-batches that keep groups whole and count the token budget after sharing."""
        reason = why_separate(data) or _why_apart(data)
        if reason is not None and reason not in self._warned:
            self._warned.add(reason)
            _log.warning("metronome: verl's own attention computes this batch, no prompt is shared: %s", reason)
        # Data may differ from rank to rank, the number of collectives may not.
        self._own_path = self._largest(int(reason is not None)) > 0
        if self._own_path:
            return super().forward_backward_batch(data, loss_function, forward_only)
        stock: Callable[..., Any] = getattr(transformer_impl, _CUT)
        setattr(transformer_impl, _CUT, partial(self._cut, stock))
        try:
            return super().forward_backward_batch(data, loss_function, forward_only)
        finally:
            setattr(transformer_impl, _CUT, stock)

    def _cut(self, stock: Callable[..., Any], data: TensorDict, **others: Any) -> Any:
        if not tu.get_non_tensor_data(data=data, key="use_dynamic_bsz", default=True):
            return stock(data=data, **others)  # so many rows each, in the batch's order
        rows = read_rows(data)
        budget = int(tu.get_non_tensor_data(data=data, key="max_token_len_per_gpu", default=0))
        cut = micro_batches(rows.groups, rows.lengths, budget)
        number = self._largest(len(cut))
        if number > len(cut):
            cut = micro_batches(rows.groups, rows.lengths, budget, number)
        indices = [[row for group in one for row in group.rows] for one in cut]
        return [tu.index_select_tensor_dict(data, one) for one in indices], indices

    def forward_step(
        self,
        batch_iter: Iterator[TensorDict],
        model: Any,
        logits_processor_func: Any,
        postprocess_micro_batch_func: Any,
    ) -> Any:
        """verl's, over one packed row: what this pipeline stage gives, and what makes the loss of it."""
        if self._own_path:
            self.counts.passed_through += 1
            return super().forward_step(batch_iter, model, logits_processor_func, postprocess_micro_batch_func)
        batch = next(batch_iter).to(get_device_id())
        rows = read_rows(batch)
        config = unwrap_model(model).config
        ranks = config.tensor_model_parallel_size if config.sequence_parallel else 1
        row = PackedRow.build(rows, batch["input_ids"].device, -rows.tokens % ranks)
        before = self._shared.calls
        tokens = row.tokens[None]
        output = model(input_ids=tokens, position_ids=None, attention_mask=None, packed_seq_params=packed(row.plan))
        self.counts.tokens_fed += row.plan.tokens
        self.counts.tokens_separate += row.plan.tokens_separate
        self.counts.attention_calls += self._shared.calls - before
        self.counts.micro_batches += 1
        if unwrap_model(model).post_process:
            output = self._results(output, row, batch)
        return output, partial(postprocess_micro_batch_func, data=batch)

    def _results(self, logits: Tensor, row: PackedRow, batch: TensorDict) -> dict[str, Tensor]:
        """``log_probs``, and ``entropy`` if asked, in verl's nested layout; logits ``[1,T,V / tp]``."""
        plan, temperature = row.plan, row.temperature
        assert isinstance(temperature, float)
        log_probs = self._shared.response_log_probs(logits, row.tokens[None], plan, temperature)
        found = {"log_probs": row.scatter(log_probs, batch["input_ids"])}
        if tu.get_non_tensor_data(data=batch, key="calculate_entropy", default=False):
            labelled = logits[0].index_select(0, plan.unique_label_rows).float() / temperature
            entropies = vocab_parallel_entropy(labelled).index_select(0, plan.label_inverse)
            found["entropy"] = row.scatter(entropies, batch["input_ids"])
        return found

    def _largest(self, number: int) -> int:
        found = torch.tensor([number], device=get_device_id())
        torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX)
        return int(found.item())


def _why_apart(data: TensorDict) -> str | None:
    temperature = tu.get_non_tensor_data(data=data, key="temperature", default=1.0)
    if isinstance(temperature, Tensor) and temperature.dim() and len(temperature.unique()) > 1:
        return "rows of different temperatures"
    return None


def _refuse_settings(model: Any, engine: Any) -> None:
    """Refuses what would leave every batch of a run to verl's own path, or what wasn't run."""
    checks = {
        "model.use_fused_kernels": (model.use_fused_kernels, "fused kernels compute separate rows inside the model"),
        "actor.megatron.dynamic_context_parallel": (engine.dynamic_context_parallel, "context parallelism cuts rows"),
        "actor.megatron.virtual_pipeline_model_parallel_size": (
            (engine.virtual_pipeline_model_parallel_size or 1) > 1,
            "its schedule asks for numbers of micro-batches that groups kept whole don't give",
        ),
    }
    for key, (found, why) in checks.items():
        if found:
            off = "null" if key.endswith("size") else "False"
            raise ConfigurationError(
                f"prompts can't be shared with this setting: {why}",
                found=found,
                where=f"actor_rollout_ref.{key}",
                remedy=f"actor_rollout_ref.{key}={off}, or attention: host",
            )
