"""PATH.md and PATH.json, each written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from metronome.errors import ConfigurationError

SUFFIXES = (".md", ".json")


def targets(path: str) -> tuple[Path, Path]:
    """The two files of ``--out PATH``; a suffix of one of them is taken off.

    Raises ConfigurationError, before anything is computed, if they can't be written there or would replace a file
    that isn't an earlier result.
    """
    stem = Path(path)
    if stem.suffix in SUFFIXES:
        stem = stem.with_suffix("")
    if not stem.name:
        raise _unwritable("no file name", path)
    files = Path(f"{stem}.md"), Path(f"{stem}.json")
    if not stem.parent.is_dir():
        raise _unwritable("the folder doesn't exist", path)
    if not os.access(stem.parent, os.W_OK):
        raise _unwritable("the folder can't be written to", path)
    for one in files:
        if one.is_dir():
            raise _unwritable(f"{one.name} is a folder", path)
        if one.exists() and not _ours(one):
            raise _unwritable(f"{one.name} is another file than this command's and stays as it is", path)
    return files


def write(texts: Mapping[Path, str]) -> None:
    """Writes every text to a temporary file beside its place, then renames them all.

    Raises ConfigurationError if the system refuses.
    """
    made: dict[Path, Path] = {}
    try:
        for path, text in texts.items():
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            made[path] = Path(name)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            made[path].chmod(0o644)
        for path, temporary in made.items():
            temporary.replace(path)
    except OSError as error:
        raise _unwritable(error.strerror or type(error).__name__, ", ".join(map(str, texts))) from error
    finally:
        for temporary in made.values():
            temporary.unlink(missing_ok=True)


def _ours(path: Path) -> bool:
    """Whether the file is empty or an earlier result: both name the command near their beginning."""
    try:
        with path.open("rb") as file:
            head = file.read(300)
    except OSError:
        return False
    return not head or b"metronome reproduce" in head


def _unwritable(why: str, path: str) -> ConfigurationError:
    return ConfigurationError(
        f"the results can't be written: {why}",
        found=path,
        where="metronome reproduce --out",
        remedy="a path in a folder that exists, without suffix",
    )
