"""What the page is made of: panels, each a plotly figure with its words and its table; and the look they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from metronome.observe.words import shortened

BACKGROUNDS = ("#ffffff", "#16191d")
"""The page's, light and dark; every colour below has a contrast of 3 or more with both (a test computes it)."""

COLOURS = ("#0072b2", "#c44e00", "#8e5bd0", "#00856f", "#c23a86", "#757575")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross")
PATTERNS = ("", "/", "x", ".", "-", "\\")
"""Of runs, in their order: colour, dash, marker and pattern, so that none is told by its colour alone.

After six runs colours begin again and the others go on by one, so that 36 runs look unlike."""

KINDS: dict[str, tuple[str, str, str, int]] = {
    "generate": ("generation", "#0072b2", "", 7),
    "train": ("training", "#c44e00", ".", 7),
    "proximal": ("proximal policy", "#8e5bd0", "x", 7),
    "old_log_probs": ("old log-probs", "#c23a86", "-", 7),
    "reference": ("reference", "#00856f", "|", 7),
    "step": ("optimiser step", "#757575", "+", 7),
    "publish": ("publication", "#00856f", "\\", 7),
    "evaluate": ("evaluation", "#8e5bd0", ".", 14),
    "save": ("checkpoint", "#c23a86", "+", 14),
    "other": ("other work", "#757575", "x", 14),
    "rest": ("no part named", "#757575", "-", 14),
    "idle": ("idle", "#757575", "/", 8),
}
"""Kind of a span -> its word, colour, pattern and the pattern's size in pixels."""


@dataclass(frozen=True)
class Table:
    """Rows of text; the first cell of a row is its heading."""

    caption: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Panel:
    """A figure of the page.

    Attributes:
        key: its id.
        title: its heading.
        text: what it shows, a sentence or two.
        alternative: what one would see, in words, with figures.
        figure: plotly's ``data`` and ``layout``; None for a panel that is its table.
        table: its data.
        notes: what was left out or added up.
        stretches: (name, from, to) of a timeline's steps, for its zoom; empty elsewhere.
        wide: whether it takes the whole width.
    """

    key: str
    title: str
    text: str
    alternative: str
    figure: dict[str, Any] | None
    table: Table
    notes: tuple[str, ...] = ()
    stretches: tuple[tuple[str, float, float], ...] = field(default=())
    wide: bool = False


def axis(title: str, **more: Any) -> dict[str, Any]:
    """An axis with its title and room for its labels."""
    return {
        "title": {"text": title, "font": {"size": 13}, "standoff": 8},
        "automargin": True,
        "zeroline": False,
        **more,
    }


def layout(x: dict[str, Any], y: dict[str, Any], height: int = 320, **more: Any) -> dict[str, Any]:
    """The layout that every figure shares; the page's script sets colours and width."""
    return {
        "xaxis": x,
        "yaxis": y,
        "height": height,
        "autosize": True,
        "margin": {"l": 48, "r": 12, "t": 12, "b": 44},
        "font": {"size": 13},
        "hovermode": "closest",
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom"},
        "showlegend": True,
        **more,
    }


def look(index: int, points: int) -> dict[str, Any]:
    """Line and marker of the run with this index; of many points twenty get a marker."""
    colour, other = COLOURS[index % len(COLOURS)], (index + index // len(COLOURS)) % len(COLOURS)
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "line": {"color": colour, "dash": DASHES[other], "width": 2},
        "marker": {
            "color": colour,
            "symbol": SYMBOLS[other],
            "size": 7,
            "maxdisplayed": 20 if points > 40 else 0,
        },
    }


def filled(index: int) -> dict[str, Any]:
    """The marker of the bars of the run with this index."""
    return pattern(COLOURS[index % len(COLOURS)], PATTERNS[(index + index // len(COLOURS)) % len(PATTERNS)])


def pattern(colour: str, shape: str, size: int = 7) -> dict[str, Any]:
    """A bar's marker: ``colour`` with ``shape`` in white over it."""
    over = {"shape": shape, "fillmode": "overlay", "fgcolor": "#ffffff", "size": size, "solidity": 0.25}
    return {"color": colour, "line": {"color": colour, "width": 1}, "pattern": over}


def shown(label: str) -> str:
    """A run's label inside a figure: shortened, and no mark-up to plotly."""
    return escape(shortened(label))


def fold(numbers: Sequence[int], limit: int) -> list[list[int]]:
    """The numbers in blocks of consecutive ones, as few in a block as keep to ``limit`` blocks."""
    size = max(1, -(-len(numbers) // limit))
    return [list(numbers[first : first + size]) for first in range(0, len(numbers), size)]
