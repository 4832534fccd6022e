"""The CPU room: runs AReaL without an accelerator and without an inference server.

Made for debugging a training set-up on a laptop, with models of millions of parameters. ``metronome.cpu=true`` switches
it on: AReaL's FSDP engine trains over gloo, and an engine in the same process generates (``engine.py``); everything in
between, workflows, staleness, statistics, checkpoints, is AReaL's. With ``scheduler.type=local`` beside it AReaL's
single controller starts its workers, and those of the rollout generate (``worker.py``).
"""

from __future__ import annotations

import os
import socket
import sys

VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHDYNAMO_DISABLE": "1",  # AReaL compiles its log-probs, which needs a C++ compiler and a minute
}
"""Set in every process of the room unless they are set already."""

_SINGLE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
_set_here: set[str] = set()


def prepare(controller: bool = False) -> None:
    """Sets what AReaL reads from the environment; a second call does nothing.

    ``AREAL_SPMD_MODE=1``, the variables above, and without torchrun those of a single rank. Called before AReaL is
    imported where that can be had: AReaL chooses its platform, and torch its threads, once.

    Args:
        controller: whether AReaL's single controller runs: its mode, and no rank; its workers inherit the variables.
    """
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    os.environ["AREAL_SPMD_MODE"] = "0" if controller else "1"
    if controller:
        for name in _set_here:
            os.environ.pop(name, None)
        _set_here.clear()
    elif "RANK" not in os.environ:
        single = {**_SINGLE, "MASTER_PORT": str(_free_port())}
        os.environ.update(single)
        _set_here.update(single)
    torch = sys.modules.get("torch")
    if torch is not None and os.environ["OMP_NUM_THREADS"] == "1":
        torch.set_num_threads(1)
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and os.environ["TORCHDYNAMO_DISABLE"] == "1":
        dynamo.config.disable = True


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
