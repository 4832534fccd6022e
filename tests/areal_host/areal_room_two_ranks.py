"""Two ranks in the CPU room: torchrun --nproc-per-node=2 areal_room_two_ranks.py FOLDER."""

import os
import sys
import time
from pathlib import Path

import areal_room as room
import torch
import torch.distributed as dist

from metronome_areal.cpu import assets
from metronome_areal.cpu.weights import gathered


def main(folder):
    if os.environ["RANK"] == "0":
        assets.make(folder)
    # The folder is rank 0's; the process group isn't there yet.
    while not (folder / "tiny_reward.py").exists():
        time.sleep(0.1)
    mine = folder / f"rank{os.environ['RANK']}"
    mine.mkdir()
    config = room.configuration(mine, {"actor.path": str(folder / "model"), "tokenizer_path": str(folder / "model")})
    with room.trainer(config) as one:
        seen = []
        prepare_batch = one.actor.prepare_batch

        def noted(*args, **named):
            batch = prepare_batch(*args, **named)
            full = gathered(one.actor)
            ours = one.rollout.generator._model.state_dict()
            for name, value in full.items():
                torch.testing.assert_close(ours[name], value, atol=0, rtol=0)
            for group, theirs in zip(batch, one.actor.compute_logp(batch), strict=True):
                mask = group["loss_mask"][:, 1:].bool()
                assert (group["logprobs"][:, 1:] - theirs[:, :-1])[mask].abs().max() < 1e-5
                assert set(group["versions"][group["loss_mask"].bool()].tolist()) == {len(seen)}
            seen.append({name: value.clone() for name, value in full.items()})
            return batch

        one.actor.prepare_batch = noted
        assert dist.get_world_size() == 2
        assert one.config.actor.backend == "fsdp:d2"
        one.train(workflow=room.workflow(config))
        assert len(seen) == 2
        assert any(not torch.equal(seen[0][name], seen[1][name]) for name in seen[0])
        print("both steps seen", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
