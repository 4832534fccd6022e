"""AReaL's configuration from a recipe's settings: as overrides, and read by AReaL's own classes in this process."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from metronome.errors import ConfigurationError
from metronome_areal.host import VERSIONS
from metronome_areal.keys import BLOCK, refused
from metronome_patches.ledger import require_host

FOLDER = Path(__file__).parent
SCRIPT, CONFIG = FOLDER / "script.py", FOLDER / "script.yaml"
_PLAIN = re.compile(r"[A-Za-z_/.][A-Za-z0-9_/.\-]*")
_WORDS = {"true", "false", "null", "nan", "inf"}


def arguments_of(args: Mapping[str, Any], block: Mapping[str, Any]) -> list[str]:
    """``--config FILE``, then AReaL's keys and ours as Hydra's overrides, whether or not the file has them."""
    settings = {**args, **{f"{BLOCK}.{key}": value for key, value in block.items()}}
    return ["--config", str(CONFIG), *(f"++{key}={_value(value)}" for key, value in _apart(settings).items())]


def _apart(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of which none lies below another: the later one stays."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        found = {
            other: kept
            for other, kept in found.items()
            if not other.startswith(f"{key}.") and not key.startswith(f"{other}.")
        }
        found[key] = value
    return found


def _value(value: Any) -> str:
    """A value in Hydra's grammar; text that could be something else is quoted."""
    if isinstance(value, str):
        plain = _PLAIN.fullmatch(value) and value.lower() not in _WORDS
        return value if plain else json.dumps(value, ensure_ascii=False)
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_value, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{_value(one)}' for key, one in value.items())}}}"
    return json.dumps(value)


def names_of(args: Mapping[str, Any]) -> tuple[str, str]:
    """The experiment and the trial under which AReaL keeps its recovery checkpoints."""
    written = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))

    def name(key: str) -> str:
        return str(args.get(f"recover.{key}", args.get(key, written[key])))

    return name("experiment_name"), name("trial_name")


def installed() -> bool:
    """Whether AReaL is there, found without importing it."""
    return find_spec("areal") is not None


def validate(arguments: Sequence[str], where: str) -> list[str]:
    """What we set of AReaL's configuration, as lines to print.

    Raises ConfigurationError for a key or value that AReaL doesn't take, and for what we refuse.
    """
    require_host("areal", VERSIONS, "the adapter")
    with _environment():
        if f"++{BLOCK}.cpu=true" in arguments:
            from metronome_areal import cpu

            cpu.prepare()
        return arranged(arguments, f"{where}: args")[1]


def arranged(arguments: Sequence[str], where: str) -> tuple[Any, list[str]]:
    """The configuration as our trainer would have it, and the lines that it would print."""
    from areal.api import cli_args
    from areal.api.alloc_mode import ModelAllocation
    from omegaconf import OmegaConf

    from metronome_areal.arrange import arrange
    from metronome_areal.clip import told_of_clip
    from metronome_areal.config import read, with_block
    from metronome_areal.cpu.arguments import arrange as arrange_room
    from metronome_areal.host import check_host
    from metronome_areal.script import Config

    check_host()
    kind = with_block(Config)
    with refused(kind, where):
        written, _ = cli_args.parse_cli_args(list(arguments))
        config: Any = OmegaConf.to_object(cli_args.to_structured_cfg(written, kind))
    for name in ("actor", "rollout"):
        backend = str(getattr(config, name).backend)
        try:
            ModelAllocation.from_str(backend, name=name)
        except Exception as error:  # AReaL's grammar has several
            raise ConfigurationError(
                f"AReaL refuses the backend: {error}",
                found=backend,
                where=f"{where}.{name}.backend",
                remedy="as fsdp:d4",
            ) from None
    if not config.train_dataset.path:
        raise ConfigurationError("no prompts", where=where, remedy="train_dataset.path: FILE.jsonl")
    part = read(config)
    clip = told_of_clip(config.actor, config.metronome, part)
    return config, [*(arrange_room(config) if part.room else []), *arrange(config, part), *clip]


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """The process' environment is as before afterwards."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
