"""A command's output file: it replaces nothing but an earlier output of the same command, and is whole or not there."""

from __future__ import annotations

import os
from pathlib import Path

from metronome.errors import ConfigurationError


def output_place(out: str, mark: str, what: str, example: str) -> Path:
    """The path of ``out``, looked at before anything is computed.

    Args:
        out: the path that a user gave.
        mark: text that stands in every output of the command.
        what: the output in words, for the error.
        example: a file name for it.

    Raises ConfigurationError for a folder that isn't there, and for a place that holds something else.
    """
    path = Path(out).expanduser()
    if path.is_dir():
        raise ConfigurationError(
            "the output is a folder", found=out, where="--out", remedy=f"--out {path / example} names a file in it"
        )
    if not path.absolute().parent.is_dir():
        raise ConfigurationError(
            "the folder of the output doesn't exist", found=out, where="--out", remedy=f"mkdir -p {path.parent}"
        )
    if not path.exists():
        return path
    try:
        ours = path.is_file() and (not (old := path.read_bytes()) or mark.encode() in old)
    except OSError:
        ours = False
    if not ours:
        raise ConfigurationError(
            f"the output is there already and doesn't hold {what}; it stays as it is",
            found=out,
            where="--out",
            remedy="name another file, or remove this one",
        )
    return path


def write_whole(path: Path, text: str) -> None:
    """Writes ``text`` under another name and renames it to ``path``; raises ConfigurationError if that fails."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ConfigurationError(
            f"the output can't be written: {error}",
            found=str(path),
            where="--out",
            remedy="a path that can be written",
        ) from None
