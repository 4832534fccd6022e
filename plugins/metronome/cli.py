"""The command ``metronome``: run, compare, plugins, doctor, selftest, and those of metronome.planning.

Errors of the tree in metronome.errors become one line and an exit code: 2 for bad input, 1 for a run that
failed, 130 for Ctrl-C. A reader of the output that has gone is 1 without a word. Any other exception is a fault and
shows its traceback.
"""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from metronome import __version__
from metronome.errors import ConfigurationError, MetronomeError
from metronome.planning import add_to
from metronome.recipes import host_of, load_host, load_recipe, parse_vary

Job = Callable[[], int]
"""What a command returns: typer parses, and ``main`` runs the job outside typer's own exception handling."""

app = typer.Typer(
    name="metronome",
    help="Plug-ins that make language-model reinforcement learning faster inside the framework a team runs.",
    add_completion=False,
    pretty_exceptions_enable=False,
)

_Recipe = Annotated[str, typer.Argument(metavar="RECIPE", help="A YAML file; its key host names the host.")]
_Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Keys to set over the recipe; a.b=value reaches inside."),
]
_Output = Annotated[str | None, typer.Option(metavar="FOLDER", help="Where the run folder goes.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


@app.command()
def run(
    recipe: _Recipe,
    overrides: _Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Validate, print what would run, start nothing.")] = False,
    resume: Annotated[
        str | None,
        typer.Option(metavar="RUN_FOLDER", help="Go on from this run's last checkpoint."),
    ] = None,
    output: _Output = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="A few steps with a tiny model on a CPU, where the host has such runs.")
    ] = False,
) -> Job:
    """Run a recipe in its host."""

    def job() -> int:
        loaded = load_recipe(recipe, overrides or ())
        host = load_host(host_of(loaded, recipe))
        return host.run(loaded, where=recipe, output=output, resume=resume, dry_run=dry_run, smoke=smoke)

    return job


@app.command()
def compare(
    recipe: _Recipe,
    vary: Annotated[str, typer.Option(metavar="KEY=A,B", help="The key to vary and its values.")],
    overrides: _Overrides = None,
    output: _Output = None,
) -> Job:
    """Run the same work once per value of a key and print the ratios."""

    def job() -> int:
        varied = parse_vary(vary)
        loaded = load_recipe(recipe, overrides or ())
        host = load_host(host_of(loaded, recipe))
        return host.compare(loaded, varied, where=recipe, output=output)

    return job


@app.command()
def plugins(as_json: _Json = False) -> Job:
    """List what the installed plug-ins offer, with every option; exit code 2 if a name can't be selected."""

    def job() -> int:
        from metronome.plugins import collisions, offers, plugin_manager
        from metronome.settings import SELECTORS

        keys = {hook: selector for selector, hook in SELECTORS.items()}
        every = offers(plugin_manager())
        rows = [
            {
                "hook": one.offer.hook,
                "selector": keys[one.offer.hook],
                "name": one.offer.name,
                "summary": one.offer.summary,
                "options": dict(one.offer.options),
                "plugin": one.plugin,
                "distribution": one.distribution,
            }
            for one in every
        ]
        if as_json:
            print(json.dumps(rows, indent=2, default=str))
        else:
            _print_offers(rows)
        return max([_fail(str(error), error.exit_code) for error in collisions(every)], default=0)

    return job


@app.command()
def doctor(as_json: _Json = False) -> Job:
    """Print versions, hosts, device and plug-ins; exit code 2 if something is wrong."""

    def job() -> int:
        from metronome.doctor import examine, print_report

        report = examine()
        if as_json:
            print(json.dumps(report, indent=2, default=str))
        else:
            print_report(report)
        return 2 if report["problems"] else 0

    return job


@app.command()
def selftest(
    device: Annotated[str, typer.Option(metavar="cpu|cuda|npu", help="Where; by default the best there is.")] = "auto",
    long: Annotated[bool, typer.Option("--long", help="Also at the lengths of real rows; minutes.")] = False,
    backend: Annotated[str | None, typer.Option(metavar="NAME", help="Only this attention backend.")] = None,
    report: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the figures, to attach to an issue.")
    ] = None,
) -> Job:
    """Check shared-prompt attention on your own device; exit code 1 if a case fails."""

    def job() -> int:
        if find_spec("torch") is None:
            raise ConfigurationError(
                "the self-test needs torch", where="metronome selftest", remedy="install torch for your device"
            )
        from metronome.shared_prompt.selftest import selftest as check

        return check(device, long, backend, report)

    return job


add_to(app)


@app.callback(invoke_without_command=True)
def _start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    if version:
        print(f"metronome {__version__}")
        raise typer.Exit()
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line ``arguments`` (``sys.argv[1:]`` if None) and returns the exit code.

    METRONOME_TRACEBACK=1 shows the traceback of an error that would be one line.
    """
    usage_error: type[Exception] = typer.BadParameter.__mro__[1]  # typer's own or click's, by its version
    try:
        parsed = app(args=None if arguments is None else list(arguments), standalone_mode=False)
        code = parsed() if callable(parsed) else int(parsed or 0)
        sys.stdout.flush()  # here, where a reader that has gone is noticed
        return code
    except MetronomeError as error:
        if os.environ.get("METRONOME_TRACEBACK"):
            raise
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:
        if not _reader_gone():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter writes what is left at its end
        return 1
    except usage_error as error:
        message = error.format_message().rstrip(".")  # type: ignore[attr-defined]
        return _fail(f"{message}; to mend: see metronome --help", 2)


def _reader_gone() -> bool:
    """Whether standard output is a pipe that nobody reads any more, as after ``| head``."""
    try:
        output = sys.stdout.fileno()
    except (OSError, ValueError):  # no file at all
        return False
    watch = select.poll()
    watch.register(output, 0)  # errors and ends are told whatever is asked for
    return bool(watch.poll(0))


def _fail(message: str, code: int) -> int:
    print(f"metronome: error: {' '.join(message.split())}", file=sys.stderr)
    return code


def _print_offers(rows: Sequence[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("key, name", no_wrap=True)
    table.add_column("plug-in, distribution")
    table.add_column("summary, options and defaults")
    key = None
    for row in rows:
        if row["selector"] != key:
            key = row["selector"]
            table.add_row(key, style="bold")
        options = ", ".join(f"{key}={_shown(value)}" for key, value in row["options"].items())
        table.add_row(
            f"  {row['name']}",
            f"{row['plugin']}\n{row['distribution']}",
            f"{row['summary']}\n{options or 'no options'}",
        )
    Console(markup=False, highlight=False).print(table)


def _shown(value: object) -> str:
    return json.dumps(value, default=str) if not isinstance(value, str) else value


if __name__ == "__main__":
    sys.exit(main())
