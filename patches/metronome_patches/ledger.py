"""What we change in the host: one record a change, applied only to the object that it was written for.

A registry with a function of its own needs no patch; whatever else of a host (or of a library, for it) is replaced or
written into stands in an adapter as a ``Patch``, with why, and when it can go. The ledger page is generated from them.
"""

from __future__ import annotations

import inspect
import logging
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

from metronome.errors import PluginError

from .imports import on_import

_log = logging.getLogger("metronome_patches")
_standing: dict[str, Any] = {}


@dataclass(frozen=True)
class Patch:
    """One change of one object.

    Attributes:
        host: the distribution that it was written for, as ``verl``.
        target: ``package.module:attribute`` (the attribute may have dots).
        host_versions: the host's versions that it was written for, as a version specifier.
        expects: what the target must be: the leading names of its parameters, or its type.
        why: what goes wrong without it.
        upstream: where the cause stands.
        remove_when: the event that makes it superfluous.
        replace: makes the object that stands there afterwards from the one that stood there.
    """

    host: str
    target: str
    host_versions: str
    expects: tuple[str, ...] | type
    why: str
    upstream: str
    remove_when: str
    replace: Callable[[Any], Any] = field(repr=False)


def require_host(host: str, versions: str, what: str) -> str:
    """The version of the distribution ``host``; raises PluginError when it is outside ``versions``."""
    from packaging.specifiers import SpecifierSet

    try:
        found = version(host)
    except PackageNotFoundError:
        found = "not installed"
    if found == "not installed" or not SpecifierSet(versions).contains(found, prereleases=True):
        raise PluginError(
            f"{what} was written for {host} {versions}",
            found=found,
            where=host,
            remedy=f"pip install '{host}{versions}'",
        )
    return found


def apply(patch: Patch) -> None:
    """Applies ``patch`` when the target's module is imported (now, if it already is); a second call changes nothing.

    Raises:
        PluginError: the host's version is outside ``patch.host_versions``; or, at the import, the target is missing or
            isn't what the patch expects.
    """
    require_host(patch.host, patch.host_versions, f"the patch of {patch.target}")
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
    _log.info("metronome: changed %s (why: the ledger of patches)", patch.target)


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
        where=f"{patch.target} with {patch.host} {version(patch.host)}",
        remedy=f"pip install '{patch.host}{patch.host_versions}', and report this version",
    )


def ledger(patches: Iterable[Patch], host: str, opening: str) -> str:
    """The page of a host's patches: ``opening``, then a section a patch."""
    parts = [f"# What is changed in {host}\n\n{opening}\n"]
    for patch in patches:
        expects = (
            patch.expects.__name__ if isinstance(patch.expects, type) else f"arguments {', '.join(patch.expects)} first"
        )
        parts.append(
            f"## `{patch.target}`\n\n"
            f"- why: {patch.why}\n- {host}: {patch.host_versions}\n- expects: {expects}\n"
            f"- cause: {patch.upstream}\n- can go when: {patch.remove_when}\n"
        )
    return "\n".join(parts)
