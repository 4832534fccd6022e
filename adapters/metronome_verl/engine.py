"""Which engine verl builds: its own, or inside ``building`` ours, whose rows share prompts.

Light, because every process that loads verl's engines calls ``register``; the engine itself is in ``fsdp_engine``.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from metronome.contracts import AttentionBackend
from metronome.errors import ConfigurationError

if TYPE_CHECKING:
    from metronome_verl.fsdp_engine import SharedPromptEngine

VENDOR = "metronome"
"""The vendor under which our engine is registered; ``building`` selects it."""

_VARIABLE = "VERL_ENGINE_VENDOR"


@dataclass
class _Building:
    attention: AttentionBackend
    engines: list[SharedPromptEngine]


_building: ContextVar[_Building | None] = ContextVar("metronome_verl_building", default=None)


def register() -> None:
    """Registers ``SharedPromptEngine`` for FSDP and FSDP2 language models on every device; harmless when repeated.

    Raises ConfigurationError if verl's engine isn't as ours knows it.
    """
    importlib.import_module("metronome_verl.fsdp_engine")  # registers itself, once; may be half imported already


@contextmanager
def building(attention: AttentionBackend) -> Iterator[list[SharedPromptEngine]]:
    """Inside, verl's registry gives FSDP language models our engine with ``attention``; it yields those made.

    Megatron's, once ``megatron_engine`` is imported, too. An empty list afterwards means that the strategy is another:
    verl's registry falls back to its own engine.

    Raises ConfigurationError for a backend that doesn't share prompts.
    """
    if not attention.shares_prompt:
        raise ConfigurationError(
            f"attention backend {attention.name!r} doesn't share prompts",
            where="metronome.attention",
            remedy="attention: shared_prompt, or leave verl's engine as it is",
        )
    register()
    before = os.environ.get(_VARIABLE)
    state = _Building(attention, [])
    token = _building.set(state)
    os.environ[_VARIABLE] = VENDOR
    try:
        yield state.engines
    finally:
        _building.reset(token)
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before


def joined(engine: SharedPromptEngine) -> AttentionBackend:
    """The backend of an engine that is being made; it becomes one of those that ``building`` yields.

    Raises ConfigurationError outside ``building``.
    """
    state = _building.get()
    if state is None:
        raise ConfigurationError(
            "the shared-prompt engine has no attention backend",
            found=f"{_VARIABLE}={os.environ.get(_VARIABLE)}",
            where="environment",
            remedy=f"unset {_VARIABLE}; choose it with +metronome.attention=shared_prompt",
        )
    state.engines.append(engine)
    return state.attention
