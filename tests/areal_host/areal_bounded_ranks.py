"""Two ranks, bounded: torchrun --nproc-per-node=2 areal_bounded_ranks.py FOLDER first|second.

The first run goes away after its third step; the second goes on. Each rank writes what it trained.
"""

import json
import os
import sys
import time
from pathlib import Path

import areal_room as room
from areal.utils import stats_tracker

from metronome_areal.cpu import assets

KEYS = {
    "metronome.rollout_source": "bounded",
    "metronome.bounded.max_staleness": 2,
    "metronome.in_flight": "finish",
    "metronome.loss": "a3po",
    "metronome.group_controller": "sagc",
    "metronome.sagc": {"sizes": [2, 4], "min_dwell": 1, "event": "mean_ratio", "tau": 1.1, "eta": 4.0, "delta": 0.05},
    "gconfig.stop_token_ids": list(range(20, 40)),
    "recover.mode": "on",
    "recover.freq_steps": 1,
}


def main(folder, which):
    rank, mine = os.environ["RANK"], folder / f"rank{os.environ['RANK']}"
    if which == "first":
        if rank == "0":
            assets.make(folder)
        while not (folder / "tiny_reward.py").exists():  # the folder is rank 0's
            time.sleep(0.1)
        mine.mkdir()
    paths = {"actor.path": str(folder / "model"), "tokenizer_path": str(folder / "model")}
    runs = {"recover.fileroot": str(folder / "runs"), "cluster.fileroot": str(folder / "runs")}
    steps = {"total_train_steps": 3 if which == "first" else 6}
    config = room.configuration(mine, {**KEYS, **paths, **runs, **steps})
    with room.trainer(config) as one:
        one.rollout.generator.least_seconds = 0.005
        found = {"begun": [one.actor.get_version(), one.rollout.get_version()], "most": [], "sizes": [], "trained": []}
        found["batch"] = one.train_dataloader.batch_size
        stats_tracker.export_all()
        commit, flow_of = one.stats_logger.commit, one._flow

        def keeping(*args):
            found["sizes"].append(args[-1]["metronome/group_controller/size"])
            found["most"].append(args[-1]["metronome/bounded/staleness_max"])
            commit(*args)

        def watched():
            flow = flow_of()
            take, dispatch = flow.take, flow.dispatch

            def taking(*args, **named):
                arrived = take(*args, **named)
                found["trained"] += [arrival.task.data["messages"][0]["content"] for arrival in arrived]
                return arrived

            def counting():
                before, sent = len(flow._running) + len(flow._queued) + flow.trained, len(flow._running)
                dispatch()
                sent = len(flow._running) - sent
                assert sent <= max(0, 3 * flow.batch - before), (sent, before, flow.batch)

            flow.take, flow.dispatch = taking, counting
            return flow

        one.stats_logger.commit, one._flow = keeping, watched
        one.train(workflow=room.workflow(config))
        out = one.train_dataloader.out()
        found["out"] = [data["messages"][0]["content"] for data in out]
        found["controller"] = one.part.selection.group_controller.state_dict()
    (folder / f"{which}{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
