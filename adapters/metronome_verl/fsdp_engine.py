"""Shared prompts in verl's FSDP engine: every group's prompt is computed once, everything else is verl's.

verl packs a micro-batch's rows into one and tells its model where they end. ``SharedPromptEngine`` hands the
model a shorter row in which a group's prompt stands once, with its layout as a keyword that reaches every
attention layer, and gives verl back its own nested layout. Losses, optimiser, checkpoints, weight
publication, offloading and gradient checkpointing are verl's engine's, and so is the call of the wrapped model.

The model keeps the attention implementation that it was loaded with (flash_attention_2 is verl's default) for
batches that ``limits.py`` leaves to verl's own path; shared rows go through metronome's backend. Run on CPU with
gloo, one rank and two; not run on a card.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from metronome.contracts import AttentionBackend
from metronome.errors import ConfigurationError, EqualityViolated, MetronomeError
from metronome.shared_prompt import interface
from metronome.shared_prompt.interface import NAME, Signature
from metronome.shared_prompt.options import SharedPromptOptions
from metronome.shared_prompt.plan import SharedPromptPlan
from metronome.shared_prompt.refusals import refusal
from metronome.shared_prompt.selfcheck import check_attention, check_log_probs
from metronome_verl.engine import VENDOR, joined
from metronome_verl.groups import micro_batches
from metronome_verl.limits import refuse_settings, why_separate
from metronome_verl.rows import PackedRow, Rows, read_rows

_CUT = "prepare_micro_batches"  # the function of verl that cuts a batch, as its engine's module names it
_log = logging.getLogger(__name__)

if _CUT not in FSDPEngineWithLMHead.forward_backward_batch.__code__.co_names:
    raise ConfigurationError(
        "verl's FSDP engine doesn't cut its batches as ours knows it",
        found=f"forward_backward_batch without {_CUT}",
        where="verl.workers.engine.fsdp",
        remedy="verl 0.9.x, or attention: host",
    )


@dataclass
class Counts:
    """What went through shared rows since the last ``drain``.

    Attributes:
        tokens_fed: tokens that the model computed, padding included.
        tokens_separate: tokens that separate rows would have had.
        attention_calls: attention layers that saw a layout (proof of life); recomputation isn't counted.
        micro_batches: forward passes over shared rows.
        passed_through: forward passes left to verl's own path.
    """

    tokens_fed: int = 0
    tokens_separate: int = 0
    attention_calls: int = 0
    micro_batches: int = 0
    passed_through: int = 0


class _Call:
    """``interface.SharedPromptCall`` that isn't a dataclass: FSDP1 copies dataclasses among a forward's arguments,
    and the layers would be told to the copy."""

    def __init__(self, plan: SharedPromptPlan, backend: AttentionBackend) -> None:
        self.plan, self.backend, self.exchange = plan, backend, None
        self.layers: list[Signature] = []


@EngineRegistry.register(
    model_type="language_model", backend=["fsdp", "fsdp2"], device=["cpu", "cuda", "npu"], vendor=VENDOR
)
class SharedPromptEngine(FSDPEngineWithLMHead):
    """verl's FSDP engine with a language-model head, over shared rows; made inside ``building`` only.

    Attributes:
        attention: what computes attention.
        counts: what went through shared rows.
    """

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        self.attention = joined(self)
        refuse_settings(model_config, engine_config)
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)
        options = getattr(self.attention, "options", None)  # a third party's backend may mean something else by it
        self._options = options if isinstance(options, SharedPromptOptions) else SharedPromptOptions()
        self.counts = Counts()
        self._checked = not self._options.self_check
        self._own_path = False  # verl's path, rows apart
        self._rows: Rows | None = None
        self._call: _Call | None = None
        self._warned: set[str] = set()
        self._base: Any = None

    def drain(self) -> Counts:
        """The counts so far, which start again at zero."""
        counts, self.counts = self.counts, Counts()
        return counts

    # --- building ---------------------------------------------------------------------------------

    def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
        unwrap = getattr(module, "get_base_model", None)  # peft's
        base: Any = module if unwrap is None else unwrap()
        self._base, self._config = base, base.config.get_text_config(decoder=True)
        refused = refusal(module, base, self._config)
        if refused is not None:
            raise self._refused(*refused)
        self._before: str = base.config._attn_implementation
        self._picks_rows = "logits_to_keep" in inspect.signature(base.forward).parameters
        interface.register()
        self._use(NAME)
        if base.config._attn_implementation != NAME:
            raise self._refused("it doesn't take a registered attention implementation", "attention: host")
        wrapped: torch.nn.Module = super()._build_fsdp_module(module)
        return wrapped

    def _use(self, implementation: str) -> None:
        """Set before a forward pass and left until the next: gradient checkpointing needs it in the backward."""
        if self._base.config._attn_implementation != implementation:
            self._base.set_attn_implementation(implementation)

    # --- a batch ----------------------------------------------------------------------------------

    def forward_backward_batch(self, data: TensorDict, loss_function: Any, forward_only: bool = False) -> Any:
        """verl's, over micro-batches that keep groups whole and count the token budget after sharing."""
        reason = why_separate(data)
        if reason is not None and reason not in self._warned:
            self._warned.add(reason)
            _log.warning("metronome: verl's own attention computes this batch, no prompt is shared: %s", reason)
        # Data may differ from rank to rank, the number of collectives may not.
        self._own_path = not self._everywhere(reason is None)
        if self._own_path:
            return super().forward_backward_batch(data, loss_function, forward_only)
        stock: Callable[..., Any] = getattr(transformer_impl, _CUT)
        setattr(transformer_impl, _CUT, partial(self._cut, stock))
        try:
            return super().forward_backward_batch(data, loss_function, forward_only)
        finally:
            setattr(transformer_impl, _CUT, stock)

    def _cut(self, stock: Callable[..., Any], data: TensorDict, dp_group: Any = None, **others: Any) -> Any:
        if not tu.get_non_tensor_data(data=data, key="use_dynamic_bsz", default=True):
            return stock(data=data, dp_group=dp_group, **others)  # so many rows each, in the batch's order
        rows = read_rows(data)
        budget = int(tu.get_non_tensor_data(data=data, key="max_token_len_per_gpu", default=0))
        cut = micro_batches(rows.groups, rows.lengths, budget)
        number = self._largest(len(cut))
        if number > len(cut):
            cut = micro_batches(rows.groups, rows.lengths, budget, number)
        indices = [[row for group in one for row in group.rows] for one in cut]
        return [tu.index_select_tensor_dict(data, one) for one in indices], indices

    def forward_step(self, micro_batch: TensorDict, loss_function: Any, forward_only: bool) -> Any:
        """verl's, over one packed row; the first is held against separate rows."""
        if self._own_path:
            self._use(self._before)
            self.counts.passed_through += 1
            return super().forward_step(micro_batch, loss_function, forward_only)
        self._rows = read_rows(micro_batch)
        if not self._checked:
            self._first_use(micro_batch, self._rows)
        self._use(NAME)
        out = super().forward_step(micro_batch, loss_function, forward_only)
        call = self._call
        assert call is not None
        self.counts.tokens_fed += call.plan.tokens
        self.counts.tokens_separate += call.plan.tokens_separate
        self.counts.attention_calls += self._config.num_hidden_layers
        self.counts.micro_batches += 1
        return out

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], dict[str, Any]]:
        """The packed row, its positions, its layout, and which of its rows need logits."""
        if self._own_path:
            own: tuple[dict[str, Any], dict[str, Any]] = super().prepare_model_inputs(micro_batch)
            return own
        rows = self._rows
        assert rows is not None
        row = PackedRow.build(rows, micro_batch["input_ids"].device, self._get_packed_pad_size(rows.tokens))
        plan = row.plan
        self._call = _Call(plan, self.attention)
        inputs: dict[str, Any] = {
            "input_ids": row.tokens[None],
            "position_ids": plan.position_ids[None],
            "attention_mask": interface.placeholder_mask(plan.queries, plan.device),
            NAME: self._call,
        }
        if self._picks_rows:
            inputs["logits_to_keep"] = plan.unique_label_rows
        return inputs, {"row": row}

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: TensorDict, logits_processor_func: Any
    ) -> dict[str, Tensor]:
        """``log_probs``, and ``entropy`` if asked, in verl's nested layout."""
        if self._own_path:
            own: dict[str, Tensor] = super().prepare_model_outputs(
                output, output_args, micro_batch, logits_processor_func
            )
            return own
        self._check_layers()
        row: PackedRow = output_args["row"]
        logits = output.logits[0]
        if not self._picks_rows:
            logits = logits[row.plan.unique_label_rows]
        if hasattr(logits, "full_tensor"):
            logits = logits.full_tensor()
        entropy = bool(tu.get_non_tensor_data(data=micro_batch, key="calculate_entropy", default=False))
        log_probs, entropies = row.results(logits, micro_batch["input_ids"], entropy)
        return {"log_probs": log_probs} | ({} if entropies is None else {"entropy": entropies})

    # --- checks -----------------------------------------------------------------------------------

    def _check_layers(self) -> None:
        call = self._call
        assert call is not None
        expected = self._config.num_hidden_layers
        if len(call.layers) != expected:
            raise self._refused(
                f"{len(call.layers)} of {expected} layers went through the attention interface with their layout",
                "attention: host",
            )
        sliding = (getattr(self._config, "layer_types", None) or []).count("sliding_attention")
        told = sum(layer.window is not None for layer in call.layers)
        if told < sliding:
            raise self._refused(
                f"{told} of {sliding} sliding-window layers say how long their window is", "attention: host"
            )

    def _first_use(self, micro_batch: TensorDict, rows: Rows) -> None:
        """The self-check at real lengths, on all ranks in the same micro-batch: it calls the wrapped model."""
        chosen = rows.comparable()
        if not self._everywhere(bool(chosen)):
            return  # nothing to compare yet
        failure: MetronomeError | None = None
        training = self.module.training
        self.module.eval()  # verl's activation offloading expects a backward pass in training mode
        try:
            with torch.no_grad():
                self._compare(micro_batch, rows, chosen)
        except MetronomeError as error:
            failure = error
        finally:
            self.module.train(training)
            self._own_path = False
        if not self._everywhere(failure is None):
            raise failure or EqualityViolated(
                "the first-use check of shared prompts failed on another rank",
                where="attention: shared_prompt",
                remedy="see that rank's error",
            )
        self._checked = True

    def _compare(self, micro_batch: TensorDict, rows: Rows, chosen: list[int]) -> None:
        self._use(NAME)
        shared = self._responses(micro_batch, rows, chosen, chosen)
        call = self._call
        assert call is not None
        for layer in dict.fromkeys(call.layers):
            check_attention(self.attention, call.plan, layer, call.plan.device)
        self._own_path = True
        self._use(self._before)
        apart = tu.index_select_tensor_dict(micro_batch, chosen)
        separate = self._responses(apart, rows, chosen, list(range(len(chosen))))
        check_log_probs(shared, separate, call.layers[0].dtype, self._options.self_check_tolerance)

    def _responses(self, micro_batch: TensorDict, rows: Rows, chosen: list[int], at: list[int]) -> Tensor:
        """Log-probs of the responses of the rows ``chosen``, which stand ``at`` in the micro-batch."""
        found = super().forward_step(micro_batch, None, True)[1]["model_output"]["log_probs"].unbind()
        return torch.cat([found[n][rows.prompt_lens[row] - 1 : -1] for n, row in zip(at, chosen, strict=True)])

    def _everywhere(self, here: bool) -> bool:
        """Whether it is so on every rank that computes this model."""
        return self._largest(int(not here)) == 0

    def _largest(self, number: int) -> int:
        found = torch.tensor([number], device=get_device_id())
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return int(found.item())

    def _refused(self, reason: str, remedy: str) -> ConfigurationError:
        return ConfigurationError(
            f"{type(self._base).__name__} can't read shared prompts: {reason}",
            where="metronome.attention",
            remedy=remedy,
        )
