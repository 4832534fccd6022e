"""``python -m metronome_openrlhf``: takes our flags, binds our classes, and hands over to OpenRLHF's own main."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from metronome.errors import ConfigurationError, MetronomeError
from metronome_openrlhf.flags import HELP, check, take

MAIN = "openrlhf.cli.train_ppo_ray"


def main(arguments: Sequence[str]) -> int:
    """Runs OpenRLHF with ``arguments``; returns 0, or the code of a MetronomeError with one line on stderr.

    SystemExit of OpenRLHF's parser, and errors of the run that aren't ours, go through.
    """
    try:
        block, rest = take(arguments)
        if {"-h", "--help"} & set(rest):
            print(HELP, flush=True)
        cpu = block.pop("cpu", False)
        check(block, cpu)
        run(block, rest, _device(cpu))
    except MetronomeError as error:
        # An error of a Ray worker is both Ray's and ours, and says its traceback; ``cause`` is the error itself.
        own = getattr(error, "cause", error)
        own = own if isinstance(own, MetronomeError) else error
        print(f"metronome: error: {own}", file=sys.stderr, flush=True)
        return own.exit_code
    return 0


def run(block: dict[str, Any], rest: Sequence[str], device: str) -> None:
    """OpenRLHF's main with ``rest``; when it has parsed them, ``block`` is arranged, classes are bound, Ray starts."""
    from metronome_openrlhf import bind, cluster
    from metronome_openrlhf.host import check_host, imported

    imported("openrlhf.trainer.ray.launcher")  # all that OpenRLHF needs
    if block or device == "cpu":
        check_host()

    def parsed(args: Any) -> None:
        notes = []
        if device == "cpu":
            from metronome_openrlhf.cpu import arguments

            notes += arguments.arrange(args)
        if block:
            from metronome_openrlhf.config import arrange

            notes += arrange(args, block, device)
            bind.classes(args, device)
        for line in notes:
            print(f"metronome: {line}", flush=True)
        cluster.start(device)
        if block or device == "cpu":
            cluster.check_nodes()

    bind.listen(parsed)
    sys.argv = [MAIN, *rest]
    runpy.run_module(MAIN, run_name="__main__", alter_sys=True)


def _device(cpu: Any) -> str:
    """``cpu``, with the CPU room attached, ``npu`` or ``cuda``."""
    if cpu:
        from metronome_openrlhf import cpu as room

        room.attach()
        return "cpu"
    if find_spec("openrlhf") is None:
        raise ConfigurationError(
            "OpenRLHF isn't installed", where="python -m metronome_openrlhf", remedy="pip install 'openrlhf==0.11.2'"
        )
    return "npu" if find_spec("torch_npu") is not None else "cuda"
