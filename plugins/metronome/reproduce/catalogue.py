"""All rows, and the choice among them."""

from __future__ import annotations

from collections.abc import Sequence

from metronome.errors import ConfigurationError, nearest
from metronome.reproduce import a3po, a3po_time, periodic, sagc, sagc_hours, shared_prompt, survey
from metronome.reproduce.rows import Row, Way

ROWS: tuple[Row, ...] = (
    *periodic.ROWS,
    *shared_prompt.ROWS,
    *a3po.ROWS,
    *a3po_time.ROWS,
    *sagc.ROWS,
    *sagc_hours.ROWS,
    *survey.ROWS,
)


def choose(names: Sequence[str], cheap: bool) -> tuple[Row, ...]:
    """The rows of these names (all without any), in the table's order; ``cheap`` leaves out the long ones.

    Raises ConfigurationError for an unknown name, with the nearest known one, and if nothing is left.
    """
    known = {row.name: row for row in ROWS}
    for name in names:
        if name not in known:
            raise ConfigurationError(
                "no such row",
                found=name,
                where="metronome reproduce",
                remedy=f"{nearest(name, known)}; metronome reproduce --list shows all",
            )
    chosen = tuple(row for row in ROWS if (not names or row.name in names) and (row.cheap or not cheap))
    if not chosen:
        raise ConfigurationError(
            "none of these rows is cheap",
            found=", ".join(names),
            where="metronome reproduce --cheap",
            remedy="leave out --cheap",
        )
    return chosen


def unreproducible() -> tuple[Row, ...]:
    """The rows that need what isn't here."""
    return tuple(row for row in ROWS if row.way is Way.NOT_HERE)
