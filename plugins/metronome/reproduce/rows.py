"""What a row is: one claim, where it stands, the paper's figures, and the bounds that ours must keep."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from importlib.util import find_spec
from typing import Any

from metronome.errors import MetronomeError

REMEDIES = {
    "torch": "install torch",
    "transformers": 'pip install "metronome-rl[local]"',
    "simpy": 'pip install "metronome-rl[plan]"',
}


class Way(str, Enum):
    """How a row's figures are obtained."""

    EQUALITY = "equality"
    ARITHMETIC = "arithmetic"
    SIMULATION = "simulation"
    MEASURED = "measured on this machine"
    NOT_HERE = "not reproducible here"

    @property
    def repeatable(self) -> bool:
        """Whether a second run gives the same figures: rounding errors and seconds differ by machine."""
        return self in (Way.ARITHMETIC, Way.SIMULATION)


class Status(str, Enum):
    """What became of a row."""

    SHOWN = "shown"
    OUT = "OUT OF TOLERANCE"
    NOT_RUN = "not run"
    NOT_HERE = "not reproducible here"


@dataclass(frozen=True)
class Figure:
    """One number of a row.

    Attributes:
        name: what it is.
        paper: the paper's value, in the same unit; None where the paper gives none.
        low, high: ours must lie between them, ends included; NaN never does.
        unit: ``""``, ``"x"`` or ``"%"`` (values are fractions), ``"h"``, ``"min"``, ``"s"``.
        about: the value around which the bounds were set, where there is one.
    """

    name: str
    paper: float | None = None
    low: float = -math.inf
    high: float = math.inf
    unit: str = ""
    about: float | None = None

    def holds(self, value: float) -> bool:
        """Whether ``value`` is within the bounds."""
        return self.low <= value <= self.high

    def shown(self, value: float | None) -> str:
        """``value`` with its unit."""
        if value is None:
            return "-"
        if self.unit == "%":
            return f"{100 * value:.1f} %"
        text = "0" if value == 0 else f"{value:.1e}" if abs(value) < 1e-3 else f"{value:,.4g}"
        return text + ("x" if self.unit == "x" else f" {self.unit}" if self.unit else "")

    @property
    def tolerance(self) -> str:
        """The bounds in words."""
        if self.low == self.high:
            return f"exactly {self.shown(self.low)}"
        if self.about is not None:
            return f"{self.shown(self.about)} +- {self.shown(self.high - self.about)}"
        if math.isinf(self.low) and math.isinf(self.high):
            return "reported"
        if math.isinf(self.low):
            return f"at most {self.shown(self.high)}"
        if math.isinf(self.high):
            return f"at least {self.shown(self.low)}"
        return f"{self.shown(self.low)} to {self.shown(self.high)}"


def near(name: str, value: float, margin: float, unit: str = "", paper: float | None = None) -> Figure:
    """A figure within ``margin`` of ``value``."""
    return Figure(name, paper, value - margin, value + margin, unit, value)


def of_paper(name: str, value: float, margin: float, unit: str = "") -> Figure:
    """A figure within ``margin`` of the paper's own."""
    return near(name, value, margin, unit, paper=value)


def exactly(name: str, value: float, unit: str = "", paper: float | None = None) -> Figure:
    """A figure without rounding."""
    return Figure(name, paper, value, value, unit)


def at_most(name: str, value: float, unit: str = "", paper: float | None = None) -> Figure:
    """A figure with an upper bound."""
    return Figure(name, paper, high=value, unit=unit)


def at_least(name: str, value: float, unit: str = "", paper: float | None = None) -> Figure:
    """A figure with a lower bound."""
    return Figure(name, paper, low=value, unit=unit)


def between(name: str, low: float, high: float, unit: str = "", paper: float | None = None) -> Figure:
    """A figure with two bounds."""
    return Figure(name, paper, low, high, unit)


def reported(name: str, unit: str = "", paper: float | None = None) -> Figure:
    """A figure that is told, and held only to be a number."""
    return Figure(name, paper, unit=unit)


def quoted(name: str, value: float, unit: str = "") -> Figure:
    """A figure of the paper that isn't computed here."""
    return Figure(name, value, unit=unit)


@dataclass(frozen=True)
class Row:
    """One claim.

    Attributes:
        name: unique, as typed on the command line.
        technique: the group that it belongs to.
        claim: what is claimed, a short sentence.
        source: the paper and the place in it; ``ours`` where it is our own derivation.
        way: how the figures are obtained.
        figures: the paper's and their tolerances, in the order shown.
        remark: what a reader must know to judge it; the reason for a row that can't be shown here.
        compute: ours, by the shipped code, under the figures' names; None for a row that can't be shown here.
        cheap: whether it takes seconds at most.
        needs: packages that ``compute`` imports beyond the core's.
    """

    name: str
    technique: str
    claim: str
    source: str
    way: Way
    figures: tuple[Figure, ...]
    remark: str
    compute: Callable[[], Mapping[str, float]] | None = None
    cheap: bool = True
    needs: tuple[str, ...] = ()

    @property
    def how(self) -> str:
        """The way in words; a calibrated row is never just simulated."""
        return f"{self.way.value}, calibrated" if "CALIBRATED" in self.remark else self.way.value

    def missing(self) -> tuple[str, ...]:
        """The packages in ``needs`` that aren't installed."""
        return tuple(name for name in self.needs if find_spec(name) is None)


@dataclass(frozen=True)
class Result:
    """A row and what came of it; ``seconds`` of the processor that it took, ``note`` why it wasn't shown."""

    row: Row
    status: Status
    ours: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    note: str = ""

    @property
    def succeeded(self) -> bool:
        """Whether it was shown, or says why it can't be shown anywhere but on the paper's hardware."""
        return self.status in (Status.SHOWN, Status.NOT_HERE)

    def as_json(self) -> dict[str, Any]:
        """Everything, JSON-able; numbers that aren't finite become their names."""
        row = self.row
        return {
            "name": row.name,
            "technique": row.technique,
            "claim": row.claim,
            "source": row.source,
            "way": row.way.value,
            "status": self.status.value,
            "note": self.note,
            "cheap": row.cheap,
            "cpu_seconds": round(self.seconds, 3),
            "figures": [
                {
                    "name": figure.name,
                    "unit": figure.unit,
                    "paper": figure.paper,
                    "ours": _finite(self.ours.get(figure.name)),
                    "tolerance": figure.tolerance,
                    "low": None if math.isinf(figure.low) else figure.low,
                    "high": None if math.isinf(figure.high) else figure.high,
                    "within": figure.holds(self.ours[figure.name]) if figure.name in self.ours else None,
                }
                for figure in row.figures
            ],
            "remark": row.remark,
        }


def run(row: Row) -> Result:
    """Computes a row; an error of the metronome tree makes it out of tolerance and stands in the note."""
    if row.compute is None:
        return Result(row, Status.NOT_HERE, note=row.remark)
    missing = row.missing()
    if missing:
        remedies = ", ".join(dict.fromkeys(REMEDIES[name] for name in missing))
        return Result(row, Status.NOT_RUN, note=f"needs {' and '.join(missing)}: {remedies}")
    start = time.process_time()
    try:
        ours = dict(row.compute())
    except MetronomeError as error:
        return Result(row, Status.OUT, seconds=time.process_time() - start, note=f"{type(error).__name__}: {error}")
    seconds = time.process_time() - start
    expected = [figure.name for figure in row.figures]
    if sorted(ours) != sorted(expected):
        raise AssertionError(f"row {row.name} computes {sorted(ours)}, its figures are {sorted(expected)}")
    wrong = [figure for figure in row.figures if not figure.holds(ours[figure.name])]
    note = "; ".join(f"{one.name}: {one.shown(ours[one.name])}, wanted {one.tolerance}" for one in wrong)
    return Result(row, Status.OUT if wrong else Status.SHOWN, ours, seconds, note)


def _finite(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)
