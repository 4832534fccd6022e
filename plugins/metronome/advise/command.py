"""``metronome advise``: reads a run, simulates each technique on it, prints which to turn on."""

from __future__ import annotations

import json
from collections.abc import Sequence

from metronome.advise.advise import advise as compute
from metronome.advise.figures import as_json as plain
from metronome.advise.given import split
from metronome.advise.text import text
from metronome.observe.readers import read_run
from metronome.output import output_place, write_whole

_MARK = '"advice": true'  # stands in every output


def advise(run: str, overrides: Sequence[str], *, out: str | None, as_json: bool) -> int:
    """Prints the advice on a recorded run, and writes it as JSON where ``out`` is given; returns 0.

    Args:
        run: a run's folder or file, of any host, or a CSV.
        overrides: ``KEY=VALUE``, what the records lack.
        out: a file for the figures as JSON.
        as_json: print JSON instead of text.

    Raises ConfigurationError for records that can't be read or lack what nobody can assume, and, before they are
    read, for an output that has no place or would replace another file than such advice.
    """
    target = None if out is None else output_place(out, _MARK, "such advice", "advice.json")
    given, rest = split(overrides)
    advice = compute(read_run(run, rest), given)
    shown = json.dumps(plain(advice), indent=2, allow_nan=False)
    if target is not None:
        write_whole(target, shown + "\n")
    print(shown if as_json else text(advice))
    return 0
