"""``metronome report``: reads runs and writes their page, whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from metronome.errors import ConfigurationError
from metronome.observe.page import GENERATOR, page
from metronome.observe.records import RunRecord
from metronome.observe.words import several


def report(arguments: Sequence[str], out: str) -> int:
    """Writes the page of runs to ``out``; 0, or ConfigurationError and no file.

    Args:
        arguments: runs' folders or files, and ``key=value`` of ``metronome.observe.readers.SETTINGS`` for all of them:
            what has a ``=`` and isn't a file.
        out: the page's file.

    Raises ConfigurationError for what isn't a run, a run without a step, a place that can't be written, a file there
    that isn't such a page, and where plotly isn't installed.
    """
    from metronome.observe.readers import read_run

    target = _writable(Path(out).expanduser())
    script = _plotly()
    settings = [one for one in arguments if "=" in one and not Path(one).expanduser().exists()]
    records = [_with_steps(read_run(one, settings), one) for one in arguments if one not in settings]
    if not records:
        raise ConfigurationError(
            "no run was given", remedy="metronome report RUN [RUN...] [KEY=VALUE...] --out report.html"
        )
    size = write(page(records, script), target)
    steps = sum(len(run.steps) for run in records)
    print(f"wrote {target} ({size / 1e6:.1f} MB): {several(len(records), 'run')}, {several(steps, 'step')}")
    return 0


def write(text: str, target: Path) -> int:
    """Writes ``text`` under another name and renames it to ``target``; its size in bytes."""
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        size = part.write_bytes(text.encode("utf-8"))
        os.replace(part, target)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ConfigurationError(
            f"the page can't be written: {error}", found=str(target), where="--out", remedy="name another place"
        ) from None
    return size


def _writable(target: Path) -> Path:
    if target.is_dir():
        raise ConfigurationError(
            "--out is a folder", found=str(target), remedy=f"--out {target / 'report.html'} names a file in it"
        )
    if not target.parent.is_dir():
        raise ConfigurationError(
            "the folder of --out doesn't exist", found=str(target.parent), remedy=f"mkdir -p {target.parent}"
        )
    if target.exists():
        try:
            with target.open("rb") as file:
                ours = GENERATOR.encode() in file.read(2000)
        except OSError as error:
            raise ConfigurationError(
                f"--out can't be read: {error}", found=str(target), remedy="name another file"
            ) from None
        if not ours:
            raise ConfigurationError(
                "--out is a file that isn't a metronome report; it stays as it is",
                found=str(target),
                where="--out",
                remedy="name another file, or remove this one",
            )
    return target


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ConfigurationError(
            "plotly isn't installed", where="metronome report", remedy='pip install "metronome-rl[report]"'
        ) from None
    return str(get_plotlyjs())


def _with_steps(run: RunRecord, path: str) -> RunRecord:
    if not run.steps:
        raise ConfigurationError("the run has no step yet", found=path, remedy="wait for its first step")
    return run
