"""One engine's model over shared rows: micro-batches of whole groups, a pass, its results, the first-use check."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from areal.engine.fsdp_engine import FSDPTrainContext
from areal.utils.data import MicroBatchList
from torch import Tensor

from metronome.contracts import AttentionBackend
from metronome.errors import ConfigurationError, EqualityViolated, MetronomeError
from metronome.shared_prompt import interface
from metronome.shared_prompt.interface import NAME, Signature
from metronome.shared_prompt.logits import row_log_probs
from metronome.shared_prompt.options import SharedPromptOptions
from metronome.shared_prompt.refusals import refusal
from metronome.shared_prompt.selfcheck import check_attention, check_log_probs
from metronome_areal.batches import exactly, micro_batches, packed, select
from metronome_areal.rows import Group, PackedRow, comparable, read_groups

ROW = "metronome_row"
"""Key of a micro-batch's ``PackedRow`` among AReaL's model inputs, until the model is called."""


@dataclass
class Counts:
    """What went through shared rows since they were last told.

    Attributes:
        calls: attention layers that saw a layout (proof of life); recomputation isn't counted.
        tokens_fed: tokens that the model computed.
        tokens_separate: tokens of the same rows as AReaL packs them, those behind the last trained token included.
    """

    calls: int = 0
    tokens_fed: int = 0
    tokens_separate: int = 0


class Call:
    """``interface.SharedPromptCall`` that isn't a dataclass, which wrappers copy, with the row that it is about."""

    def __init__(self, row: PackedRow, backend: AttentionBackend) -> None:
        self.row, self.plan, self.backend, self.exchange = row, row.plan, backend, None
        self.layers: list[Signature] = []


class Sharing:
    """The model of one engine over shared rows.

    Args:
        engine: its model is made, and isn't wrapped yet: transformers tells by a class's source whether its attention
            can be set, and FSDP2 gives the model another class.
        attention: what computes attention.

    Raises ConfigurationError for a model that can't read shared prompts.

    Attributes:
        counts: what went through shared rows.
        apart: rows are AReaL's own meanwhile.
        call: of the pass under way, or None where rows are apart.
    """

    def __init__(self, engine: Any, attention: AttentionBackend) -> None:
        self.engine, self.attention = engine, attention
        self.base = engine.model
        self.config = self.base.config.get_text_config(decoder=True)
        for one in (self.base.config, self.config):
            if getattr(one, "output_router_logits", False):
                one.output_router_logits = False  # AReaL reads no router losses
        reason = refusal(self.base, self.base, self.config)
        if reason is not None:
            raise refused(type(self.base).__name__, *reason)
        self.picks_rows = "logits_to_keep" in inspect.signature(self.base.forward).parameters
        own = getattr(attention, "options", None)  # a third party's backend may mean something else by it
        self.options = own if isinstance(own, SharedPromptOptions) else SharedPromptOptions()
        self.checked = not self.options.self_check
        self.counts, self.apart = Counts(), False
        self.call: Call | None = None
        self._said: set[str] = set()
        interface.register()
        self.base.set_attn_implementation(NAME)
        if self.base.config._attn_implementation != NAME:
            raise refused(type(self.base).__name__, "it doesn't take a registered attention implementation")

    # --- a batch --------------------------------------------------------------------------------------

    def micro_batches(self, data: dict[str, Any]) -> MicroBatchList:
        """Micro-batches of whole groups, as many on every rank; the first batch with a group is checked."""
        groups, others = read_groups(data)
        if not self.checked:
            self._first_use(data, groups)
        spec = self.engine.config.mb_spec
        bins = micro_batches(groups, spec.max_tokens_per_mb)
        if sum(map(len, bins)) > len(groups):
            self._say(
                f"a group of prompt and responses above mb_spec.max_tokens_per_mb={spec.max_tokens_per_mb} is cut into"
                " parts, each of which computes the prompt"
            )
        number = self._largest(max(len(bins), spec.n_mbs or 1))
        bins = exactly(bins, -(-number // spec.n_mbs_divisor) * spec.n_mbs_divisor)
        lengths: list[int] = data["attention_mask"].sum(1).tolist()
        places = [[row.place for group in one for row in group] for one in bins]
        places[0] += [row.place for row in others]
        rows = [self._packed(one, own, lengths) for one, own in zip(bins, places, strict=True)]
        forward = [place for one in places for place in one]
        backward = [0] * len(forward)
        for at, place in enumerate(forward):
            backward[place] = at
        return MicroBatchList(
            data=data,
            mb_spec=spec,
            mbs=[packed(data, one) for one in places],
            group_lens=[row.plan.tokens for row in rows],
            forward_indices=forward,
            backward_indices=backward,
            padded_mbs=[{ROW: row} for row in rows],
            padding_lengths=[0] * len(rows),
            padded_to_lengths=[row.plan.tokens for row in rows],
        )

    def _packed(self, groups: list[Group], places: list[int], lengths: list[int]) -> PackedRow:
        starts, size = {}, 0
        for place in places:
            starts[place] = size
            size += int(lengths[place])
        return PackedRow.build(groups, starts, size, self.engine.device)

    def inputs(self, mb_item: Any) -> tuple[dict[str, Any], FSDPTrainContext]:
        """What the model is called with, and AReaL's context of the micro-batch."""
        row: PackedRow = mb_item.padded_mb[ROW]
        plan = row.plan
        self.call = call = Call(row, self.attention)
        inputs: dict[str, Any] = {
            "input_ids": row.tokens[None],
            "position_ids": plan.position_ids[None],
            "attention_mask": interface.placeholder_mask(plan.queries, plan.device),
            "use_cache": False,
            NAME: call,
        }
        if self.picks_rows:  # one at least: AReaL takes the mean of a masked micro-batch's logits
            inputs["logits_to_keep"] = plan.unique_label_rows if plan.response_tokens else plan.position_ids[:1]
        return inputs, FSDPTrainContext(model_inputs=inputs, mb_input=mb_item.orig_mb)

    def results(self, logits: Tensor, call: Call, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """Log-probs, and entropies if asked, in AReaL's packed layout: of token t + 1 at place t.

        Zero where no response token follows: there AReaL has a prompt token's, or the next row's first token's, and
        its losses and trainers read neither.
        """
        self._check_layers(call)
        self.counts.calls += len(call.layers)
        self.counts.tokens_fed += call.plan.tokens
        self.counts.tokens_separate += call.row.size
        self._tell(call)
        call.layers = list(call.layers)  # a checkpointed layer comes again in the backward pass
        tokens = call.row.tokens[call.plan.response_index]
        found = row_log_probs(
            self.labelled(logits, call),
            _wide,
            tokens,
            call.plan,
            logits.shape[-1],
            float(self.engine.config.temperature),
            entropy,
        )
        log_probs, entropies = (None if one is None else call.row.spread(one) for one in found)
        assert log_probs is not None
        return log_probs, entropies

    def labelled(self, logits: Tensor, call: Call) -> Tensor:
        """``[U,V]``, of the rows that predict a response token."""
        plan = call.plan
        return logits[: len(plan.unique_label_rows)] if self.picks_rows else logits[plan.unique_label_rows]

    # --- checks ---------------------------------------------------------------------------------------

    def _check_layers(self, call: Call) -> None:
        name, expected = type(self.base).__name__, self.config.num_hidden_layers
        if len(call.layers) != expected:
            raise refused(
                name, f"{len(call.layers)} of {expected} layers went through the attention interface with their layout"
            )
        sliding = (getattr(self.config, "layer_types", None) or []).count("sliding_attention")
        windows = sum(layer.window is not None for layer in call.layers)
        if windows < sliding:
            raise refused(name, f"{windows} of {sliding} sliding-window layers say how long their window is")

    def _first_use(self, data: dict[str, Any], groups: list[Group]) -> None:
        """The self-check at real lengths, by all ranks in the same batch: FSDP's collectives wait for each."""
        chosen = comparable(groups)
        if not self._everywhere(bool(chosen)):
            return  # nothing to compare yet
        names = ("input_ids", "attention_mask", "loss_mask", "advantages")
        some = select({name: data[name] for name in names if name in data}, chosen)
        failure: MetronomeError | None = None
        with self._comparing():
            try:
                self._compare(some)
            except MetronomeError as error:
                failure = error
        self.checked = False
        if not self._everywhere(failure is None):
            raise failure or EqualityViolated(
                "the first-use check of shared prompts failed on another rank",
                where="metronome.attention: shared_prompt",
                remedy="see that rank's error",
            )
        self.checked = True

    @contextmanager
    def _comparing(self) -> Iterator[None]:
        model, counts = self.engine.model, self.counts
        training = model.training
        self.checked = True  # the comparison's own batch isn't
        model.eval()
        try:
            yield
        finally:
            model.train(training)
            self.apart, self.call, self.counts = False, None, counts

    def _compare(self, data: dict[str, Any]) -> None:
        self.counts = Counts()
        shared = self.engine.forward_batch(dict(data))
        call = self.call
        assert call is not None
        self.apart, self.call = True, None
        separate = self.engine.forward_batch(dict(data))
        # After both passes: every rank has made them before one may stop.
        for layer in dict.fromkeys(call.layers):
            check_attention(self.attention, call.plan, layer, call.plan.device)
        where = torch.zeros(shared.shape, dtype=torch.bool, device=shared.device)
        for group in read_groups(data)[0]:
            for row in group:
                where[row.place, row.prompt - 1 : len(row.ids) - 1] = True
        check_log_probs(shared[where], separate[where], call.layers[0].dtype, self.options.self_check_tolerance)

    def _everywhere(self, here: bool) -> bool:
        return self._largest(int(not here)) == 0

    def _largest(self, number: int) -> int:
        """Over all ranks, which are data-parallel: others are refused."""
        found = torch.tensor(number)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.engine.cpu_group)
        return int(found)

    # --- messages -------------------------------------------------------------------------------------

    def _say(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self.engine.logger.warning(f"metronome: {line}")  # AReaL turns loggers off that aren't its own

    def _tell(self, call: Call) -> None:
        explain = getattr(self.attention, "explain", None)
        if explain is None or "told" in self._said:
            return
        self._said.add("told")
        kinds = dict.fromkeys(layer.need(call.plan.device.type) for layer in call.layers)
        for line in dict.fromkeys(explain(kind, call.plan) for kind in kinds):
            self.engine.logger.info(f"metronome: shared prompts by {line}")


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def refused(name: str, reason: str, remedy: str = "attention: host") -> ConfigurationError:
    """The error about a model, or a type of models, called ``name``."""
    return ConfigurationError(f"{name} can't read shared prompts: {reason}", where="metronome.attention", remedy=remedy)
