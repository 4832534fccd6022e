"""One of two ranks of the actor on gloo with our loss: each takes half of a batch, of other ages than the other's."""

import sys

import torch
import torch.distributed as dist
import workers
from openrlhf_two_ranks import flat_moments

BLOCK = {"loss": "a3po"}


def batch():
    """Four groups, three versions; group 3's versions aren't known."""
    found = workers.groups()
    for number, group in enumerate(found):
        for row in group:
            row.versions = torch.full_like(row.versions, (3, 1, 0, -1)[number])
    return found


def trained(model, groups, **flags):
    worker = workers.policy(workers.arguments(BLOCK, **flags), model)
    worker.metronome_version(3)
    return worker, workers.whole_step(worker, groups)


def main(rank, port, model, out):
    workers.distributed(rank, 2, port)
    worker, status = trained(model, batch()[2 * rank : 2 * rank + 2], actor__num_gpus_per_node=2)
    moments = flat_moments(worker)
    torch.save({"status": status, "moments": moments}, f"{out}.{rank}")
    dist.barrier()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
