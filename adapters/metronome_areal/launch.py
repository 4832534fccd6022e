"""``python -m metronome_areal user_script.py --config c.yaml metronome.loss=a3po``: a user's script, unchanged."""

from __future__ import annotations

import itertools
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from metronome.errors import ConfigurationError, MetronomeError
from metronome_areal.keys import BLOCK, overrides, refuse_twice

WHERE = "python -m metronome_areal"

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
    """Runs the script; returns 0, or the code of a MetronomeError, or 130 after Ctrl-C, with one line on stderr.

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
    except KeyboardInterrupt:
        print("metronome: error: interrupted", file=sys.stderr, flush=True)
        return 130
    return 0


def run(script: str, rest: Sequence[str]) -> None:
    """``script`` as ``__main__``, with our names in AReaL's places.

    Raises ConfigurationError for a script or a ``--config`` that isn't there, another AReaL, and keys that are wrong.
    """
    if not Path(script).is_file():
        raise ConfigurationError("there is no such script", found=script, where=WHERE, remedy="user_script.py first")
    if find_spec("areal") is None:
        raise ConfigurationError("AReaL isn't installed", where=WHERE, remedy="pip install 'areal==1.0.4'")
    refuse_twice(rest)
    config = _config(rest)
    if _written(f"{BLOCK}.cpu", rest, config) is True:
        from metronome_areal import cpu

        # Before AReaL is imported: it chooses its platform then.
        cpu.prepare(controller=_written("scheduler.type", rest, config) is not None)
    from metronome_areal import bind
    from metronome_areal.host import check_host

    check_host()
    bind.install()
    # Ctrl-C reaches the processes of rewards and of the data, too: they end without a traceback of their own.
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    sys.argv = [script, *overrides(rest)]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    runpy.run_path(script, run_name="__main__")


def _config(rest: Sequence[str]) -> Path | None:
    """The file after ``--config``; a script that has none is left to say so itself."""
    given = [one.partition("=")[2] for one in rest if one.startswith("--config=")]
    given += [value for flag, value in itertools.pairwise(rest) if flag == "--config"]
    if not given:
        return None
    path = Path(given[-1])
    if not path.is_file():
        raise ConfigurationError("there is no such file", found=given[-1], where="--config", remedy="a YAML file")
    return path


def _written(key: str, rest: Sequence[str], config: Path | None) -> Any:
    """The value of ``key`` on the command line, else in the YAML as it is written there; None without one."""
    said = [one.partition("=")[2] for one in rest if one.lstrip("+").startswith(f"{key}=")]
    try:
        if said:
            return yaml.safe_load(said[-1])
        found: Any = None if config is None else yaml.safe_load(config.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError(
            f"this can't be read: {error}", found=str(config), where="--config", remedy="a YAML file in UTF-8"
        ) from None
    for part in key.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found
