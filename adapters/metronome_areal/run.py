"""AReaL's door: what ``metronome run`` calls; it composes ``python -m metronome_areal`` and starts it."""

from __future__ import annotations

import getpass
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from metronome.errors import ConfigurationError
from metronome.host_process import Room, places, refuse_compare, run_folder, start
from metronome.overlays import Machine, layered, parse_layered, typed_settings
from metronome_areal.command import SCRIPT, arguments_of, installed, names_of, validate
from metronome_areal.recipe import Recipe
from metronome_areal.smoke import FILES, MODULE, keys, room_environment

_MAIN = "metronome_areal"


def run(
    recipe: dict[str, Any], *, where: str, output: str | None, resume: str | None, dry_run: bool, smoke: bool
) -> int:
    """Validates a recipe with AReaL's own configuration classes and runs it; returns the run's exit code.

    ``output`` is AReaL's ``cluster.fileroot``, with logs and checkpoints; ``resume`` is such a folder, from whose last
    recovery checkpoint the run goes on. ``dry_run`` prints the command and starts nothing. ``smoke`` runs a few steps
    on a CPU with a tiny model, which it makes in ``smoke`` under the run's folder, or in a temporary one. Raises
    ConfigurationError for what can't run.
    """
    parsed = parse_layered(Recipe, recipe, where, smoke=smoke)
    folder = run_folder(output, resume)
    room = Room(*places(parsed.assets, None if folder is None else str(folder)), FILES, MODULE) if smoke else None
    machine = Machine(keys, room.assets) if room else None
    args, block = layered(parsed, typed_settings(recipe, where), machine)
    if folder is not None:
        args = args | {"cluster.fileroot": str(folder), "recover.mode": "on"}
    if room:
        args = {"cluster.fileroot": str(room.work)} | args
        block = {"cpu": True} | block
    arguments = arguments_of(args, block)
    for note in [*parsed.notes(), *_validated(arguments, where, dry_run)]:
        print(f"metronome: {note}", flush=True)
    command = [sys.executable, "-m", _MAIN, str(SCRIPT), *arguments]
    if dry_run:
        for line in room.prepare if room else parsed.data.prepare:
            print(f"data: {line}")
        print(" \\\n  ".join([f"python -m {_MAIN} {shlex.quote(str(SCRIPT))}", *map(shlex.quote, arguments)]))
        print("Nothing was started.")
        return 0
    _check_checkpoints(output, resume, names_of(args))
    if room is None:
        return start(command, os.environ)
    from metronome_areal.cpu.assets import make

    room.fill(make)
    written = args["cluster.fileroot"]
    print(f"metronome: smoke run: tiny model and data in {room.assets}, what AReaL writes in {written}", flush=True)
    return start(command, room_environment(os.environ))


def compare(recipe: dict[str, Any], vary: tuple[str, list[str]], *, where: str, output: str | None) -> int:
    """Refused: AReaL's runs are jobs of their own, and nothing here makes two of them do the same work."""
    refuse_compare("AReaL", vary[0], where)


def _validated(arguments: list[str], where: str, dry_run: bool) -> list[str]:
    if installed():
        return validate(arguments, where)
    if dry_run:
        return ["AReaL isn't installed here: not validated by its configuration classes"]
    raise ConfigurationError(
        "the host 'areal' needs a package that isn't installed",
        found="areal",
        where=f"{where}: host",
        remedy='pip install "metronome-rl[areal]"',
    )


def _check_checkpoints(output: str | None, resume: str | None, names: tuple[str, str]) -> None:
    """AReaL's recovery goes on by itself where this experiment was saved: whether that is wanted is said by the flag.

    AReaL looks under the user's name, the experiment's and the trial's, and begins anew where it finds nothing.
    """
    folder = output if resume is None else resume
    if folder is None:
        return
    saved = Path(folder).glob("checkpoints/*/*/*/recover_info/step_info.json")
    found = sorted("/".join(path.parts[-5:-2]) for path in saved)
    mine = "/".join((getpass.getuser(), *names))
    if resume is not None and not found:
        raise ConfigurationError(
            "no recovery checkpoint of AReaL's to go on from",
            found=resume,
            where="--resume",
            remedy="the folder that --output named, once AReaL has written checkpoints/USER/NAME/TRIAL/recover_info",
        )
    if resume is not None and mine not in found:
        raise ConfigurationError(
            f"the checkpoint is of another experiment: this recipe's would be {mine}",
            found=", ".join(found),
            where=f"--resume {resume}",
            remedy="the recipe and the args.trial_name that wrote it, or --output to begin this one",
        )
    if resume is None and mine in found:
        raise ConfigurationError(
            "there is a run in this folder, which AReaL would go on with",
            found=output,
            where="--output",
            remedy=f"--resume {output}, or another folder",
        )
