"""Packed rows that don't see each other, under attention that knows no row lengths.

AReaL's FSDP engine packs rows into one and hands the model an empty mask, which only flash attention's row lengths
mend: with ``sdpa``, ``eager`` and ``flex_attention`` a row attends to the rows before it (docs/areal.md: 0.3 nats).
Without a mask transformers reads the rows off the position ids, which start again at every row.
"""

from __future__ import annotations

from typing import Any

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
        return separate_rows(found)


def separate_rows(mb_list: Any) -> Any:
    """``mb_list`` whose model inputs leave the mask to transformers, for rows told by their position ids."""
    for inputs in mb_list.padded_mbs:
        inputs["attention_mask"] = None
    return mb_list
