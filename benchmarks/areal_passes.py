"""What training a batch group by group costs in AReaL's FSDP engine beside one update over it all, in one process.

The same work as in areal_periodic.py, whose engines these are, with nothing beside it. Old log-probs, which both sides
compute by a forward pass, are included.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import areal_engines as engines  # of tests/areal_host
import areal_room as room  # attaches the CPU room
import torch
from bench_common import in_turns
from simulated import lengths, response


def passes(config: Any, work: Mapping[str, Any], repeats: int = 2) -> dict[str, float]:
    """Median seconds of one update: AReaL's over the batch, and ours over each group with one step at the end."""
    made = groups(work)

    def whole() -> None:
        batch = copied(made)
        for group, found in zip(batch, stock.compute_logp(batch), strict=True):
            group["prox_logp"] = found
        stock.ppo_update(stock.compute_advantages(batch))

    def parts() -> None:
        ours.metronome_begin()
        for group in copied(made):
            ours.metronome_part(ours.metronome_level([group]))
        ours.metronome_step()

    with engines.stock(config) as stock, room.actor(config) as ours:
        times = in_turns({"whole": whole, "parts": parts}, repeats)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def groups(work: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A batch's groups, with the lengths and tokens of the simulated engine's first batch."""
    draw = torch.Generator().manual_seed(0)
    found = lengths(work["prompts"] * work["size"], work["longest"])
    made = []
    for first in range(0, len(found), work["size"]):
        asked = torch.randint(3, 97, (work["tokens"],), generator=draw)
        answers = [torch.tensor(response(number, found)) for number in range(first, first + work["size"])]
        rows = [torch.cat([asked, answer]) for answer in answers]
        width = max(map(len, rows))
        columns = torch.arange(width)[None]
        real = columns < torch.tensor([len(row) for row in rows])[:, None]
        mask = real & (columns >= work["tokens"])
        made.append(
            {
                "input_ids": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).int(),
                "attention_mask": real,
                "loss_mask": mask.int(),
                "logprobs": torch.zeros(real.shape),
                "versions": torch.where(mask, 0, -1).int(),
                "rewards": torch.rand(len(rows), generator=draw),
            }
        )
    return made


def copied(made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """AReaL writes into a batch."""
    return [{name: value.clone() for name, value in group.items()} for group in made]
