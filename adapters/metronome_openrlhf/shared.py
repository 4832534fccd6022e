"""Shared prompts in OpenRLHF's actor model: every group's prompt is computed once, everything else is OpenRLHF's.

``sharing_actor`` gives a subclass of OpenRLHF's ``Actor``. Its forward hands the wrapped model one row in which a
group's prompt stands once, with the layout as a keyword that reaches every attention layer, and gives log-probs and
entropies back in OpenRLHF's layout. Losses, DeepSpeed, checkpoints and publication don't see a difference. Run on CPU
with gloo; not run on a card.
"""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from openrlhf.models import Actor
from torch import Tensor
from transformers.utils import is_flash_attn_2_available

from metronome.contracts import AttentionBackend
from metronome.errors import ConfigurationError, EqualityViolated, MetronomeError
from metronome.shared_prompt import interface
from metronome.shared_prompt.interface import NAME, SharedPromptCall, Signature
from metronome.shared_prompt.logits import row_log_probs
from metronome.shared_prompt.options import SharedPromptOptions
from metronome.shared_prompt.refusals import refusal
from metronome.shared_prompt.selfcheck import check_attention, check_log_probs
from metronome_openrlhf.rows import PackedRow, Row, comparable, read_groups

_log = logging.getLogger("metronome_openrlhf")


def sharing_actor(part: Any) -> type[SharedPromptActor]:
    """OpenRLHF's ``Actor`` with the attention of ``part`` (``config.part_of``)."""

    class Sharing(SharedPromptActor):
        attention = part.selection.attention

    return Sharing


@dataclass
class Counts:
    """What went through shared rows since they were last told.

    Attributes:
        calls: attention layers that saw a layout (proof of life); recomputation isn't counted.
        tokens_fed: tokens that the model computed.
        tokens_separate: tokens that separate rows would have had, without padding.
    """

    calls: int = 0
    tokens_fed: int = 0
    tokens_separate: int = 0


class SharedPromptActor(Actor):
    """OpenRLHF's ``Actor`` over shared rows; ``sharing_actor`` makes classes of it.

    Attributes:
        attention: what computes attention.
        counts: what went through shared rows.
    """

    attention: AttentionBackend
    packing_samples: bool

    def __init__(self, pretrain_or_model: Any, attn_implementation: str = "flash_attention_2", **named: Any) -> None:
        if attn_implementation == "flash_attention_2" and not is_flash_attn_2_available():
            attn_implementation = "sdpa"  # the model's own serves the first-use check only
        super().__init__(pretrain_or_model, attn_implementation=attn_implementation, **named)
        unwrap = getattr(self.model, "get_base_model", None)  # peft's
        base = self.model if unwrap is None else unwrap()
        config = base.config.get_text_config(decoder=True)
        self._inner = SimpleNamespace(base=base, config=config)  # not a submodule: it is one of self.model's
        if getattr(self, "is_vlm", False):
            raise self._refused("its positions are of several dimensions", "attention: host")
        for one in (base.config, config):
            if getattr(one, "output_router_logits", False):
                one.output_router_logits = False  # OpenRLHF reads router losses only with --actor.aux_loss_coef
        refused = refusal(self.model, base, config)
        if refused is not None:
            raise self._refused(*refused)
        self._picks_rows = "logits_to_keep" in inspect.signature(base.forward).parameters
        own = getattr(self.attention, "options", None)  # a third party's backend may mean something else by it
        self._options = own if isinstance(own, SharedPromptOptions) else SharedPromptOptions()
        self._checked = not self._options.self_check
        self._told = False
        self.counts = Counts()
        self._before: str = base.config._attn_implementation
        interface.register()
        self._use(NAME)
        if base.config._attn_implementation != NAME:
            raise self._refused("it doesn't take a registered attention implementation", "attention: host")

    def drain(self) -> dict[str, float]:
        """The counts so far under their metrics' names; they start again at zero."""
        counts, self.counts = self.counts, Counts()
        return {f"metronome/attention/{name}": float(value) for name, value in vars(counts).items()}

    def forward(
        self,
        sequences: Tensor,
        action_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        return_output: bool = False,
        allgather_logits: bool = False,
        return_logprobs: bool = False,
        ring_attn_group: Any = None,
        packed_seq_lens: Any = None,
        return_entropy: bool = False,
        **mm_inputs: Any,
    ) -> Any:
        """OpenRLHF's: log-probs of the action tokens, ``[B,T] -> [B,A]``, zero outside ``action_mask``.

        With ``return_output`` a pair; the second has ``entropy`` ``[B,T-1]`` if that is asked, zero where no response
        token stands, and no logits.

        Raises MetronomeError for a call that OpenRLHF's PPO doesn't make: without masks, over a ring, with images;
        and, in the first call that shares a prompt, EqualityViolated if the self-check fails.
        """
        if action_mask is None or attention_mask is None or ring_attn_group is not None or mm_inputs:
            raise MetronomeError(
                "shared prompts give log-probs of action tokens, of text in rows that one rank holds",
                found=f"action_mask {action_mask is not None}, ring {ring_attn_group is not None}, {sorted(mm_inputs)}",
                where="Actor.forward",
                remedy="--metronome.attention host",
            )
        groups = read_groups(sequences, action_mask, attention_mask)
        if not self._checked:
            self._first_use(sequences, action_mask, attention_mask, groups)
        row = PackedRow.build(groups, sequences)
        log_probs, entropies, call = self._shared(row, return_entropy)
        self.counts.calls += self._inner.config.num_hidden_layers
        self.counts.tokens_fed += row.plan.tokens
        self.counts.tokens_separate += row.plan.tokens_separate
        if not self._told:
            self._told = True
            self._tell(call)
        found = row.spread(log_probs, sequences.shape)[:, -action_mask.shape[1] :] * action_mask.float()
        if not return_output:
            return found
        entropy = {} if entropies is None else {"entropy": row.spread(entropies, sequences.shape)}
        return found, SimpleNamespace(**entropy)

    # --- the model ----------------------------------------------------------------------------------

    def _shared(self, row: PackedRow, entropy: bool) -> tuple[Tensor, Tensor | None, SharedPromptCall]:
        plan = row.plan
        call = SharedPromptCall(plan, self.attention)
        inputs: dict[str, Any] = {NAME: call}
        if self._picks_rows:
            inputs["logits_to_keep"] = plan.unique_label_rows
        output = self.model(
            row.tokens[None],
            attention_mask=interface.placeholder_mask(plan.queries, plan.device),
            position_ids=plan.position_ids[None],
            **inputs,
        )
        call.layers = list(call.layers)  # a checkpointed layer comes again in the backward pass
        self._check_layers(call.layers)
        logits = output["logits"][0]
        if not self._picks_rows:
            logits = logits[plan.unique_label_rows]
        tokens = row.tokens[plan.response_index]
        log_probs, entropies = row_log_probs(
            logits, _wide, tokens, plan, logits.shape[-1], float(self.temperature), entropy
        )
        return log_probs, entropies, call

    def _use(self, implementation: str) -> None:
        self._inner.base.set_attn_implementation(implementation)

    def _check_layers(self, layers: list[Signature]) -> None:
        config = self._inner.config
        if len(layers) != config.num_hidden_layers:
            raise self._refused(
                f"{len(layers)} of {config.num_hidden_layers} layers went through the attention interface with their"
                " layout",
                "attention: host",
            )
        sliding = (getattr(config, "layer_types", None) or []).count("sliding_attention")
        told = sum(layer.window is not None for layer in layers)
        if told < sliding:
            raise self._refused(
                f"{told} of {sliding} sliding-window layers say how long their window is", "attention: host"
            )

    def _tell(self, call: SharedPromptCall) -> None:
        explain = getattr(self.attention, "explain", None)
        if explain is not None:
            kinds = dict.fromkeys(layer.need(call.plan.device.type) for layer in call.layers)
            for line in dict.fromkeys(explain(kind, call.plan) for kind in kinds):
                _log.info("metronome: prompts are shared; attention by %s", line)

    # --- checks -------------------------------------------------------------------------------------

    def _first_use(
        self, sequences: Tensor, action_mask: Tensor, attention_mask: Tensor, groups: list[list[Row]]
    ) -> None:
        """The self-check at real lengths. Where weights are cut over ranks they all make it in the same call."""
        chosen = comparable(groups)
        if not self._everywhere(bool(chosen)):
            return  # nothing to compare yet
        failure: MetronomeError | None = None
        training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                self._compare(sequences[chosen], action_mask[chosen], attention_mask[chosen])
        except MetronomeError as error:
            failure = error
        finally:
            self._use(NAME)
            self.model.train(training)
        if not self._everywhere(failure is None):
            raise failure or EqualityViolated(
                "the first-use check of shared prompts failed on another rank",
                where="attention: shared_prompt",
                remedy="see that rank's error",
            )
        self._checked = True

    def _compare(self, sequences: Tensor, action_mask: Tensor, attention_mask: Tensor) -> None:
        row = PackedRow.build(read_groups(sequences, action_mask, attention_mask), sequences)
        log_probs, _, call = self._shared(row, entropy=False)
        shared = row.spread(log_probs, sequences.shape)[:, -action_mask.shape[1] :]
        self._use(self._before)
        packs, self.packing_samples = self.packing_samples, False
        try:
            separate = super().forward(sequences, action_mask, attention_mask)
        finally:
            self.packing_samples = packs
        # After both passes: every rank has made them before one may stop.
        for layer in dict.fromkeys(call.layers):
            check_attention(self.attention, row.plan, layer, row.plan.device)
        compared = action_mask.bool()
        check_log_probs(shared[compared], separate[compared], call.layers[0].dtype, self._options.self_check_tolerance)

    def _everywhere(self, here: bool) -> bool:
        """Whether it is so on every rank that a forward pass needs: on this one, unless weights are cut (ZeRO-3)."""
        if not any(hasattr(one, "ds_id") for one in self.model.parameters()):
            return here
        found = torch.tensor([int(not here)], device=torch.cuda.current_device())
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return not found.item()

    def _refused(self, reason: str, remedy: str) -> ConfigurationError:
        return ConfigurationError(
            f"{type(self._inner.base).__name__} can't read shared prompts: {reason}",
            where="--metronome.attention",
            remedy=remedy,
        )


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
