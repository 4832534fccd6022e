"""Run as ``megatron_ranks.py RANK FOLDER`` by test_megatron_engine: one of two ranks, in each arrangement in turn."""

import sys
from contextlib import nullcontext
from pathlib import Path

import megatron_room as room
import torch
import workers
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.metric import reduce_metrics

ARRANGEMENTS = {
    "data, distributed optimiser": ({}, False),
    "tensor and sequence": ({"tensor_model_parallel_size": 2}, False),
    "pipeline, tied": ({"pipeline_model_parallel_size": 2}, True),
}


def shares(rows, alike):
    """This rank's rows of a part: all where ranks hold parts of one model, every second where they share the data."""
    return rows if alike else rows[rank::2]


def run(options, tied):
    """Gaps between parts and one batch, and between parts that are finalised one by one and one batch."""
    loss = workers.stock_loss(workers.actor_config(**room.LOSS))
    alike = bool(options)
    one = room.worker(loss, tied=tied, **options)
    settings = {"mini_batch_size": 8, "epochs": 1, "seed": 1, "dataloader_kwargs": {"shuffle": False}}
    samples = room.grouped()
    with room.watched(one) as seen:
        output = one.train_mini_batch(samples.batch(shares(list(range(8)), alike), **settings))
    theirs = reduce_metrics(tu.get(output, "metrics")) if output is not None else {}
    told = [theirs]
    torch.distributed.broadcast_object_list(told, src=1 if "pipeline_model_parallel_size" in options else 0)
    wanted = seen["gradient"]

    def parts(other):
        for part in room.SPLIT:
            rows = shares(part, alike)
            data = samples.batch(rows) if rows else TensorDict({}, batch_size=(0,))
            other.accumulate(tu.assign_non_tensor(data, global_batch_size=8))
        with room.watched(other) as seen:
            metrics = other.step(8)
        return room.gap(seen["gradient"], wanted), metrics

    gap, metrics = parts(room.worker(loss, tied=tied, **options))
    other = room.worker(loss, tied=tied, **options)
    buffered = other.buffered
    buffered.part = nullcontext
    buffered.finish = lambda factor: [chunk.scale_gradients(factor) for chunk in other.engine.module]
    each, _ = parts(other)
    shared_gap, shared = parts(room.sharing(loss, tied=tied, **options))
    return {
        "tied": tied,
        "gap": gap,
        "finalised_each": each,
        "metrics": {key: float(value) for key, value in metrics.items() if not key.startswith("perf/")},
        "shared_gap": shared_gap,
        "shared": {key: float(value) for key, value in shared.items()},
        "stock_norm": float(told[0]["grad_norm"]),
        "stock_pg_loss": float(told[0]["actor/pg_loss"]),
    }


if __name__ == "__main__":
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    workers.ready(rank, 2, str(folder / "store"))
    from megatron.core import parallel_state

    found = {}
    with room.furnished():
        for name, (options, tied) in ARRANGEMENTS.items():
            found[name] = run(options, tied)
            print(
                name, {key: value for key, value in found[name].items() if key not in ("metrics", "shared")}, flush=True
            )
            parallel_state.destroy_model_parallel()
    torch.save(found, folder / f"{rank}.pt")
