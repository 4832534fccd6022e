"""What verl loads through the entry-point group ``verl.plugins``, at the end of every ``import verl``.

Only functions that run after later imports are left here: no torch, no verl submodule, so that a process which never
trains pays almost nothing. verl hides what a plug-in raises; errors are printed to stderr first.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType


def _loudly(what: str) -> None:
    print(f"metronome: error: {what}", file=sys.stderr, flush=True)


def _trainer(module: ModuleType) -> None:
    try:
        from metronome_verl.trainer import register

        register()
    except Exception as error:
        _loudly(f"registering the trainer failed: {type(error).__name__}: {error}")
        raise


def _engine(module: ModuleType) -> None:
    try:
        from metronome_verl.engine import register

        register()
    except Exception as error:
        _loudly(f"registering the engine failed: {type(error).__name__}: {error}")
        raise


def forgotten(arguments: list[str]) -> str | None:
    """What is wrong with a command line of verl's main that has keys of ours and no trainer that reads them."""
    ours = [one for one in arguments if one.lstrip("+").startswith("metronome.")]
    elsewhere = any(one.startswith(("--config-", "-cn", "-cp")) or "trainer_mode=" in one for one in arguments)
    if not ours or elsewhere:  # a configuration of the user's may name the trainer
        return None
    return f"{ours[0]} has no effect without trainer.v1.trainer_mode=metronome; to mend: add it, or leave {ours[0]} out"


def _check_command() -> None:
    """Ends verl's main at once with exit code 2, before Ray starts, where keys of ours would be read by nobody."""
    main = "verl.trainer.main_ppo"
    started = sys.argv[0].endswith("main_ppo.py") or (sys.argv[0] == "-m" and main in sys.orig_argv)
    if started and (wrong := forgotten(sys.argv[1:])):
        _loudly(wrong)
        raise SystemExit(2)


def attach() -> None:
    """Leaves the functions; harmless when repeated."""
    try:
        from metronome_patches.imports import on_import

        on_import("verl.trainer.ppo.v1", _trainer)
        on_import("verl.workers.engine.fsdp.transformer_impl", _engine)
        if os.environ.get("VERL_PLATFORM", "").lower() == "cpu":
            from metronome_verl import cpu

            cpu.attach()
    except Exception as error:
        _loudly(f"attaching to verl failed: {type(error).__name__}: {error}")
        raise


_check_command()
attach()
