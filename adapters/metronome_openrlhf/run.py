"""OpenRLHF's door: what ``metronome run`` calls; it composes ``python -m metronome_openrlhf`` and starts it."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Any

from metronome.errors import ConfigurationError
from metronome.host_process import Room, places, refuse_compare, run_folder, start
from metronome.overlays import Machine, Settings, layered, parse_layered, typed_settings
from metronome_openrlhf.command import flags_of, openrlhf_folder, validate
from metronome_openrlhf.paths import absent, check_paths
from metronome_openrlhf.recipe import Recipe
from metronome_openrlhf.seen import Seen
from metronome_openrlhf.smoke import FILES, MODULE, driver_environment, keys

_MAIN = "metronome_openrlhf"


def run(
    recipe: dict[str, Any], *, where: str, output: str | None, resume: str | None, dry_run: bool, smoke: bool
) -> int:
    """Validates a recipe with OpenRLHF's own parser and runs it; returns OpenRLHF's exit code.

    ``output`` holds the model in ``trained`` and OpenRLHF's checkpoints in ``checkpoints``; ``resume`` is such a
    folder, from whose last checkpoint the run goes on. ``dry_run`` prints the command and starts nothing. ``smoke``
    runs a few steps on a CPU with a tiny model, which it makes in ``smoke`` under the run's folder, or in a temporary
    one, and says at its end what was seen. Raises ConfigurationError for what can't run.
    """
    parsed = parse_layered(Recipe, recipe, where, smoke=smoke)
    folder = run_folder(output, resume)
    room = Room(*places(parsed.assets, None if folder is None else str(folder)), FILES, MODULE) if smoke else None
    machine = Machine(keys, room.assets) if room else None
    args, block = layered(parsed, typed_settings(recipe, where), machine)
    if folder is not None:
        args = args | _folders(folder, resume)
    if room:
        args = _folders(room.work, None) | args
        block = {"cpu": True} | block
    flags = flags_of(args, block)
    found = _validated(flags, where, dry_run)
    if not room or room.assets != room.work:  # else its files aren't made yet
        if dry_run:
            found += [f"--{flag} {path} isn't on this machine" for flag, path in absent(args.get)]
        elif not room:
            found += check_paths(
                args.get,
                bool(os.environ.get("RAY_ADDRESS")),
                f"{where}: args.{{}}",
                "--dry-run prints the commands that make it, where the recipe has some",
            )
    for note in [*parsed.notes(), *(found if dry_run else ())]:  # a run's launcher says the rest itself
        print(f"metronome: {note}", flush=True)
    if dry_run:
        print(f"overlays: {', '.join(parsed.overlays) or 'none'}  (overlay=NAME, overlay=[ONE,OTHER])")
        for command in room.prepare if room else parsed.data.prepare:
            print(f"data: {command}")
        print(f"python -m {_MAIN}" + _lines(flags))
        print("Nothing was started.")
        return 0
    _check_checkpoints(resume)
    if room is None:
        return start([sys.executable, "-m", _MAIN, *flags], os.environ)
    from metronome_openrlhf.cpu.assets import make

    room.fill(make)
    print(
        f"metronome: smoke run: tiny model and data in {room.assets}, what OpenRLHF writes in {room.work}", flush=True
    )
    seen = Seen()
    code = start([sys.executable, "-m", _MAIN, *flags], driver_environment(os.environ), seen)
    print(f"metronome: {_closing(code, seen, (args, block), room.assets, folder or room.work)}", flush=True)
    return code


def compare(recipe: dict[str, Any], vary: tuple[str, list[str]], *, where: str, output: str | None) -> int:
    """Refused: OpenRLHF's runs are jobs of their own, and nothing here makes two of them do the same work."""
    refuse_compare("OpenRLHF", vary[0], where)


def _validated(flags: list[str], where: str, dry_run: bool) -> list[str]:
    installed = openrlhf_folder()
    if installed is not None:
        return validate(flags, installed, where)
    if dry_run:
        return ["OpenRLHF isn't installed here: not validated by its parser"]
    raise ConfigurationError(
        "the host 'openrlhf' needs a package that isn't installed",
        found="openrlhf",
        where=f"{where}: host",
        remedy='pip install "metronome-rl[openrlhf]"',
    )


def _folders(folder: Path, resume: str | None) -> dict[str, Any]:
    """OpenRLHF's flags for where it writes, and whether it goes on from there."""
    where = {"ckpt.output_dir": str(folder / "trained"), "ckpt.path": str(folder / "checkpoints")}
    return where | {"ckpt.load_enable": resume is not None}


def _closing(code: int, seen: Seen, settings: Settings, assets: Path, folder: Path) -> str:
    """What a smoke run showed and where its things are."""
    args, block = settings
    model, checkpoints = Path(args["ckpt.output_dir"]), Path(args["ckpt.path"])
    places = [f"model in {model}"] if code == 0 and model.exists() else []
    if _latest(checkpoints).is_file():
        places.append(f"checkpoints in {checkpoints}")
        if checkpoints == folder / "checkpoints":
            places[-1] += f" (--resume {folder} goes on from the last)"
    places.append(f"tiny model and data in {assets}")
    outcome = "" if code == 0 else f"ended with exit code {code} after "
    return f"smoke run: {outcome}{seen.told(block.get('loss'))}. {', '.join(places)}"


def _latest(checkpoints: Path) -> Path:
    return checkpoints / "_actor" / "latest"


def _check_checkpoints(resume: str | None) -> None:
    if resume is not None and not _latest(Path(resume) / "checkpoints").is_file():
        raise ConfigurationError(
            "no checkpoint of OpenRLHF to go on from",
            found=resume,
            where="--resume",
            remedy="the folder that --output named, with checkpoints/_actor/latest",
        )


def _lines(flags: list[str]) -> str:
    """One flag a line, its values beside it."""
    lines: list[str] = []
    for word in flags:
        if word.startswith("--"):
            lines.append(shlex.quote(word))
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return "".join(f" \\\n  {line}" for line in lines)
