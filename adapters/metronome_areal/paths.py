"""Models that are a folder of this machine and aren't there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from metronome.errors import ConfigurationError

_SECTIONS = ("actor", "critic", "ref")


def check_paths(config: Any) -> None:
    """Raises ConfigurationError for a model's or the tokenizer's path that can only be a folder and isn't one.

    ``Qwen/Qwen2.5-1.5B`` may be a name of the hub's; what begins with ``/``, ``.`` or ``~`` can't, and transformers
    would ask the hub for it.
    """
    found = {f"{name}.path": getattr(getattr(config, name, None), "path", None) for name in _SECTIONS}
    if not getattr(getattr(config, "actor", None), "kl_ctl", 0.0):
        found.pop("ref.path")  # AReaL makes no reference model then
    found["tokenizer_path"] = getattr(config, "tokenizer_path", None)
    for key, path in found.items():
        if not isinstance(path, str) or not path.startswith(("/", ".", "~")) or Path(path).is_dir():
            continue
        whole = Path(path).expanduser() if path.startswith("~/") else None
        raise ConfigurationError(
            "there is no such folder",
            found=path,
            where=key,
            remedy=f"{key}={whole}: ~ isn't expanded here"
            if whole is not None and whole.is_dir()
            else f"{key}=FOLDER of a model, or its name on the hub",
        )
