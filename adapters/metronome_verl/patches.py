"""What we change in the host: one record a change, applied only to the object that it was written for.

A registry with a function of its own needs no patch; whatever else of verl (or of a library, for verl) is replaced
or written into stands here as a ``Patch``, with why, and when it can go. PATCHES.md is generated from the records.
"""

from __future__ import annotations

import inspect
import logging
import operator
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from metronome.errors import PluginError

from .imports import on_import

HOST_VERSIONS = ">=0.9,<0.10"

_log = logging.getLogger("metronome_verl")
_log.setLevel(os.environ.get("VERL_LOGGING_LEVEL", "INFO"))
_standing: dict[str, Any] = {}


@dataclass(frozen=True)
class Patch:
    """One change of one object.

    Attributes:
        target: ``package.module:attribute`` (the attribute may have dots).
        host_versions: the verl versions that it was written for, as a version specifier.
        expects: what the target must be: the leading names of its parameters, or its type.
        why: what goes wrong without it.
        upstream: where the cause stands.
        remove_when: the event that makes it superfluous.
        replace: makes the object that stands there afterwards from the one that stood there.
    """

    target: str
    host_versions: str
    expects: tuple[str, ...] | type
    why: str
    upstream: str
    remove_when: str
    replace: Callable[[Any], Any] = field(repr=False)


def host_version() -> str:
    """The version of the verl that is loaded, or being loaded, in this process."""
    import verl

    return str(verl.__version__)


def require_host(versions: str = HOST_VERSIONS, what: str = "metronome's verl adapter") -> str:
    """The host's version; raises PluginError when it is outside ``versions``."""
    from packaging.specifiers import SpecifierSet

    found = host_version()
    if not SpecifierSet(versions).contains(found, prereleases=True):
        raise PluginError(
            f"{what} was written for verl {versions}",
            found=found,
            where="verl.__version__",
            remedy="pip install 'verl==0.9.1', or switch our plug-in off with VERL_USE_EXTERNAL_PLUGINS=none",
        )
    return found


def apply(patch: Patch) -> None:
    """Applies ``patch`` when the target's module is imported (now, if it already is); a second call changes nothing.

    Raises:
        PluginError: verl's version is outside ``patch.host_versions``; or, at the import, the target is missing or
            isn't what the patch expects.
    """
    require_host(patch.host_versions, f"the patch of {patch.target}")
    module, _, attribute = patch.target.partition(":")
    on_import(module, lambda loaded: _change(patch, loaded, attribute))


def applied() -> tuple[str, ...]:
    """The targets changed in this process, in order."""
    return tuple(_standing)


def _change(patch: Patch, module: ModuleType, attribute: str) -> None:
    path, _, name = attribute.rpartition(".")
    owner = operator.attrgetter(path)(module) if path else module
    missing = object()
    found = getattr(owner, name, missing)
    if found is missing:
        raise _unexpected(patch, "nothing of that name")
    if patch.target in _standing and _reaches(found, _standing[patch.target]):
        return
    if isinstance(patch.expects, tuple):
        names = _parameters(found)
        if names[: len(patch.expects)] != patch.expects:
            raise _unexpected(patch, f"parameters {', '.join(names) or 'none'}")
    elif not isinstance(found, patch.expects):
        raise _unexpected(patch, f"a {type(found).__name__}")
    replacement = patch.replace(found)
    setattr(owner, name, replacement)
    _standing[patch.target] = replacement
    _log.info("metronome: changed %s (why: PATCHES.md)", patch.target)


def _reaches(found: Any, standing: Any) -> bool:
    """Whether ``standing`` is ``found``, or what it wraps."""
    while found is not standing:
        if (found := getattr(found, "__wrapped__", None)) is None:
            return False
    return True


def _parameters(found: Any) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(found).parameters)
    except (TypeError, ValueError):
        return ()


def _unexpected(patch: Patch, found: str) -> PluginError:
    expects = patch.expects
    wanted = f"parameters {', '.join(expects)} first" if isinstance(expects, tuple) else f"a {expects.__name__}"
    return PluginError(
        f"the target of a patch isn't what it was written for (expected {wanted})",
        found=found,
        where=f"{patch.target} of verl {host_version()}",
        remedy="pip install 'verl==0.9.1', and report this version",
    )


def ledger(patches: Iterable[Patch]) -> str:
    """PATCHES.md: a section a patch."""
    parts = [
        "# What is changed in verl\n\n"
        "Generated from the records in `adapters/metronome_verl` by `tests/verl_host/test_patches_page.py`, which\n"
        "keeps it current. Each is applied only in the verl releases it names and only to an object that is what it\n"
        "expects; anything else stops with an error. Everything else goes through verl's registries.\n"
    ]
    for patch in patches:
        expects = (
            patch.expects.__name__ if isinstance(patch.expects, type) else f"arguments {', '.join(patch.expects)} first"
        )
        parts.append(
            f"## `{patch.target}`\n\n"
            f"- why: {patch.why}\n- verl: {patch.host_versions}\n- expects: {expects}\n"
            f"- cause: {patch.upstream}\n- can go when: {patch.remove_when}\n"
        )
    return "\n".join(parts)
