"""Advice as text: the facts, how well the model fits, a table of techniques, and why."""

from __future__ import annotations

import textwrap

from metronome.advise.advise import Advice, Row
from metronome.advise.gain import TRUSTED, Calibration, Gain
from metronome.advise.measure import MUCH, TAU, Facts
from metronome.observe.words import MISSING, duration, number, percent

_WIDTH = 118


def text(advice: Advice) -> str:
    """All of it, lines of at most 118 characters but for flags."""
    return "\n".join(
        [
            f"{advice.name}: a {advice.source} run of {advice.host}",
            "",
            *_facts(advice),
            *_model(advice),
            *_table(advice),
            "",
            *_why(advice),
            *_end(advice),
        ]
    )


def interval(found: Gain | None) -> str:
    """``1.66x (1.58 to 1.74)``."""
    if found is None:
        return "-"
    if found.low is None or found.high is None:
        return f"{found.value:.2f}x (not enough steps)"
    return f"{found.value:.2f}x ({found.low:.2f} to {found.high:.2f})"


def _facts(advice: Advice) -> list[str]:
    facts = advice.facts
    recorded = f"{facts.steps} steps, {facts.groups} groups, {facts.rollouts} rollouts"
    prompt, mean, longest = map(_short, (facts.prompt_tokens, facts.response_tokens, facts.response_tokens_max))
    tokens = f"prompt {prompt}, response {mean}, longest {longest}"
    if facts.truncated is not None:
        tokens += f"; {percent(facts.truncated)} of the responses at the limit"
    stale = MISSING
    if facts.staleness_mean is not None:
        stale = f"mean {facts.staleness_mean:.2f}, largest {facts.staleness_max} versions"
    idle = f"trainer {percent(facts.trainer_idle)}, rollout workers {percent(facts.rollout_idle)}"
    if facts.unrecorded is not None and facts.unrecorded > MUCH:
        idle += f" of the steps' {duration(facts.steps * facts.step_seconds)}, "
        idle += f"of which {percent(facts.unrecorded)} is in no recorded part"
    passes = f"share of a step {percent(facts.proximal_share)}; old log-probs {percent(facts.old_log_probs_share)}"
    lines = {
        "recorded": f"{recorded}; {duration(facts.step_seconds)} a step",
        "stragglers": _stragglers(facts),
        "tokens": tokens,
        "idle": idle,
        "staleness": stale,
        "proximal pass": passes,
        "rewards": f"groups whose rewards are all equal: {percent(facts.degenerate)}",
    }
    return ["Measured", *(f"  {name:<14} {value}" for name, value in lines.items()), ""]


def _short(value: float | None) -> str:
    return MISSING if value is None else number(round(value))


def _stragglers(facts: Facts) -> str:
    if facts.straggler_ratio is None:
        return MISSING
    return (
        f"longest over median {facts.straggler_ratio:.2f}; above {TAU:g} in {percent(facts.straggler_rate)} of the "
        f"groups; a step's mean above {TAU:g} in {percent(facts.straggling_steps)} of the steps"
    )


def _model(advice: Advice) -> list[str]:
    lines = [f"Model (ours; {len(advice.base.steps)} recorded steps)"]
    for one in advice.base.measured:
        lines += _wrapped(one)
    for one in advice.base.assumed:
        lines += _wrapped(f"assumed: {one}")
    if advice.replayed is not None:
        lines += _fit("the run as it was, from its own arrivals", advice.replayed)
    lines += _fit("the run as it was, simulated", advice.simulated)
    lines += _wrapped("fitted to this run; no proof of the gains")
    return [*lines, ""]


def _fit(what: str, fits: Calibration) -> list[str]:
    lines = _wrapped(
        f"{what}: {fits.computed:.4g} s a step, recorded {fits.recorded:.4g} s ({100 * fits.level:.1f} % off; single "
        f"steps {100 * fits.error:.1f} % off on average)"
    )
    if not fits.trusted:
        lines += _wrapped(
            f"that is above {100 * TRUSTED:.0f} %: this model doesn't describe this run; gains computed with it are "
            "not to be relied upon",
            indent="    ",
        )
    return lines


def _table(advice: Advice) -> list[str]:
    rows = [("technique", "times as fast (90 %)", "verdict", "costs and changes")]
    rows += [
        (row.name, interval(row.gain) + " *" * (row.method == "replayed"), row.verdict, row.changes)
        for row in advice.rows
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = ["  ".join([*(row[i].ljust(widths[i]) for i in range(3)), row[3]]).rstrip() for row in rows]
    return [
        *_wrapped(
            "Expected, not measured: times as fast as the run as it was (already on: as without it); in brackets the "
            "90 % interval; * from the run's own arrivals, else simulated",
            indent="",
        ),
        lines[0],
        "-" * min(_WIDTH, max(map(len, lines))),
        *lines[1:],
    ]


def _why(advice: Advice) -> list[str]:
    lines = ["Why, and the flag to add (" + advice.beside + ")"]
    for row in advice.rows:
        lines += _wrapped(f"{row.name}: {row.why}")
        if row.flag and row.verdict in ("turn on", "try", "not known"):
            lines.append(f"    {row.flag}")
    return lines


def _end(advice: Advice) -> list[str]:
    named: dict[str, list[Row]] = {}
    for row in advice.rows:
        named.setdefault(row.verdict, []).append(row)
    lines = [""]
    for kind in ("turn on", "try", "no gain over", "not worth it", "not known", "refused", "already on"):
        for verdict in (one for one in named if one.startswith(kind)):
            lines += _wrapped(f"{verdict}: " + "; ".join(row.name for row in named[verdict]), indent="")
    for note in advice.notes:
        lines += _wrapped(f"note: {note}", indent="")
    return lines


def _wrapped(sentence: str, indent: str = "  ") -> list[str]:
    return textwrap.wrap(
        sentence, _WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_long_words=False
    )
