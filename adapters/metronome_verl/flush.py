"""A fault of verl 0.9.1 that every run of its separate trainer without colocated engines meets, on any device."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from metronome_patches.ledger import Patch
from metronome_verl.host import HOST_VERSIONS


class _Quiet(logging.LoggerAdapter):  # type: ignore[type-arg]  # LoggerAdapter[...] fails at run time on Python 3.10
    """A logger that ignores ``flush=``, an argument of print."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return msg, {name: value for name, value in kwargs.items() if name != "flush"}


def without_flush(logger: logging.Logger) -> logging.LoggerAdapter[logging.Logger]:
    """``logger`` that ignores ``flush=``."""
    return _Quiet(logger, {})


FLUSH = Patch(
    host="verl",
    target="verl.trainer.ppo.v1.trainer_separate_async:logger",
    host_versions=HOST_VERSIONS,
    expects=logging.Logger,
    why="separate_async with hybrid_engine=False logs with flush=True, a TypeError at the default log level",
    upstream="verl/trainer/ppo/v1/trainer_separate_async.py of 0.9.1, line 184",
    remove_when="a verl release logs there without flush",
    replace=without_flush,
)
