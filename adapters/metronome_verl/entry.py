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


def attach() -> None:
    """Leaves the functions; harmless when repeated."""
    try:
        from metronome_verl.imports import on_import

        on_import("verl.trainer.ppo.v1", _trainer)
        on_import("verl.workers.engine.fsdp.transformer_impl", _engine)
        if os.environ.get("VERL_PLATFORM", "").lower() == "cpu":
            from metronome_verl import cpu

            cpu.attach()
    except Exception as error:
        _loudly(f"attaching to verl failed: {type(error).__name__}: {error}")
        raise


attach()
