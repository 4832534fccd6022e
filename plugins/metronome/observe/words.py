"""Figures as a page writes them: four digits at most, a percent sign, seconds or hours."""

from __future__ import annotations

from collections.abc import Sequence

MISSING = "not recorded"


def number(value: float | None) -> str:
    """``value`` with at most four significant digits, whole numbers with thousands apart."""
    if value is None:
        return MISSING
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"


def percent(share: float | None) -> str:
    """A share 0..1 in per cent."""
    if share is None:
        return MISSING
    digits = 0 if share in (0.0, 1.0) or 0.0995 <= share <= 0.9905 else 1
    return f"{100 * share:.{digits}f} %"


def duration(seconds: float | None) -> str:
    """Seconds; from a minute on also minutes, from an hour on hours and minutes."""
    if seconds is None:
        return MISSING
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def change(values: Sequence[float]) -> str:
    """First to last: ``0.33 to 0.99``; one value alone where nothing changed from beginning to end."""
    if not values:
        return MISSING
    if len(set(values)) == 1:
        return number(values[0])
    return f"{number(values[0])} to {number(values[-1])}"


def several(count: int, one: str, many: str | None = None) -> str:
    """``1 step``, ``20 steps``."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def shortened(text: str, length: int = 36) -> str:
    """``text`` with its middle left out where it is longer than ``length``."""
    half = (length - 1) // 2
    return text if len(text) <= length else f"{text[:half]}…{text[-half:]}"
