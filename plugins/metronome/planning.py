"""The commands that prove and plan: recipes, reproduce, simulate, advise, report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

_Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
_Out = Annotated[str | None, typer.Option(metavar="FILE", help="Also write the figures as JSON.")]


def add_to(app: typer.Typer) -> None:
    """Adds the commands to ``app``; each imports what it needs when it runs."""
    for command in (recipes, reproduce, simulate, advise, report):
        app.command()(command)


def recipes(
    host: Annotated[str | None, typer.Option(metavar="HOST", help="Only this host's.")] = None, as_json: _Json = False
) -> Callable[[], int]:
    """List the shipped recipes: paper row, host, device, status."""

    def job() -> int:
        from metronome.recipe_index import show

        return show(host, as_json)

    return job


def reproduce(
    rows: Annotated[list[str] | None, typer.Argument(metavar="ROW", help="Rows by name; all without any.")] = None,
    cheap: Annotated[bool, typer.Option("--cheap", help="Only rows of seconds.")] = False,
    listing: Annotated[bool, typer.Option("--list", help="List the rows and compute nothing.")] = False,
    out: Annotated[str | None, typer.Option(metavar="PATH", help="Also write PATH.md and PATH.json.")] = None,
) -> Callable[[], int]:
    """Show the papers' rows as far as this machine can.

    Exit code 1 if one is out of its tolerance or couldn't be run for want of a package.
    """

    def job() -> int:
        from metronome.reproduce.command import reproduce as compute

        return compute(rows or [], cheap=cheap, listing=listing, out=out)

    return job


def simulate(
    cluster: Annotated[str, typer.Argument(metavar="CLUSTER", help="A YAML file, or a shipped cluster's name.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Keys to set over the file.")
    ] = None,
    out: _Out = None,
    as_json: _Json = False,
    show: Annotated[bool, typer.Option("--print", help="Print the cluster's YAML and simulate nothing.")] = False,
) -> Callable[[], int]:
    """Simulate each policy on a cluster: throughput, idle, staleness, tail, the split that balances.

    Its keys and their meanings: docs/planning.md.
    """

    def job() -> int:
        from metronome.simulate.command import print_file
        from metronome.simulate.command import simulate as compute

        if show:
            return print_file(cluster, given=bool(overrides or out or as_json))
        return compute(cluster, overrides or [], out=out, as_json=as_json)

    return job


def advise(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder or file, of any host, or a CSV.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="What the records lack, as workers=4.")
    ] = None,
    out: _Out = None,
    as_json: _Json = False,
) -> Callable[[], int]:
    """Say which techniques would pay in a run that was recorded, how much, and which not to bother with."""

    def job() -> int:
        from metronome.advise.command import advise as compute

        return compute(run, overrides or [], out=out, as_json=as_json)

    return job


def report(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN|KEY=VALUE",
            help="Runs' folders or files, several are compared; what all their records lack, as group_size=4.",
        ),
    ],
    out: Annotated[str, typer.Option(metavar="FILE", help="The HTML page.")] = "report.html",
) -> Callable[[], int]:
    """Write one HTML page that shows what runs did; it works offline."""

    def job() -> int:
        from metronome.observe.command import report as write

        return write(runs, out)

    return job
