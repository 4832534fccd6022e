"""Run as ``two_ranks.py RANK STORE`` by test_worker: one of two data-parallel ranks, which print what they found."""

import sys

import torch
import workers
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

if __name__ == "__main__":
    rank = int(sys.argv[1])
    workers.ready(rank, 2, sys.argv[2])
    torch.set_num_threads(1)
    made = workers.worker()
    samples = workers.Samples()
    config = workers.actor_config(entropy_coeff=0.05, use_kl_loss=True, kl_loss_coef=0.1)
    made.set_loss_fn(workers.stock_loss(config))
    settings = {"global_batch_size": 8}

    def parts(*shares):
        """Gradient after parts of which this rank gets its share, before the clip."""
        for share in shares:
            rows = share[rank]
            data = samples.batch(rows) if rows else TensorDict({}, batch_size=(0,))
            made.accumulate(tu.assign_non_tensor(data, **settings))
        seen, step = {}, made.engine.optimizer_step

        def watched():
            seen["gradient"] = workers.gradient(made)
            return step()

        made.engine.optimizer_step = watched
        with workers.restored(made):
            found = made.step()
        made.engine.optimizer_step = step
        return seen["gradient"], found

    even, once = parts(([0, 1, 2, 3], [4, 5, 6, 7]))
    uneven, found = parts(([0, 1, 2], [3]), ([], [4, 5]), ([6], []), ([7], []))
    gap = float((uneven - even).abs().max() / even.abs().max())
    assert gap < 1e-6, gap
    assert abs(found["grad_norm"] / once["grad_norm"] - 1) < 1e-6
    assert found["metronome/trained/rows"] == once["metronome/trained/rows"] == 8
    assert found["pg_loss"] == once["pg_loss"] or abs(found["pg_loss"] / once["pg_loss"] - 1) < 1e-4
    torch.save(even, f"{sys.argv[2]}.{rank}")
    print("the gradient of one batch:", gap, flush=True)
