"""verl's command line from a recipe's settings, and its check against verl's own configuration in this process."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from metronome.errors import ConfigurationError

_PLAIN = re.compile(r"[A-Za-z_/.][A-Za-z0-9_/.\-]*")
_WORDS = {"true", "false", "null", "nan", "inf"}


def overrides_of(args: Mapping[str, Any], block: Mapping[str, Any]) -> list[str]:
    """``key=value`` for each of verl's keys, ``+metronome.key=value`` for each of ours.

    Raises ConfigurationError for keys that lead to another trainer, which would read none of ours.
    """
    for key, wanted in (("trainer.v1.trainer_mode", "metronome"), ("trainer.use_v1", True)):
        found = next((value for name, value in args.items() if name.lstrip("+") == key), wanted)
        if block and found != wanted:
            raise ConfigurationError(
                "this key leads to a trainer of verl's that reads no key under metronome",
                found=found,
                where=f"args.{key}",
                remedy=f"leave args.{key} out, or every key under metronome",
            )
    keys = {"trainer.v1.trainer_mode": "metronome", **args}
    return [
        *(f"{key}={spelt(value)}" for key, value in keys.items()),
        *(f"+metronome.{key}={spelt(value)}" for key, value in block.items()),
    ]


def spelt(value: Any) -> str:
    """A value in the grammar of verl's command line, in which text that could be something else is quoted."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, list | tuple):
        return "[" + ",".join(spelt(one) for one in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{spelt(one)}" for key, one in value.items()) + "}"
    if isinstance(value, str) and (not _PLAIN.fullmatch(value) or value.lower() in _WORDS):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return str(value)


def verl_config_folder() -> Path | None:
    """Where the installed verl keeps its configuration, found without importing it; None where verl isn't."""
    found = find_spec("verl")
    if found is None or not found.submodule_search_locations:
        return None
    return Path(next(iter(found.submodule_search_locations))) / "trainer" / "config"


def validate(overrides: Sequence[str], folder: Path, where: str) -> tuple[str, ...]:
    """What our trainer will set besides, after verl's configuration was composed with ``overrides``.

    Raises ConfigurationError for a key that verl doesn't have, and for what our trainer or verl's refuses.
    """
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from metronome_verl.config import arrange, device_of

    try:
        with initialize_config_dir(config_dir=str(folder), version_base=None):
            config = compose("ppo_trainer", overrides=list(overrides))
        OmegaConf.to_container(config, resolve=True)
    except (HydraException, OmegaConfBaseException, ValueError, TypeError) as error:
        cause = f" ({error.__cause__})" if error.__cause__ else ""
        raise ConfigurationError(
            f"verl's configuration refuses the recipe: {error}{cause}",
            where=f"{where}: args",
            remedy="a key of verl's, or + before a key to add",
        ) from None
    notes: tuple[str, ...] = ()
    try:
        device_of(config)
    except (AttributeError, OmegaConfBaseException) as error:
        raise ConfigurationError(
            f"verl's configuration lacks a part: {error}", where=f"{where}: args", remedy="leave trainer as it is"
        ) from None
    except ConfigurationError:
        if config.trainer.device not in ("cuda", "npu"):
            raise
        notes = (f"this machine has no {config.trainer.device}: validated as on a CPU",)
        config.trainer.device = "cpu"
    try:
        notes += arrange(config).notes
    except (TypeError, ValueError, AttributeError, OmegaConfBaseException) as error:
        raise ConfigurationError(
            f"a value of verl's configuration isn't of its kind: {error}",
            where=f"{where}: args",
            remedy="the kind of value that verl's default has",
        ) from None
    if config.trainer.v1.trainer_mode == "separate_async":
        steps = config.trainer.v1.separate_async.parameter_sync_step
        batch, mini = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
        if batch != steps * mini:
            raise ConfigurationError(
                "verl's separate trainer wants train_batch_size = parameter_sync_step x ppo_mini_batch_size",
                found=f"{batch}, {steps} x {mini}",
                where=f"{where}: args",
                remedy=f"actor_rollout_ref.actor.ppo_mini_batch_size={batch // steps}"
                if batch % steps == 0
                else f"a data.train_batch_size that {steps} divides",
            )
    return notes
