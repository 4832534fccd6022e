"""One of two ranks of the actor over shared prompts: torchrun ... areal_shared_ranks.py ASSETS OUT."""

import json
import os
import sys
from pathlib import Path

import areal_room as room
import torch

SHARED = {"metronome.attention": "shared_prompt", "actor.temperature": 0.7}


def batch():
    """Two groups for the first rank; for the second rows that share no prompt."""
    return room.random_groups((4, 3, 1, 1), prompt=7, response=14)


def main(folder, out):
    from test_areal_shared import Steady, gradient

    rank = int(os.environ["RANK"])
    mine = out / f"rank{rank}"
    mine.mkdir()
    keys = {**SHARED, "actor.path": str(folder / "model"), "tokenizer_path": str(folder / "model")}
    config = room.configuration(mine, {**keys, "actor.mb_spec.max_tokens_per_mb": 40})
    checked = []
    with room.actor(config, Steady) as engine:
        half = batch()[2 * rank : 2 * rank + 2]
        engine.compute_logp([dict(one) for one in half])
        checked.append(engine._sharing.checked)
        engine.compute_logp(room.random_groups((2,), seed=rank))
        checked.append(engine._sharing.checked)
        engine.attention_found(engine.data_parallel_group)
        engine.set_version(1)
        engine.actor.ppo_update(engine.compute_advantages(half))
        found = engine.attention_found(engine.data_parallel_group)
        whole = gradient(engine)
        from areal.utils.data import concat_batch

        number = len(engine._prepare_mb_list(concat_batch(batch()[2 * rank : 2 * rank + 2])[0]))
    (out / f"{rank}.json").write_text(json.dumps({"checked": checked, "micro_batches": number, **found}))
    if not rank:
        torch.save(whole, out / "gradient.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
