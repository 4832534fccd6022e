"""``python -m metronome_areal user_script.py --config c.yaml metronome.loss=a3po``: a user's script, unchanged."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from metronome.errors import ConfigurationError, MetronomeError

HELP = """usage: python -m metronome_areal user_script.py --config FILE [key=value ...]

runs a script written for AReaL with metronome's PPOTrainer in AReaL's place; inside torchrun, too:
  torchrun --nproc-per-node 2 -m metronome_areal user_script.py --config FILE metronome.loss=a3po

keys of metronome (the block `metronome:` of the YAML, or overrides):
  metronome.rollout_source     synchronous, periodic or bounded
  metronome.loss               a3po or ppo
  metronome.attention          shared_prompt or host
  metronome.group_controller   sagc or fixed
  metronome.in_flight          finish, abort or resume (bounded)
  metronome.PLUGIN.OPTION      as metronome.sagc.sizes=[4,8,16]
  metronome.cpu                true: the CPU room
"""


def main(arguments: Sequence[str]) -> int:
    """Runs the script; returns 0, or the code of a MetronomeError with one line on stderr.

    What the script raises otherwise goes through.
    """
    try:
        if not arguments or arguments[0] in ("-h", "--help"):
            print(HELP, end="", flush=True)
            return 0 if arguments else 2
        run(arguments[0], arguments[1:])
    except MetronomeError as error:
        print(f"metronome: error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


def run(script: str, rest: Sequence[str]) -> None:
    """``script`` as ``__main__``, with our names in AReaL's places."""
    if not Path(script).is_file():
        raise ConfigurationError(
            "there is no such script", found=script, where="python -m metronome_areal", remedy="user_script.py first"
        )
    if find_spec("areal") is None:
        raise ConfigurationError(
            "AReaL isn't installed", where="python -m metronome_areal", remedy="pip install 'areal==1.0.4'"
        )
    if any(one.lstrip("+") == "metronome.cpu=true" for one in rest):
        from metronome_areal import cpu

        cpu.prepare()
    from metronome_areal import bind
    from metronome_areal.host import check_host

    check_host()
    bind.install()
    sys.argv = [script, *bind.overrides(rest)]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    runpy.run_path(script, run_name="__main__")
