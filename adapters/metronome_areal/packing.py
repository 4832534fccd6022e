"""Packed rows that don't see each other, under attention that knows no row lengths.

AReaL's FSDP engine packs rows into one and hands the model an empty mask, which only flash attention's row lengths
mend: with ``sdpa``, ``eager`` and ``flex_attention`` a row attends to the rows before it (docs/areal.md: 0.3 nats).
Without a mask transformers reads the rows off the position ids, which start again at every row.
"""

from __future__ import annotations

from typing import Any

ROW_LENGTHS = ("flash_attention_2", "flash_attention_3")
"""What reads row lengths itself."""


def needs_rows(attention: str, tree: bool) -> bool:
    """Whether packed rows would see each other: no row lengths in this attention, and no tree mask."""
    return not tree and not attention.startswith(ROW_LENGTHS)


def separate_rows(mb_list: Any) -> Any:
    """``mb_list`` whose model inputs leave the mask to transformers, for rows told by their position ids."""
    for inputs in mb_list.padded_mbs:
        inputs["attention_mask"] = None
    return mb_list
