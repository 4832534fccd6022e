"""``python -m metronome_openrlhf``: takes our flags, binds our classes, and hands over to OpenRLHF's own main."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from metronome.errors import ConfigurationError, MetronomeError
from metronome_openrlhf.command import check_typed, openrlhf_folder, print_help
from metronome_openrlhf.flags import HELP, check, take
from metronome_openrlhf.seen import Seen
from metronome_openrlhf.smoke import SMOKE

MAIN = "openrlhf.cli.train_ppo_ray"


def main(arguments: Sequence[str]) -> int:
    """Runs OpenRLHF with ``arguments``; returns 0, or the code of a MetronomeError with one line on stderr.

    SystemExit of OpenRLHF's parser, which sees flags without ours, and errors of the run that aren't ours go through.
    """
    try:
        block, rest = take(arguments)
        if {"-h", "--help"} & set(rest):
            return _help()
        cpu = block.pop("cpu", False)
        check(block, cpu)
        folder = openrlhf_folder()
        if folder is not None and (block or cpu):
            for line in check_typed(arguments, folder):
                print(f"metronome: {line}", flush=True)
        run(block, rest, _device(cpu))
    except MetronomeError as error:
        # An error of a Ray worker is both Ray's and ours, and says its traceback; ``cause`` is the error itself.
        own = getattr(error, "cause", error)
        own = own if isinstance(own, MetronomeError) else error
        print(f"metronome: error: {own}", file=sys.stderr, flush=True)
        return own.exit_code
    return 0


def _help() -> int:
    """Ours, then OpenRLHF's, whose package isn't imported for it."""
    print(HELP, flush=True)
    folder = openrlhf_folder()
    try:
        if folder is None:
            raise _not_installed()
        print_help(folder)
    except MetronomeError as error:
        print(f"metronome: OpenRLHF's own help can't be shown: {error}", flush=True)
    return 0


def run(block: dict[str, Any], rest: Sequence[str], device: str) -> None:
    """OpenRLHF's main with ``rest``; when it has parsed them, ``block`` is arranged, classes are bound, Ray starts.

    A run with a block ends with a line that says what was seen.
    """
    from metronome_openrlhf import bind, cluster
    from metronome_openrlhf.host import check_host, imported

    imported("openrlhf.trainer.ray.launcher")  # all that OpenRLHF needs
    if block or device == "cpu":
        check_host()

    places: list[Any] = []

    def parsed(args: Any) -> None:
        notes = []
        if device == "cpu":
            from metronome_openrlhf.cpu import arguments

            notes += arguments.arrange(args)
        if block:
            from metronome_openrlhf.config import arrange

            notes[:0] = arrange(args, block, device)  # its first line says what is on
            bind.classes(args, device)
        for line in notes:
            print(f"metronome: {line}", flush=True)
        cluster.start(device)
        if block or device == "cpu":
            cluster.check_nodes()
        places.append(args.ckpt)

    bind.listen(parsed)
    sys.argv = [MAIN, *rest]
    runpy.run_module(MAIN, run_name="__main__", alter_sys=True)
    seen = bind.seen() if block and SMOKE not in os.environ else None
    if seen is not None:
        print(f"metronome: {_closing(seen, block, places[0])}", flush=True)


def _closing(seen: Seen, block: dict[str, Any], places: Any) -> str:
    """What a run showed and where its things are."""
    checkpoints = Path(places.path)
    saved = f", checkpoints in {checkpoints}" if (checkpoints / "_actor" / "latest").is_file() else ""
    return f"{seen.told(block.get('loss'))}; model in {places.output_dir}{saved}"


def _device(cpu: Any) -> str:
    """``cpu``, with the CPU room attached, ``npu`` or ``cuda``."""
    if cpu:
        from metronome_openrlhf import cpu as room

        room.attach()
        return "cpu"
    if find_spec("openrlhf") is None:
        raise _not_installed()
    return "npu" if find_spec("torch_npu") is not None else "cuda"


def _not_installed() -> ConfigurationError:
    return ConfigurationError(
        "OpenRLHF isn't installed", where="python -m metronome_openrlhf", remedy="pip install 'openrlhf==0.11.2'"
    )
