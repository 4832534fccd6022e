"""One of two ranks of the actor on gloo: trains its half of a batch over shared prompts."""

import json
import sys
from pathlib import Path

import workers


def batch():
    """Sixteen rows. Of the second rank's rows, those of one micro-batch share no prompt."""
    return workers.groups((4, 4, 4, 1, 1, 1, 1))


def put_weights(worker, model):
    """The file's weights: loading onto two ranks with ZeRO-3 now and then leaves one unfilled, OpenRLHF's own too."""
    import deepspeed
    from safetensors.torch import load_file

    wanted = load_file(Path(model) / "model.safetensors")
    for name, one in worker.actor.model.module.named_parameters():
        with deepspeed.zero.GatheredParameters([one], modifier_rank=0):
            one.data.copy_(wanted[name])


def main(rank, port, model, stage):
    workers.distributed(rank, 2, port)
    args = workers.arguments({"attention": "shared_prompt"}, train__micro_batch_size=4, ds__zero_stage=stage)
    args.actor.num_gpus_per_node = 2
    worker = workers.policy(args, model)
    if stage == 3:
        put_weights(worker, model)
    half = [batch()[:2], batch()[2:]][rank]
    status = workers.whole_step(worker, half)
    print(json.dumps({"actor_grad_norm": status["actor_grad_norm"], "checked": worker.actor._checked}))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
