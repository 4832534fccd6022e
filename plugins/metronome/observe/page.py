"""The report's page: one HTML text with everything in it, readable without its figures."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

import yaml

from metronome import __version__
from metronome.observe import by_step, parts, staleness, timeline, weights
from metronome.observe.comparison import summary
from metronome.observe.figures import BACKGROUNDS, Panel, Table
from metronome.observe.measures import Measured, measure
from metronome.observe.records import RunRecord

GENERATOR = '<meta name="generator" content="metronome report">'
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
_WORDS = {
    "staleness": "staleness bound",
    "trainer_ranks": "trainer ranks",
    "prompts": "prompts a step",
    "group_size": "group size G",
    "max_tokens": "most response tokens",
    "group_controller": "group controller",
}


def page(runs: Iterable[RunRecord], plotly_js: str) -> str:
    """The page of ``runs``, the first of which the others are compared with.

    Args:
        runs: at least one, each with at least one step.
        plotly_js: the text of plotly.js, which goes into the page once.
    """
    measured = measure(runs)
    names = [one.label for one in measured]
    title = f"metronome report: {', '.join(names)}"
    panels, missing = by_step.panels(measured)
    versions = staleness.panel(measured)
    marks, said = weights.table(measured)
    missing += [] if versions else ["Staleness"]
    missing += [] if marks else ["Weight fingerprints"]
    own = _own_panels(measured)
    common = [*panels, *([versions] if versions else [])]
    links = [("summary", "Summary"), *((f"run-{index}", f"Run {name}") for index, name in enumerate(names))]
    links += [("steps", "Step by step"), *([("weights", "Weights")] if marks else [])]
    body = [
        '<a class="skip" href="#content">Skip to the content</a>',
        f"<header><h1>What {_and(names)} did</h1></header>",
        '<nav aria-label="On this page"><ul>',
        *(f'<li><a href="#{key}">{escape(text)}</a></li>' for key, text in links),
        '</ul></nav><main id="content" tabindex="-1">',
        "<noscript><p>Without JavaScript no figure is drawn; the data of each is in the table under it.</p></noscript>",
        *_summary(measured),
        *(line for index, one in enumerate(measured) for line in _run(one, f"run-{index}", own[index])),
        '<section aria-labelledby="steps"><h2 id="steps">Step by step</h2><div class="panels">',
        *(line for one in common for line in _panel(one)),
        "</div>",
        *([f"<p>Recorded by none of these runs: {escape(', '.join(missing))}.</p>"] if missing else []),
        "</section>",
        *_weights(marks, said),
        f"</main><footer><p>Written by metronome {escape(__version__)}. The page needs no network.</p></footer>",
    ]
    figures = {one.key: _drawing(one) for one in (*own, *common)}
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            GENERATOR,
            '<link rel="icon" href="data:,">',
            f"<title>{escape(title)}</title>",
            f"<style>:root{{--light:{BACKGROUNDS[0]};--dark:{BACKGROUNDS[1]}}}\n{_text('page.css')}</style>\n</head>\n<body>",
            *body,
            f'<script id="figures" type="application/json">{_json(figures)}</script>',
            f"<script>{plotly_js}</script>",
            f"<script>{_text('page.js')}</script>\n</body>\n</html>\n",
        ]
    )


def _own_panels(runs: Sequence[Measured]) -> list[Panel]:
    """Each run's timeline, or its parts; all timelines begin with the same length of time, so that they compare."""
    drawn = [timeline.panel(one, f"timeline-{index}") for index, one in enumerate(runs)]
    axes = [one.figure["layout"]["xaxis"] for one in drawn if one is not None and one.figure is not None]
    longest = max((axis["range"][1] - axis["range"][0] for axis in axes), default=0.0)
    for axis in axes:
        axis["range"] = [axis["range"][0], axis["range"][0] + longest]
    return [parts.panel(runs[index], f"parts-{index}") if one is None else one for index, one in enumerate(drawn)]


def _summary(runs: Sequence[Measured]) -> list[str]:
    table, sentences = summary(runs)
    return [
        '<section aria-labelledby="summary"><h2 id="summary">Summary</h2>',
        *(f"<p>{escape(sentence)}</p>" for sentence in sentences),
        *_table(table),
        '<p class="note">Trainer idle is the waiting that a run recorded, or else what its lane leaves; '
        "workers idle is what their lanes leave. Both are shares of the steps' whole time.</p></section>",
    ]


def _run(one: Measured, key: str, own: Panel) -> list[str]:
    run = one.run
    facts = {"host": run.host, "source": run.source or "not recorded"}
    nested = {name: value for name, value in run.settings.items() if isinstance(value, Mapping)}
    facts |= {_WORDS.get(name, name): _plain(value) for name, value in run.settings.items() if name not in nested}
    lines = [f'<section aria-labelledby="{key}"><h2 id="{key}">Run {escape(one.label)}</h2><dl>']
    lines += [f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items()]
    lines.append("</dl>")
    for name, value in nested.items():
        text = yaml.safe_dump(_jsonable(value), sort_keys=False, allow_unicode=True)
        lines.append(
            f"<details><summary>Its {escape(name)}</summary>"
            f'<pre tabindex="0" role="region" aria-label="{escape(name)} of {escape(one.label)}">'
            f"{escape(text)}</pre></details>"
        )
    if run.notes:
        lines.append("<h3>What was not recorded, and how the record was read</h3><ul>")
        lines += [f"<li>{escape(note)}</li>" for note in dict.fromkeys(run.notes)]
        lines.append("</ul>")
    lines += _panel(own, of=one.label)
    idle = timeline.lane_table(one)
    if idle is not None:
        lines += [f"<h3>{escape(idle.caption)}</h3>", *_table(idle)]
    lines.append("</section>")
    return lines


def _weights(table: Table | None, sentences: Sequence[str]) -> list[str]:
    if table is None:
        return []
    return [
        '<section aria-labelledby="weights"><h2 id="weights">Weights</h2>',
        "<p>A publication has a fingerprint of its weights where the host wrote one: equal weights, equal text.</p>",
        "<ul>",
        *(f"<li>{escape(sentence)}</li>" for sentence in sentences),
        "</ul><details><summary>Fingerprints by step</summary>",
        *_table(table),
        "</details></section>",
    ]


def _panel(one: Panel, of: str | None = None) -> list[str]:
    title = one.title if of is None else f"{one.title} of {of}"
    lines = [
        f'<figure class="{"wide" if one.wide else "half"}" aria-labelledby="title-{one.key}">',
        f'<figcaption><h3 id="title-{one.key}">{escape(title)}</h3><p>{escape(one.text)}</p></figcaption>',
        *(_zoom(one, title) if one.stretches else []),
        f'<div role="img" aria-label="{escape(one.alternative)}">'
        f'<div class="plot" id="plot-{one.key}" aria-hidden="true" style="min-height:{_height(one)}px"></div></div>',
        *(f'<p class="note">{escape(note)}</p>' for note in one.notes),
        f"<details><summary>Data of {escape(title)}</summary><p>{escape(one.alternative)}</p>",
        *_table(one.table),
        "</details></figure>",
    ]
    return lines


def _zoom(one: Panel, title: str) -> list[str]:
    options = "".join(
        f'<option value="{start:.4f} {end:.4f}">{escape(name)}</option>' for name, start, end in one.stretches
    )
    whole = f"{one.stretches[0][1]:.4f} {one.stretches[-1][2]:.4f}"
    return [
        f'<div class="zoom" role="group" aria-label="Zoom: {escape(title)}" data-plot="plot-{one.key}"'
        f' data-end="{one.stretches[-1][2]:.1f}">',
        f'<label>Show <select><option value="">as at first</option><option value="{whole}">all that is drawn</option>'
        f"{options}</select></label>",
        *(
            f'<button type="button" data-do="{do}">{text}</button>'
            for do, text in (("earlier", "Earlier"), ("later", "Later"), ("closer", "Closer"), ("wider", "Wider"))
        ),
        '<span class="view" role="status"></span></div>',
    ]


def _table(table: Table) -> list[str]:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in table.headers)
    lines = [
        f'<div class="scroll" role="region" aria-label="Table: {escape(table.caption)}" tabindex="0"><table>',
        f"<caption>{escape(table.caption)}</caption><thead><tr>{head}</tr></thead><tbody>",
    ]
    for first, *others in table.rows:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in others)
        lines.append(f'<tr><th scope="row">{escape(first)}</th>{cells}</tr>')
    lines.append("</tbody></table></div>")
    return lines


def _height(one: Panel) -> int:
    return 0 if one.figure is None else int(one.figure["layout"]["height"])


def _drawing(one: Panel) -> dict[str, Any]:
    return {} if one.figure is None else one.figure


def _json(value: object) -> str:
    """JSON that can stand inside a script element, whatever the runs are called."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _plain(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _jsonable(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(name): _jsonable(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(one) for one in value]
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)


def _and(names: Sequence[str]) -> str:
    quoted = [escape(name) for name in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} and {quoted[-1]}"


def _text(name: str) -> str:
    return files("metronome.observe").joinpath(name).read_text(encoding="utf-8")
