"""Functions given by import path: ``package.module:function`` or ``file.py:function``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from metronome.errors import ConfigurationError


def from_folder(path: str, base: Path) -> str:
    """The import path with a relative ``file.py`` taken from ``base``."""
    module, _, name = path.rpartition(":")
    return f"{base / Path(module).expanduser()}:{name}" if module.endswith(".py") else path


def function_at(path: str, where: str) -> Callable[..., Any]:
    """The function at ``path``; raises ConfigurationError if it can't be imported or isn't callable."""
    module_name, _, name = path.rpartition(":")
    if not module_name or not name:
        raise ConfigurationError(
            "not an import path",
            found=path,
            where=where,
            remedy="package.module:function or file.py:function",
        )
    try:
        module = _file_module(Path(module_name)) if module_name.endswith(".py") else None
        module = module or importlib.import_module(module_name)
    except Exception as error:  # a stranger's module: whatever it raises becomes one clear error
        raise ConfigurationError(
            f"the module can't be imported: {type(error).__name__}: {error}",
            found=path,
            where=where,
            remedy="mend the module or the path; for a file of your own: file.py:function",
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigurationError(
            f"the module has no function {name!r}", found=path, where=where, remedy="give a function's name"
        )
    return function


def _file_module(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    name = f"metronome_local_user_{path.stem}"
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) == str(path.resolve()):
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
