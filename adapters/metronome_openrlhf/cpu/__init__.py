"""The CPU room: runs the unmodified OpenRLHF, with DeepSpeed on gloo and real vLLM, without an accelerator.

Made for debugging a training set-up on a laptop, with models of millions of parameters. ``--metronome.cpu`` switches
it on for the launching process, every Ray worker and vLLM's processes.
"""

from __future__ import annotations

import logging
import os
import sys

from metronome.errors import PluginError
from metronome_patches.ledger import apply, require_host

HOOK = "metronome_openrlhf.cpu.attach"
"""What Ray calls in each worker before anything else."""

VARIABLES = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHDYNAMO_DISABLE": "1",  # OpenRLHF compiles its entropy, which needs a C++ compiler
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # its worker in its engine's process: one process less, half a start
    "VLLM_NO_USAGE_STATS": "1",
}
"""Set in every process of the room unless they are set already; DeepSpeed's accelerator always."""

_log = logging.getLogger("metronome_openrlhf")
_attached = False


def attach() -> None:
    """Lets the unmodified OpenRLHF be imported and run on the CPU in this process; a second call does nothing.

    Imports nothing of OpenRLHF, torch or DeepSpeed: each change waits for its module.

    Raises:
        PluginError: OpenRLHF's version isn't one that this was written for, or DeepSpeed chose another accelerator.
    """
    global _attached
    if _attached:
        return
    from metronome_openrlhf.host import VERSIONS

    from .patches import PATCHES

    found = require_host("openrlhf", VERSIONS, "the CPU room")
    _check_accelerator()
    os.environ["DS_ACCELERATOR"] = VARIABLES["DS_ACCELERATOR"]
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    for patch in PATCHES:
        apply(patch)
    _attached = True
    _log.info("metronome: OpenRLHF %s on the CPU", found)


def _check_accelerator() -> None:
    chosen = sys.modules.get("deepspeed.accelerator.real_accelerator")
    accelerator = getattr(chosen, "ds_accelerator", None)
    if accelerator is not None and accelerator._name != "cpu":
        raise PluginError(
            "DeepSpeed has chosen its accelerator already",
            found=accelerator._name,
            where="deepspeed.accelerator",
            remedy="attach the CPU room before DeepSpeed is imported, or set DS_ACCELERATOR=cpu",
        )
