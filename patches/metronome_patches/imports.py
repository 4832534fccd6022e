"""Functions that run right after a module of the host is imported, without importing it themselves.

verl loads its plug-ins at the end of its own ``__init__``, in every process. Importing its trainers or engines
there would cost each of them seconds and could be circular, so our attach only leaves a note per module.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from metronome.errors import PluginError

AfterImport = Callable[[ModuleType], object]

_waiting: dict[str, list[AfterImport]] = {}
_lock = threading.RLock()


def on_import(name: str, function: AfterImport) -> None:
    """Calls ``function(module)`` once, right after ``name`` is imported, or now if it already is.

    Functions of one module run in the order in which they were given, before the ``import`` statement returns.
    One that raises fails the import with its error, and runs again when the import is tried again; an import that
    fails by itself keeps its own error. Nothing is imported by this call. While the functions run, the module isn't
    yet an attribute of its package: they say ``from package.module import name``.

    Raises:
        PluginError: ``name`` is half imported and no function waited for it, so its end can't be seen any more.
    """
    with _lock:
        if name in _waiting:
            _waiting[name].append(function)
            return
        module = sys.modules.get(name)
        if module is None:
            _waiting[name] = [function]
            if _FINDER not in sys.meta_path:
                sys.meta_path.insert(0, _FINDER)
            return
        if getattr(getattr(module, "__spec__", None), "_initializing", False):
            raise PluginError(
                "a function was given for a module in the middle of its own import",
                found=name,
                where="metronome_patches.imports.on_import",
                remedy="give it before the import starts or after it ends",
            )
    function(module)


class _Finder(MetaPathFinder):
    """Stands first on ``sys.meta_path`` and hands awaited modules a loader that tells us when they are loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _waiting:
            return None
        for finder in list(sys.meta_path):
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find and find(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(Loader):
    """The module's own loader, followed by the functions that wait; it steps aside before the module's code runs."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._own.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        module.__loader__ = self._own
        if module.__spec__ is not None:
            name, module.__spec__.loader = module.__spec__.name, self._own
        self._own.exec_module(module)
        _run(name, sys.modules.get(name, module))


def _run(name: str, module: ModuleType) -> None:
    position = 0
    while True:
        with _lock:
            functions = _waiting.get(name, [])
            if position == len(functions):
                # Only now, all of them done: one that raises leaves the list for the next try.
                _waiting.pop(name, None)
                return
            function = functions[position]
        function(module)
        position += 1


_FINDER = _Finder()
