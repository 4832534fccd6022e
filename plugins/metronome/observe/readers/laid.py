"""A timeline for hosts that record how long the parts of a step take, and not when."""

from __future__ import annotations

from collections.abc import Sequence

from metronome.observe.records import Span, Step


def laid_end_to_end(steps: Sequence[Step], order: Sequence[tuple[str, str]], prefix: str) -> tuple[Span, ...]:
    """Spans of steps whose parts follow one another, each from where the one before ended.

    Args:
        steps: with the parts' seconds among their ``metrics``.
        order: (a span's kind, the metric's name without ``prefix``) in the order in which the host runs them.
        prefix: of the metrics' names.

    Where a step's parts don't fill its seconds the rest stays empty, before the next step begins. Generation gets the
    lane ``rollout``, everything else ``trainer``.
    """
    spans = []
    begin = 0.0
    for step in steps:
        place = begin
        for kind, name in order:
            seconds = step.metrics.get(prefix + name, 0.0)
            if seconds > 0.0:
                lane = "rollout" if kind == "generate" else "trainer"
                spans.append(Span(lane, kind, place, place + seconds, step.number))
                place += seconds
        begin += step.seconds
    return tuple(spans)
