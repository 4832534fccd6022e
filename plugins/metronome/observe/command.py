"""``metronome report``: reads runs and writes their page, whole or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from metronome.errors import ConfigurationError
from metronome.observe.page import GENERATOR, page
from metronome.observe.records import RunRecord
from metronome.observe.words import several
from metronome.output import output_place, write_whole


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

    target = output_place(out, GENERATOR, "a metronome report", "report.html")
    script = _plotly()
    settings = [one for one in arguments if "=" in one and not Path(one).expanduser().exists()]
    records = [_with_steps(read_run(one, settings), one) for one in arguments if one not in settings]
    if not records:
        raise ConfigurationError(
            "no run was given", remedy="metronome report RUN [RUN...] [KEY=VALUE...] --out report.html"
        )
    write_whole(target, page(records, script))
    steps = sum(len(run.steps) for run in records)
    size = target.stat().st_size / 1e6
    print(f"wrote {target} ({size:.1f} MB): {several(len(records), 'run')}, {several(steps, 'step')}")
    return 0


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
