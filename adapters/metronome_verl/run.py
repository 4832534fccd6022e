"""verl's door: what ``metronome run`` calls; it composes ``python -m verl.trainer.main_ppo`` and starts it."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from metronome.errors import ConfigurationError
from metronome_verl.command import overrides_of, validate, verl_config_folder
from metronome_verl.recipe import parse_recipe, settings_of, typed_settings
from metronome_verl.smoke import WORKERS, driver_environment, room
from metronome_verl.state import latest, read

_MAIN = "verl.trainer.main_ppo"


def run(
    recipe: dict[str, Any], *, where: str, output: str | None, resume: str | None, dry_run: bool, smoke: bool
) -> int:
    """Validates a recipe against verl's configuration and runs it there; returns verl's exit code.

    ``output`` is the folder of verl's checkpoints; ``resume`` is such a folder, from whose last checkpoint the run
    goes on. ``dry_run`` prints the command and starts nothing. ``smoke`` runs three steps on a CPU with a tiny model,
    which it makes in ``smoke`` under the run's folder, or in a temporary one. Raises ConfigurationError for what can't
    run.
    """
    parsed = parse_recipe(recipe, where)
    if parsed.assets is not None and not smoke:
        raise ConfigurationError(
            "only a smoke run has assets", found=parsed.assets, where=f"{where}: assets", remedy="--smoke"
        )
    folders = _folders(output, resume)
    cpu = room(parsed.assets, output or resume) if smoke else None
    args, block = settings_of(parsed, typed_settings(recipe, where), cpu.assets if cpu else None)
    if cpu:
        args = cpu.keys(args, os.environ)
    overrides = overrides_of(args | folders, block)
    folder = verl_config_folder()
    if folder is not None:
        notes = validate(overrides, folder, where)
    elif dry_run:
        notes = ("verl isn't installed here: not validated against its configuration",)
    else:
        raise ConfigurationError(
            "the host 'verl' needs a package that isn't installed",
            found="verl",
            where=f"{where}: host",
            remedy='pip install "metronome-rl[verl]"',
        )
    for note in notes:
        print(f"metronome: {note}", flush=True)
    if dry_run:
        for command in cpu.prepare if cpu else parsed.data.prepare:
            print(f"data: {command}")
        variables = WORKERS if cpu else {}
        print(" ".join([*(f"{key}={value}" for key, value in variables.items()), "python", "-m", _MAIN]), end="")
        print("".join(f" \\\n  {shlex.quote(one)}" for one in overrides))
        print("Nothing was started.")
        return 0
    _check_checkpoints(resume)
    if cpu:
        cpu.fill()
    environment = driver_environment(args, os.environ) if cpu else dict(os.environ)
    return _start([sys.executable, "-m", _MAIN, *overrides], environment)


def compare(recipe: dict[str, Any], vary: tuple[str, list[str]], *, where: str, output: str | None) -> int:
    """Refused: verl's runs are jobs of their own, and nothing here makes two of them do the same work."""
    raise ConfigurationError(
        "metronome compare doesn't drive verl, whose runs aren't the same work sample by sample",
        found=vary[0],
        where=where,
        remedy=f"metronome run once per value of {vary[0]}, and verl's logger for the ratios",
    )


def _folders(output: str | None, resume: str | None) -> dict[str, Any]:
    if output is not None and resume is not None:
        raise ConfigurationError(
            "a resumed run goes on in its own folder", found=output, where="--output", remedy="leave --output out"
        )
    if resume is not None:
        return {"trainer.default_local_dir": str(Path(resume).absolute()), "trainer.resume_mode": "auto"}
    if output is not None:
        return {"trainer.default_local_dir": str(Path(output).absolute()), "trainer.resume_mode": "disable"}
    return {}


def _check_checkpoints(resume: str | None) -> None:
    if resume is not None and not any(Path(resume).glob("global_step_*")):
        raise ConfigurationError(
            "no checkpoint of verl to go on from",
            found=resume,
            where="--resume",
            remedy="the folder that holds global_step_N",
        )
    if resume is not None and (checkpoint := latest(Path(resume))) is not None:
        read(checkpoint)  # damaged, it is refused here rather than by a worker of verl's


def _start(command: list[str], environment: dict[str, str]) -> int:
    process = subprocess.Popen(command, env=environment)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())  # a scheduler ends verl too, and so its Ray
    try:
        return process.wait()
    except KeyboardInterrupt:  # the terminal interrupted verl too
        process.wait()
        return 130
