"""The error tree: every message says what is wrong, the value found, where it came from, and what to set."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


class MetronomeError(Exception):
    """An error with its four parts on one line.

    Args:
        what: what is wrong, a short sentence without a full stop.
        found: the offending value; shown with ``repr``.
        where: where the value came from (file, key, plug-in, process).
        remedy: what to set or do.
    """

    exit_code = 1

    def __init__(
        self,
        what: str,
        *,
        found: object = None,
        where: str | None = None,
        remedy: str | None = None,
    ) -> None:
        self.what, self.found, self.where, self.remedy = what, found, where, remedy
        parts = [what]
        if found is not None:
            parts.append(f"found {found!r}")
        if where is not None:
            parts.append(f"in {where}")
        if remedy is not None:
            parts.append(f"to mend: {remedy}")
        super().__init__(" ".join("; ".join(parts).split()))

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.what, self.found, self.where, self.remedy)


def _rebuild(
    cls: type[MetronomeError], what: str, found: object, where: str | None, remedy: str | None
) -> MetronomeError:
    return cls(what, found=found, where=where, remedy=remedy)


class ConfigurationError(MetronomeError):
    """Bad input: a recipe, flag, data set, checkpoint or combination that can't be true. Exit code 2."""

    exit_code = 2


class PluginError(ConfigurationError):
    """A plug-in is missing, offered twice, raised at import or broke its contract. Exit code 2."""


class VersionMismatch(MetronomeError):
    """A sample carries a version that its rollout source doesn't allow."""


class WaitTimeout(MetronomeError):
    """A wait ran out; the message names what was awaited and from whom."""


class WorkerFailed(MetronomeError):
    """A rollout worker failed; the message carries the worker's own error."""


class EqualityViolated(MetronomeError):
    """An audit or a self-check found a difference where equality is promised."""


def guarded(call: Callable[[], T], what: str, *, where: str | None = None, remedy: str | None = None) -> T:
    """``call()``, a stranger's code: whatever it raises, or its exit, becomes one PluginError opening with ``what``.

    A MetronomeError goes through unchanged, and so does Ctrl-C.
    """
    try:
        return call()
    except MetronomeError:
        raise
    except (Exception, SystemExit) as error:
        raise PluginError(f"{what}: {type(error).__name__}: {error}", where=where, remedy=remedy) from error


def nearest(word: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for the nearest known word, or the list of known words."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f"use {close[0]!r}" if close else f"use one of {', '.join(names) or 'none'}"
