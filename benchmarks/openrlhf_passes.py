"""What training a batch group by group costs in OpenRLHF's actor worker beside one pass over it all, without Ray.

Its real worker, trainer and DeepSpeed ZeRO-2 on gloo, in bfloat16 with fp32 sums as in the end-to-end runs; forward
passes for old log-probs included, since a synchronous step makes them too.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch
import workers  # of tests/openrlhf_host; attaches the CPU room
from bench_common import in_turns
from simulated import lengths, response


def groups(work: dict[str, Any], prompt: int) -> list[list[Any]]:
    """A batch's groups, with the lengths and tokens of the simulated engine's first batch."""
    workers.install()
    generator = torch.Generator().manual_seed(0)
    asked = torch.randint(3, 97, (prompt,), generator=generator)
    found = lengths(work["prompts"] * work["size"], work["longest"])
    rows = [workers.row(asked, torch.tensor(response(number, found)), generator) for number in range(len(found))]
    return [rows[at : at + work["size"]] for at in range(0, len(rows), work["size"])]


def passes(model: Path, work: dict[str, Any], prompt: int, repeats: int = 2) -> dict[str, float]:
    """Median seconds of one update: OpenRLHF's over the batch, and ours over each group with one step at the end."""
    torch.set_num_threads(1)
    rows, micro = work["prompts"] * work["size"], work["micro"]
    flags = {
        "ds__attn_implementation": "sdpa",
        "train__batch_size": rows,
        "train__micro_batch_size": micro,
        "rollout__batch_size": work["prompts"],
        "rollout__n_samples_per_prompt": work["size"],
        "rollout__max_new_tokens": work["longest"],
    }
    stock = workers.stock(workers.arguments(None, fp32=False, **flags), model)
    ours = workers.policy(workers.arguments({"rollout_source": "periodic"}, fp32=False, **flags), model)
    made = groups(work, prompt)

    def forward(worker: Any, batch: Any) -> None:
        worker.forward(batch.sequences, batch.action_mask, batch.attention_mask)

    def whole() -> None:
        every = [row for group in made for row in group]
        for at in range(0, rows, micro):
            forward(stock, workers.together(every[at : at + micro]))
        workers.whole_step(stock, made)

    def parts() -> None:
        for group in made:
            batches = [group[at : at + micro] for at in range(0, len(group), micro)]
            for batch in batches:
                forward(ours, workers.together(batch))
            ours.metronome_accumulate([workers.together(batch) for batch in batches], rows, 0.0)
        ours.metronome_step(rows)

    times = in_turns({"whole": whole, "parts": parts}, repeats)
    return {name: statistics.median(seconds) for name, seconds in times.items()}
