"""The local host's door: what ``metronome run`` and ``metronome compare`` call."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from metronome.errors import ConfigurationError
from metronome.plugins import Selection
from metronome.settings import Settings
from metronome_local.recipe import Recipe
from metronome_local.validation import check_files, validate

if TYPE_CHECKING:
    from metronome_local.trainer import Trainer


def run(
    recipe: dict[str, Any], *, where: str, output: str | None, resume: str | None, dry_run: bool, smoke: bool
) -> int:
    """Trains a recipe; returns 0, or 130 after SIGINT. ``dry_run`` validates, prints and starts nothing.

    ``smoke`` is refused: these recipes run on a CPU as they are.
    """
    if smoke:
        raise ConfigurationError(
            "the host 'local' has no smoke runs: its recipes run on a CPU as they are",
            found="--smoke",
            where=where,
            remedy="leave --smoke out, or --dry-run to validate only",
        )
    from rich.console import Console

    parsed, settings, selection, device = validate(recipe, where)
    console = Console(stderr=False)
    if dry_run:
        check_files(parsed, Path(where).parent, resume)
        _print_plan(console, parsed, settings, selection)
        return 0
    from metronome_local.build import build

    folder = _run_folder(where, output, resume)
    trainer = build(parsed, settings, selection, device, folder, console, base=Path(where).parent, resume=resume)
    try:
        train(trainer, console)
    finally:
        trainer.close()
        trainer.parts.progress.close()
    return 130 if trainer.interrupted else 0


def compare(recipe: dict[str, Any], vary: tuple[str, list[str]], *, where: str, output: str | None) -> int:
    """Runs the same work once per value and prints the table of ratios."""
    from metronome_local.compare import compare_runs

    if output is not None:
        empty_folder(output)
    return compare_runs(recipe, vary, where=where, output=output)


def train(trainer: Trainer, console: Any) -> None:
    """Runs a built trainer and prints what it comes to."""
    from metronome_local.progress import memory_line

    selection = trainer.parts.selection
    names = ", ".join(
        f"{hook} {getattr(selection, hook).name}"
        for hook in ("rollout_source", "loss", "attention", "group_controller")
    )
    console.print(
        f"metronome local: {names}; run folder {trainer.parts.progress.folder}", highlight=False, soft_wrap=True
    )
    started = time.monotonic()
    trainer.run()
    trainer.parts.pool.close()
    console.print(
        f"{trainer.period} periods in {time.monotonic() - started:.0f} s; "
        + memory_line(trainer.parts.pool.peak_memory(), selection.rollout_source),
        highlight=False,
        soft_wrap=True,
    )


def _run_folder(where: str, output: str | None, resume: str | None) -> Path:
    if resume is not None and output is not None:
        raise ConfigurationError(
            "a resumed run goes on in its own folder", found=output, where="--output", remedy="leave --output out"
        )
    if resume is not None:
        return Path(resume)
    if output is not None:
        return empty_folder(output)
    return default_folder(Path(where).stem)


def default_folder(name: str) -> Path:
    """A folder under ``runs`` that no other process takes: name, time, process id."""
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def empty_folder(output: str) -> Path:
    """``output`` as a folder to make or to fill; raises ConfigurationError if something stands there."""
    folder = Path(output)
    try:
        taken = folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))
    except OSError as error:  # a name too long, a folder that can't be read
        raise ConfigurationError(
            f"the run folder can't be used: {error.strerror}", found=output, where="--output", remedy="another folder"
        ) from error
    if taken:
        raise ConfigurationError(
            "the run folder isn't empty" if folder.is_dir() else "the run folder is a file",
            found=output,
            where="--output",
            remedy="another folder, or --resume to continue a run",
        )
    if not next(parent for parent in folder.absolute().parents if parent.exists()).is_dir():
        raise ConfigurationError(
            "a file stands in the run folder's path", found=output, where="--output", remedy="another folder"
        )
    return folder


def _print_plan(console: Any, recipe: Recipe, settings: Settings, selection: Selection) -> None:
    plan = recipe.model_dump(mode="json")
    plan["metronome"] = {**{key: getattr(settings, key) for key in Settings.model_fields if key != "options"}}
    plan["metronome"].update({name: dict(options) for name, options in settings.options.items()})
    console.print(yaml.safe_dump(plan, sort_keys=False), highlight=False)
    source = selection.rollout_source
    console.print(
        f"effective staleness bound {source.max_staleness}; group size {selection.group_controller.size()}; "
        f"{recipe.machine.workers} rollout workers and a trainer. Nothing was started.",
        highlight=False,
        soft_wrap=True,
    )
