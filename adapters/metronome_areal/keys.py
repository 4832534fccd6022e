"""AReaL's configuration keys: overrides of our block, and one line about what is wrong with one."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from metronome.errors import ConfigurationError, nearest

BLOCK = "metronome"


def overrides(arguments: Sequence[str]) -> list[str]:
    """``metronome.x=y`` as Hydra takes it where the YAML has no such key: ``++metronome.x=y``."""
    return [f"++{one}" if one.startswith((f"{BLOCK}.", f"{BLOCK}=")) else one for one in arguments]


def refuse_twice(arguments: Sequence[str]) -> None:
    """Raises ConfigurationError for a key of ours that is given twice with different values: Hydra takes the last."""
    given: dict[str, str] = {}
    for one in arguments:
        key, sign, value = one.lstrip("+").partition("=")
        if not sign or not key.startswith(f"{BLOCK}."):
            continue
        if given.setdefault(key, value) != value:
            raise ConfigurationError(
                "this key is given twice", found=f"{given[key]}, then {value}", where=key, remedy="give it once"
            )


@contextlib.contextmanager
def refused(kind: type[Any], where: str) -> Iterator[None]:
    """Whatever Hydra, OmegaConf and AReaL's classes raise about a configuration becomes one ConfigurationError.

    Args:
        kind: the configuration's class.
        where: named in the error.
    """
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        yield
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
        raise _told(error, kind, where) from error


def keys_at(kind: type[Any], path: Sequence[str]) -> list[str]:
    """The keys of the section ``path`` of ``kind``, a dataclass; none where it is no section of AReaL's."""
    for part in path:
        kind = _section(typing.get_type_hints(kind).get(part))
        if not dataclasses.is_dataclass(kind):
            return []
    return [field.name for field in dataclasses.fields(kind)]


def _section(hint: Any) -> Any:
    """The dataclass in ``X``, ``X | None`` or ``tuple[X, ...]``."""
    inside = [one for one in typing.get_args(hint) if dataclasses.is_dataclass(one)]
    return inside[0] if inside else hint


def _told(error: Exception, kind: type[Any], where: str) -> ConfigurationError:
    cause: Any = error.__cause__ if getattr(error.__cause__, "full_key", None) else error
    key = re.sub(r"\[\d+\]", "", str(getattr(cause, "full_key", None) or ""))
    adding = re.search(r"use (\+(\S+?)=.*)$", str(error), flags=re.MULTILINE)
    first = str(cause).partition("\n")[0].rstrip(".")
    path, _, last = key.rpartition(".")
    known = keys_at(kind, path.split(".") if path else [])
    missing = "mandatory" in first
    if last and known and last not in known:
        return ConfigurationError("AReaL has no such key", found=key, where=where, remedy=nearest(last, known))
    if last and cause is not error and not missing:
        # OmegaConf names the first part that isn't there; Hydra, the override as it would be taken.
        whole, override = (adding[2], adding[1]) if adding else (key, f"+{key}=VALUE")
        return ConfigurationError(
            "the YAML has no such key to override", found=whole, where=where, remedy=f"{override} adds it"
        )
    if missing:
        word = first.rpartition(" ")[2].strip("`'")
        name = key if key.endswith(word) else f"{key}.{word}".strip(".")
        return ConfigurationError("a key that AReaL needs is missing", found=name, where=where, remedy=f"{name}=VALUE")
    if isinstance(error, ValueError) and not last:
        return ConfigurationError(
            f"AReaL refuses the configuration: {first}", where=where, remedy="change the key it names"
        )
    return ConfigurationError(
        f"AReaL's configuration can't be read: {first}", found=key or None, where=where, remedy="key=value, as in YAML"
    )
