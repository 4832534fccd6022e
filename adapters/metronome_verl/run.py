"""verl's door: what ``metronome run`` calls; it composes ``python -m verl.trainer.main_ppo`` and starts it."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Any

from metronome.errors import ConfigurationError
from metronome.host_process import refuse_compare, run_folder, start
from metronome.overlays import Machine, parse_layered, typed_settings
from metronome_verl.command import overrides_of, validate, verl_config_folder
from metronome_verl.recipe import Recipe, settings_of
from metronome_verl.smoke import WORKERS, driver_environment, machine_keys, room
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
    parsed = parse_layered(Recipe, recipe, where, smoke=smoke)
    folders = _folders(output, resume)
    cpu = room(parsed.assets, output or resume) if smoke else None
    machine = Machine(machine_keys, cpu.assets) if cpu else None
    args, block = settings_of(parsed, typed_settings(recipe, where), machine)
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
    for note in (*parsed.notes(), *notes):
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
        from metronome_verl.cpu.assets import make

        cpu.fill(make)
        print(f"metronome: smoke run: tiny model and data in {cpu.assets}, what verl writes in {cpu.work}", flush=True)
    environment = driver_environment(args, os.environ) if cpu else dict(os.environ)
    return start([sys.executable, "-m", _MAIN, *overrides], environment)


def compare(recipe: dict[str, Any], vary: tuple[str, list[str]], *, where: str, output: str | None) -> int:
    """Refused: verl's runs are jobs of their own, and nothing here makes two of them do the same work."""
    refuse_compare("verl", vary[0], where)


def _folders(output: str | None, resume: str | None) -> dict[str, Any]:
    folder = run_folder(output, resume)
    if folder is None:
        return {}
    mode = "disable" if resume is None else "auto"
    return {"trainer.default_local_dir": str(folder), "trainer.resume_mode": mode}


def _check_checkpoints(resume: str | None) -> None:
    if resume is None:
        return
    checkpoint = latest(Path(resume))
    if checkpoint is None:  # verl would begin anew and say nothing
        raise ConfigurationError(
            "no checkpoint of verl to go on from",
            found=resume,
            where="--resume",
            remedy="the folder that holds latest_checkpointed_iteration.txt and the global_step_N that it names",
        )
    read(checkpoint)  # damaged, it is refused here rather than by a worker of verl's
