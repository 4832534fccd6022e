"""Two ranks: torchrun --nproc-per-node=2 areal_parts_two_ranks.py FOLDER; each leaves FOLDER/found.RANK."""

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import areal_room as room
import torch
import torch.distributed as dist
from areal.utils import stats_tracker
from areal_engines import gradients, in_parts

from metronome_areal.config import read
from metronome_areal.cpu import assets

NARROW = {"actor.mb_spec.max_tokens_per_mb": 48, "actor.kl_ctl": 0.05}
KEYS = NARROW | {
    "metronome.loss": "a3po",
    "metronome.rollout_source": "periodic",
    "metronome.group_controller": "sagc",
    "metronome.sagc": {
        "sizes": [2, 4, 8],
        "start": 4,
        "min_dwell": 1,
        "event": "step_idle",
        "idle_tau": 0.05,
        "eta": 4.0,
        "delta": 0.05,
    },
    "total_train_steps": 4,
}
SHARES = (
    ([0, 1], [2]),
    ([], [3]),  # fewer groups than ranks; the one has several micro-batches
    ([4], []),
)
"""Groups of each rank, part by part."""


def groups():
    """Five groups, of 4, 3, 4, 6 and 2 rows, stale by none to three versions."""
    found = room.random_groups([4, 3, 4, 6, 2])
    draw = torch.Generator().manual_seed(5)
    return [{**one, "versions": torch.randint(0, 4, one["versions"].shape, generator=draw)} for one in found]


class Noting(room.PPOTrainer):
    """Keeps each step's metrics and gradient."""

    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        self.stats, self.gradients, self.groups = [], [], []
        commit, step, part = self.stats_logger.commit, self.actor.optimizer_step, self.actor.metronome_part

        def keeping(*args):
            self.stats.append(args[-1])
            commit(*args)

        def noting():
            self.gradients.append(gradients(self.actor))
            return step()

        def trained(of_part):
            self.groups.append([len(one["rewards"]) for one in of_part if one["loss_mask"].any()])
            return part(of_part)

        self.stats_logger.commit, self.actor.optimizer_step, self.actor.metronome_part = keeping, noting, trained


def bounded(one):
    """Two more steps of the same trainer in bounded mode: groups a step, and metrics."""
    block = {"loss": "a3po", "rollout_source": "bounded", "bounded": {"max_staleness": 1}}
    one.part = read(replace(one.config, metronome={"cpu": True, **block}))
    one.config.total_train_steps = 2
    for engine in (one.actor, one.rollout):
        engine.set_version(0)
    groups, compute = [], one.actor.compute_advantages

    def noting(batch):
        groups.append(len(batch))
        return compute(batch)

    one.actor.compute_advantages = noting
    one.stats.clear()
    one.train(workflow=room.workflow(one.config))
    return groups, [step["metronome/loss/staleness_max"] for step in one.stats]


def main(folder):
    rank = int(os.environ["RANK"])
    if rank == 0:
        assets.make(folder)
    while not (folder / "tiny_reward.py").exists():  # the process group isn't there yet
        time.sleep(0.1)
    mine = folder / f"rank{rank}"
    mine.mkdir()
    model = str(folder / "model")
    reference = {"experiment_name": "room", "trial_name": "t0", "backend": "fsdp:d2", "path": model, "optimizer": None}
    paths = {"actor.path": model, "tokenizer_path": model, "ref": reference}
    with room.trainer(room.configuration(mine, KEYS | paths), Noting) as one:
        engine, all_groups = one.actor, groups()
        engine.set_version(3)
        found = {"gradient": in_parts(engine, [[all_groups[place] for place in part[rank]] for part in SHARES])}
        found["metrics"] = dict(engine.found)
        parts = [[all_groups[place] for place in (*part[0], *part[1])] for part in SHARES]
        found["lopsided"] = in_parts(engine, [part if rank else [] for part in parts])
        engine.set_version(0)
        one.gradients.clear()
        one.groups.clear()
        stats_tracker.export_all()
        one.train(workflow=room.workflow(one.config))
        assert dist.get_world_size() == 2
        controller = one.part.selection.group_controller
        names = ("metronome/group_controller/size", "metronome/rollout_source/prompts", "metronome/loss/calls")
        found["steps"] = [{name: step[name] for name in names} for step in one.stats]
        found["controller"], found["trained"] = controller.state_dict(), one.groups
        found["norms"] = [float(gradient.norm()) for gradient in one.gradients]
        found["bounded"] = bounded(one)
    torch.save(found, folder / f"found.{rank}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
