"""``metronome reproduce``: chooses rows, computes them on one thread, prints and writes them."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from metronome.errors import ConfigurationError
from metronome.reproduce import catalogue, files, render
from metronome.reproduce.rows import Result, Row, run

_WIDTH = 120  # of a table that goes to a file or a pipe


def reproduce(names: Sequence[str], *, cheap: bool = False, listing: bool = False, out: str | None = None) -> int:
    """Shows the rows; returns 0 if all that can be shown here were, else 1.

    A row that couldn't be run for want of a package isn't shown, so it gives 1 too.

    Args:
        names: of rows; all without any.
        cheap: only rows of seconds.
        listing: names the rows and computes nothing.
        out: path without suffix of a Markdown and a JSON file; they are replaced whole once all rows are done.

    Raises ConfigurationError for an unknown row, rows of which none is cheap, and a path that can't be written.
    """
    chosen = catalogue.choose(names, cheap)
    console = Console(markup=False, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(markup=False, highlight=False, width=_WIDTH)
    if listing:
        if out is not None:
            raise ConfigurationError(
                "a list of rows computes nothing that could be written",
                found=out,
                where="metronome reproduce --list --out",
                remedy="leave out --list",
            )
        render.listing(chosen, console)
        return 0
    written = None if out is None else files.targets(out)
    with _one_thread(chosen):
        results = _compute(chosen)
    render.show(results, console, details=bool(names))
    if written is not None:
        command = shlex.join(["metronome", "reproduce", *names, *(["--cheap"] if cheap else []), "--out", str(out)])
        page, figures = written
        files.write({figures: render.as_json(results, command), page: render.markdown(results, command)})
        console.print(f"written: {page} and {figures}")
    return 0 if all(one.succeeded for one in results) else 1


def _compute(rows: Sequence[Row]) -> list[Result]:
    results = []
    columns = TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn()
    quiet = not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as progress:
        task = progress.add_task("", total=len(rows))
        for row in rows:
            progress.update(task, description=row.name)
            results.append(run(row))
            progress.advance(task)
    return results


@contextmanager
def _one_thread(rows: Sequence[Row]) -> Iterator[None]:
    """One torch thread, so that figures and times don't depend on the cores."""
    if not any("torch" in row.needs for row in rows) or find_spec("torch") is None:
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
