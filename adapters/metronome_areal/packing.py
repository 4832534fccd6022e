"""Packed rows that don't see each other, under attention that knows no row lengths.

AReaL's FSDP engine packs rows into one and hands the model an empty mask, which only flash attention's row lengths
mend: with ``sdpa``, ``eager`` and ``flex_attention`` a row attends to the rows before it (docs/areal.md: 0.3 nats).
Without a mask transformers reads the rows off the position ids, which start again at every row.
"""

from __future__ import annotations

from typing import Any

import torch

from metronome.errors import ConfigurationError

ROW_LENGTHS = ("flash_attention_2", "flash_attention_3")
"""What reads row lengths itself."""


def needs_rows(attention: str, tree: bool) -> bool:
    """Whether packed rows would see each other: no row lengths in this attention, and no tree mask."""
    return not tree and not attention.startswith(ROW_LENGTHS)


class RowsApart:
    """An FSDP engine of AReaL whose packed rows don't see each other, whatever ``attn_impl``."""

    config: Any
    enable_tree_training: bool
    parallel_helper: Any
    _checked = False

    def _prepare_mb_list(self, input_: dict[str, Any]) -> Any:
        found = super()._prepare_mb_list(input_)  # type: ignore[misc]
        attention = str(self.config.attn_impl)
        if not needs_rows(attention, self.enable_tree_training):
            return found
        if self.parallel_helper.sp_size > 1:
            raise ConfigurationError(
                "a rank of sequence parallelism sees a slice of the packed rows, of which this attention can't tell"
                " where they end",
                found=f"{attention}, {self.parallel_helper.sp_size} ranks a row",
                where="actor.attn_impl",
                remedy="flash_attention_2, or an actor.backend without context parallelism",
            )
        if not self._checked and getattr(self, "_sharing", None) is None:
            self._checked = True
            check_apart(self)
        return separate_rows(found)


@torch.no_grad()
def check_apart(engine: Any) -> None:
    """Two passes of one packed row in two before the first batch, on every rank: the other row's tokens may not matter.

    Raises ConfigurationError for a model whose mask isn't made from position ids (OPT, Falcon, gpt-oss), or whose
    layers carry a state over rows (Mamba, linear attention).
    """
    if engine.is_vision_model:
        return  # its positions are of several dimensions
    model, size = engine.model, 8
    lengths = torch.tensor([0, size, 2 * size], dtype=torch.int32, device=engine.device)
    positions = torch.arange(size, device=engine.device).repeat(1, 2)
    named: dict[str, Any] = {"position_ids": positions, "attention_mask": None, "use_cache": False}
    named |= {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths, "max_length_q": size, "max_length_k": size}
    tokens = torch.arange(3 * size, device=engine.device) % model.config.get_text_config().vocab_size
    training = model.training
    model.eval()
    try:
        first, second = (
            _local(model(input_ids=torch.cat([row, tokens[2 * size :]])[None], **named).logits)[0]
            for row in (tokens[:size], tokens[size : 2 * size])
        )
    finally:
        model.train(training)
    moved = (first.float() - second.float()).abs()
    own, other = float(moved[:size].max()), float(moved[size:].max())
    if other > own * (1e-4 if engine.config.dtype == "float32" else 2e-2):
        raise ConfigurationError(
            f"{engine.model_config.model_type}'s packed rows see each other: its mask isn't made from position ids, or"
            " its layers carry a state over rows",
            found=f"a row's logits move by {other:.2g} with the tokens of the row before",
            where="actor.attn_impl",
            remedy="flash_attention_2 where the mask alone is at fault, or another model",
        )


def _local(value: Any) -> torch.Tensor:
    found: torch.Tensor = value.to_local() if hasattr(value, "to_local") else value
    return found


def separate_rows(mb_list: Any) -> Any:
    """``mb_list`` whose model inputs leave the mask to transformers, for rows told by their position ids."""
    for inputs in mb_list.padded_mbs:
        inputs["attention_mask"] = None
    return mb_list
