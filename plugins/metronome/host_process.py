"""What hosts share whose runs are a process of their own: the folder of a smoke run, folders of a run, the process."""

from __future__ import annotations

import secrets
import shlex
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

from metronome.errors import ConfigurationError


@dataclass(frozen=True)
class Room:
    """Where a smoke run's files lie.

    Attributes:
        work: for what the host writes.
        assets: the tiny model, its data and its reward; ``work`` itself, or a folder of the user's.
        files: what ``assets`` must hold.
        module: ``python -m MODULE FOLDER`` makes them.
    """

    work: Path
    assets: Path
    files: tuple[str, ...]
    module: str

    @property
    def prepare(self) -> list[str]:
        """The command that writes what isn't the user's."""
        if self.assets != self.work:
            return []
        return [f"python -m {self.module} {shlex.quote(str(self.assets))}"]

    def fill(self, make: Callable[[Path], object]) -> None:
        """Makes the tiny model and data, or looks at the user's; raises ConfigurationError for a part that lacks."""
        if self.assets == self.work:
            try:
                make(self.assets)
            except OSError as error:
                raise ConfigurationError(
                    f"the folder of the smoke run can't be written: {error}",
                    where=str(self.assets),
                    remedy="--output FOLDER",
                ) from None
        for name in self.files:
            if not (self.assets / name).exists():
                raise ConfigurationError(
                    "the folder of a smoke run lacks a part",
                    found=f"no {name}",
                    where=f"assets={self.assets}",
                    remedy="leave assets out and the run makes its own, or a folder with " + ", ".join(self.files),
                )


def places(given: str | None, run_folder: str | None) -> tuple[Path, Path]:
    """Where a smoke run works and where its assets lie; without ``run_folder`` it works in a temporary folder.

    Args:
        given: the user's ``assets``, or None.
        run_folder: the run's folder, or None.
    """
    if run_folder is not None:
        work = Path(run_folder).absolute() / "smoke"
    else:
        work = Path(tempfile.gettempdir()) / f"metronome-smoke-{secrets.token_hex(4)}"
    return work, work if given is None else Path(given).expanduser().absolute()


def run_folder(output: str | None, resume: str | None) -> Path | None:
    """The folder of a run; raises ConfigurationError if two are given."""
    if output is not None and resume is not None:
        raise ConfigurationError(
            "a resumed run goes on in its own folder", found=output, where="--output", remedy="leave --output out"
        )
    found = output if resume is None else resume
    return None if found is None else Path(found).absolute()


def refuse_compare(host: str, key: str, where: str) -> NoReturn:
    """Raises ConfigurationError: nothing here makes two runs of such a host do the same work."""
    raise ConfigurationError(
        f"metronome compare doesn't drive {host}, whose runs aren't the same work sample by sample",
        found=key,
        where=where,
        remedy=f"metronome run once per value of {key}, and {host}'s logger for the ratios",
    )


def start(command: Sequence[str], environment: Mapping[str, str], heard: Callable[[str], object] | None = None) -> int:
    """Runs ``command`` and returns its exit code; 130 after Ctrl-C. SIGTERM, a scheduler's, ends the process too.

    ``heard`` gets each line of its output, which is printed as well.
    """
    process = subprocess.Popen(
        list(command), env=dict(environment), stdout=None if heard is None else subprocess.PIPE, errors="replace"
    )
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    reader = threading.Thread(target=_pass_on, args=(process.stdout, heard), daemon=True)
    reader.start()
    try:
        return process.wait()
    except KeyboardInterrupt:  # the terminal interrupted the process too
        process.wait()
        return 130
    finally:
        reader.join(5)  # what the process left running may hold its output open


def _pass_on(output: IO[str] | None, heard: Callable[[str], object] | None) -> None:
    if output is None or heard is None:
        return
    with output:  # if the line can't be printed the process must learn it, as it would of its own output
        for line in output:
            print(line, end="", flush=True)
            heard(line)
