"""Results as a terminal table, as Markdown and as JSON."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version

from rich.console import Console
from rich.table import Table

from metronome import __version__
from metronome.reproduce.rows import Figure, Result, Row, Status, Way

PACKAGES = ("numpy", "torch", "transformers", "simpy")
COLUMNS = ("row, figure", "paper", "ours", "tolerance", "way: result")
COMMAND = "metronome reproduce"


def by_technique(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Results in groups, both in their order."""
    groups: dict[str, list[Result]] = {}
    for one in results:
        groups.setdefault(one.row.technique, []).append(one)
    return groups


def summary(results: Sequence[Result]) -> str:
    """One sentence of counts; rows that weren't run are named apart from those that were shown."""
    counts = Counter(one.status for one in results)
    computed = len(results) - counts[Status.NOT_HERE]
    parts = []
    if computed:
        parts.append(f"{counts[Status.SHOWN]} of {computed} rows that can be computed are shown within their tolerance")
    if counts[Status.OUT]:
        parts.append(f"{counts[Status.OUT]} OUT OF TOLERANCE")
    if counts[Status.NOT_RUN]:
        parts.append(f"{counts[Status.NOT_RUN]} not run, so not shown")
    parts.append(f"{counts[Status.NOT_HERE]} not reproducible here")
    return "; ".join(parts) + f"; {sum(one.seconds for one in results):.0f} CPU s"


def _cells(result: Result, figure: Figure) -> tuple[str, str, str, str]:
    value = result.ours.get(figure.name)
    mark = " (!)" if value is not None and not figure.holds(value) else ""
    tolerance = figure.tolerance if result.row.compute is not None else "-"
    return figure.name, figure.shown(figure.paper), figure.shown(value) + mark, tolerance


def show(results: Sequence[Result], console: Console, details: bool = False) -> None:
    """Prints a table for each technique, what is out, and what can't be shown here and why.

    ``details`` adds sources and remarks of all rows.
    """
    for technique, group in by_technique(results).items():
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0), title=technique)
        table.title_justify, table.title_style = "left", "bold"
        for column in COLUMNS:
            table.add_column(column, no_wrap=column in ("paper", "ours"))
        for one in group:
            way = one.row.how
            table.add_row(one.row.name, "", "", "", way if one.row.compute is None else f"{way}: {one.status.value}")
            for figure in one.row.figures:
                table.add_row(*(f"  {cell}" if at == 0 else cell for at, cell in enumerate(_cells(one, figure))))
        console.print(table)
        for heading, status in (
            ("out of tolerance", Status.OUT),
            ("not run", Status.NOT_RUN),
            ("not reproducible here", Status.NOT_HERE),
        ):
            for one in group:
                if one.status is status:
                    console.print(f"{heading}: {one.row.name} ({one.row.claim}): {one.note}")
        for one in group if details else ():
            remark = "" if one.status is Status.NOT_HERE else f" {one.row.remark}"  # the reason, which stands above
            console.print(f"{one.row.name}: {one.row.claim}. Source: {one.row.source}.{remark}")
        console.print()
    if any("CALIBRATED" in one.row.remark for one in results):
        console.print("calibrated, not reproduced: SAGC's rates and hours; delta isn't public and was chosen for them")
    console.print(summary(results))


def listing(rows: Iterable[Row], console: Console) -> None:
    """Prints names and claims; computes nothing."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in ("row", "way", "cheap", "needs", "claim"):
        table.add_column(column, no_wrap=column == "row")
    technique = None
    for row in rows:
        if row.technique != technique:
            technique = row.technique
            table.add_row(technique, style="bold")
        cheap = "-" if row.compute is None else "yes" if row.cheap else "no"
        table.add_row(f"  {row.name}", row.way.value, cheap, ", ".join(row.needs), row.claim)
    console.print(table)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def markdown(results: Sequence[Result], command: str) -> str:
    """The whole as a page: a table for each technique with sources and remarks under it."""
    lines = [
        "# The papers' rows, as far as they can be shown here",
        "",
        f"    {command}",
        "",
        f"{summary(results)}. {_versions_line()}",
        "",
        "Each figure is computed by the shipped code when the command runs; only the papers' figures and the "
        "tolerances are written down. Ways: *equality* (exact up to rounding, with negative controls), *arithmetic*, "
        "*simulation* (seeded), *measured on this machine* (so it differs by machine), *not reproducible here* (with "
        "the reason). Where the paper column is empty the paper gives no such figure and the expected value is ours.",
        "",
        "Only the papers' first pages and their authors' write-ups were at hand: a place in a paper is named by what "
        "stands there, not by the number of a table.",
        "",
        f"Fixed seeds. `{COMMAND} --list` names the rows, `--cheap` takes those of seconds; exit code 1 if a row is "
        "out of its tolerance or couldn't be run.",
        "",
    ]
    for technique, group in by_technique(results).items():
        lines += [f"## {technique}", ""]
        computed = [one for one in group if one.row.way is not Way.NOT_HERE]
        for one in computed:
            row = one.row
            lines += [
                f"**`{row.name}`** {row.claim}. *{row.how}*, {one.status.value}"
                + (f" ({one.note})" if one.note else "")
                + f", {one.seconds:.1f} CPU s.",
                "",
                "| figure | paper | ours | tolerance |",
                "| --- | --- | --- | --- |",
                *("| " + " | ".join(_escaped(cell) for cell in _cells(one, figure)) + " |" for figure in row.figures),
                "",
                f"Source: {row.source}. {row.remark}",
                "",
            ]
        impossible = [one for one in group if one.row.way is Way.NOT_HERE]
        if impossible:
            lines += [
                "Not reproducible here:",
                "",
                "| row | claim | the paper's figures | source | why not |",
                "| --- | --- | --- | --- | --- |",
            ]
            for one in impossible:
                row = one.row
                figures = ", ".join(f"{figure.name} {figure.shown(figure.paper)}" for figure in row.figures) or "-"
                cells = (f"`{row.name}`", row.claim, figures, row.source, row.remark)
                lines.append("| " + " | ".join(_escaped(cell) for cell in cells) + " |")
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def as_json(results: Sequence[Result], command: str) -> str:
    """The whole as JSON."""
    whole = {
        "command": command,
        "summary": summary(results),
        "passed": all(one.succeeded for one in results),
        "versions": versions(),
        "rows": [one.as_json() for one in results],
    }
    return json.dumps(whole, indent=2, allow_nan=False) + "\n"


def versions() -> dict[str, str | None]:
    """Of this package, Python and what rows compute with."""
    found: dict[str, str | None] = {"metronome": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _versions_line() -> str:
    return ", ".join(f"{name} {number}" for name, number in versions().items() if number) + "."
