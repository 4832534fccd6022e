"""Shared prompts in AReaL's FSDP engine: every group's prompt is computed once, everything else is AReaL's.

AReaL packs a micro-batch's rows into one. ``SharedPromptActor`` hands the wrapped model a shorter row in which a
group's prompt stands once, with its layout as a keyword that reaches every attention layer, and gives log-probs,
entropies and statistics back in AReaL's packed layout. Losses, ``compute_logp``, FSDP2, checkpoints and publication
don't see a difference. Run on CPU with gloo, one rank and two; not run on a card.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from areal.engine import FSDPPPOActor
from torch import Tensor

from metronome.shared_prompt.interface import NAME
from metronome_areal.batches import whole_groups
from metronome_areal.packing import separate_rows
from metronome_areal.passes import ROW, Counts, Sharing, refused


class SharedPromptActor(FSDPPPOActor):
    """AReaL's ``FSDPPPOActor``, over shared rows where the part says so.

    Attributes:
        part: this process's settings (``config.part_of``).
    """

    part: Any
    _sharing: Sharing | None = None

    def _create_device_model(self) -> None:
        if self.part.shares_prompt and self.is_vision_model:
            raise refused(self.model_config.model_type, "its positions are of several dimensions")
        super()._create_device_model()
        if self.part.shares_prompt:
            self._sharing = Sharing(self, self.part.selection.attention)

    def ppo_update(self, data: list[dict[str, Any]]) -> None:
        """AReaL's, with whole groups in its minibatches."""
        if self._sharing is None:
            super().ppo_update(data)
            return
        with whole_groups():
            super().ppo_update(data)

    def attention_found(self, group: Any) -> dict[str, float]:
        """What went through shared rows since the last call, over all ranks of ``group``; every rank must call."""
        if self._sharing is None:
            return {}
        counts, self._sharing.counts = self._sharing.counts, Counts()
        found = torch.tensor(list(vars(counts).values()), dtype=torch.int64, device=self.device)
        if dist.is_initialized():
            dist.all_reduce(found, group=group)
        names = [f"metronome/attention/{name}" for name in vars(counts)]
        return dict(zip(names, map(float, found.tolist()), strict=True))

    # --- AReaL's steps of a pass ----------------------------------------------------------------------

    def _prepare_mb_list(self, input_: dict[str, Any]) -> Any:
        if self._sharing is None:
            return super()._prepare_mb_list(input_)
        if self._sharing.apart:
            return separate_rows(super()._prepare_mb_list(input_))  # without a layout the attention is sdpa
        return self._sharing.micro_batches(input_)

    def _prepare_mb_inputs(self, mb_item: Any) -> tuple[dict[str, Any], Any]:
        if self._sharing is not None and ROW in mb_item.padded_mb:
            return self._sharing.inputs(mb_item)
        found: tuple[dict[str, Any], Any] = super()._prepare_mb_inputs(mb_item)
        return found

    def _compute_logprobs_entropy(self, logits: Tensor, inputs: dict[str, Any], ulysses_pad_size: int = 0) -> Any:
        if NAME not in inputs:
            return super()._compute_logprobs_entropy(logits, inputs, ulysses_pad_size)
        assert self._sharing is not None
        return self._sharing.results(logits, inputs[NAME], entropy=True)

    def _compute_logprobs(self, logits: Tensor, inputs: dict[str, Any], ulysses_pad_size: int = 0) -> Any:
        if NAME not in inputs:
            return super()._compute_logprobs(logits, inputs, ulysses_pad_size)
        assert self._sharing is not None
        return self._sharing.results(logits, inputs[NAME], entropy=False)[0]

    def _get_vocab_min_max_logits(self, logits: Tensor, ulysses_pad_size: int = 0) -> Any:
        call = None if self._sharing is None else self._sharing.call  # of this pass: AReaL asks right after it
        if call is None:
            return super()._get_vocab_min_max_logits(logits, ulysses_pad_size)
        assert self._sharing is not None
        logits = self._sharing.labelled(logits.detach(), call)
        return tuple(call.row.spread_rows(one.float()) for one in (logits.amin(-1), logits.amax(-1)))
