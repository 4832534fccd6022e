"""One of two ranks of the actor on gloo: trains its share of a streamed batch, as the trainer deals it out."""

import sys
from types import SimpleNamespace

import local_ray
import torch
import torch.distributed as dist
import workers
from openrlhf.trainer.ppo_utils.kl_controller import FixedKLController

from metronome_openrlhf import trainer
from metronome_openrlhf.trainer import MetronomeTrainer


class Elsewhere:
    """The other rank's worker: counts what it is sent."""

    def metronome_accumulate(self, sent, rows, kl_ctl, filled=0):
        self.sent = len(sent)
        return {}


def flat_moments(worker):
    """Adam's first moment of each parameter group, whole, from both ranks' halves."""
    optimizer = worker.actor_optim
    found = []
    for group, whole in zip(optimizer.optimizer.param_groups, optimizer.bit16_groups, strict=True):
        mine = optimizer.optimizer.state[group["params"][0]]["exp_avg"]
        halves = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(halves, mine)
        found.append(torch.cat(halves)[: sum(one.numel() for one in whole)])
    return torch.cat(found)


CASES = {
    "token-mean": {},
    "seq-mean": {"actor__loss_agg_mode": "seq-mean-token-mean"},
    "clipped": {"actor__max_norm": 0.1},
    "unmasked": {},
}


def streamed(rank, model, case):
    # Micro-batches of one row: parts of 3 and 7 rows leave a rank short.
    flags = {"actor__num_gpus_per_node": 2, "train__micro_batch_size": 1, **CASES[case]}
    args = workers.arguments({"rollout_source": "periodic"}, **flags)
    worker = workers.policy(args, model)
    handles = [local_ray.Handle(worker if one == rank else Elsewhere()) for one in range(2)]
    made = object.__new__(MetronomeTrainer)
    made.args, made.kl_ctl = args, FixedKLController(0.0)
    made.tokenizer = SimpleNamespace(pad_token_id=0)
    made.actor_model_group = SimpleNamespace(_actor_handlers=handles)
    batch, sums, passes = workers.groups((2, 3, 5, 6)), {}, []
    backward = worker.strategy.backward

    def counted(*arguments, **named):
        passes[-1] += 1
        return backward(*arguments, **named)

    worker.strategy.backward = counted
    for part in ([3], [0, 2], [1]):
        passes.append(0)
        made._accumulate([workers.copied(batch[place]) for place in part], 16, sums)
        assert passes[-1] == handles[1 - rank]._target.sent
    status = worker.metronome_step(16)
    metrics = torch.tensor([*sums["policy_loss"], *sums["reward"]], dtype=torch.float64)
    dist.all_reduce(metrics)
    return {"moments": flat_moments(worker), "status": status, "metrics": metrics, "passes": passes}


def main(rank, port, model, out):
    workers.distributed(rank, 2, port)
    local_ray.install(setattr, trainer)
    found = {}
    for case in CASES:
        if case == "unmasked":
            trainer._masked = lambda row: row
        found[case] = streamed(rank, model, case)
    if not rank:
        torch.save(found, out)
    dist.barrier()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
