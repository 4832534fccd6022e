"""The report's page: one file, offline, readable by ear and keyboard, whatever the runs are called."""

import json
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from itertools import pairwise

from report_records import made, without_times
from test_report_figures import contrast

from metronome.observe.figures import BACKGROUNDS
from metronome.observe.page import page
from metronome.observe.records import Rollout, RunRecord, Span, Step

SCRIPT = "/* the text of plotly.js */"
HOSTILE = "</script><img src=x onerror=alert(1)>\"'&<b>"


class Reader(HTMLParser):
    """Elements in their order, each with its attributes, and the text of some."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.texts, self._open = [], {}, []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self._open.append((tag, len(self.elements) - 1))

    def handle_endtag(self, tag):
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data):
        for _, index in self._open:
            self.texts[index] = self.texts.get(index, "") + data

    def all(self, *tags):
        return [attributes for tag, attributes in self.elements if tag in tags]

    def text(self, *tags):
        return [self.texts.get(index, "").strip() for index, (tag, _) in enumerate(self.elements) if tag in tags]


def read(*runs):
    text = page(runs, SCRIPT)
    return text, Reader(text)


def figures_of(reader):
    return json.loads(next(text for text in reader.text("script") if text.startswith("{")))


def test_nothing_on_the_page_lies_elsewhere():
    text, reader = read(made("a"), made("b"))
    for attributes in (attributes for _, attributes in reader.elements):
        for name in ("src", "href", "srcset", "action", "data", "poster"):
            assert attributes.get(name, "#").startswith(("#", "data:"))
    assert not re.search(r"@import|url\(|https?://", text)
    policy = next(one["content"] for one in reader.all("meta") if "http-equiv" in one)
    assert policy.startswith("default-src 'none'")
    assert "connect" not in policy


def test_plotly_stands_on_the_page_once():
    for runs in ([made("a")], [made("a"), made("b"), made("c")]):
        assert page(runs, SCRIPT).count(SCRIPT) == 1


def test_the_same_runs_give_the_same_page():
    assert page([made("a")], SCRIPT) == page([made("a")], SCRIPT)


def test_headings_are_one_h1_and_skip_no_level():
    for runs in ((made("a"),), (made("a"), without_times(made("b")))):
        _, reader = read(*runs)
        levels = [int(tag[1]) for tag, _ in reader.elements if re.fullmatch(r"h[1-6]", tag)]
        assert levels.count(1) == 1
        assert levels[0] == 1
        assert all(below <= above + 1 for above, below in pairwise(levels))


def test_the_page_has_a_language_landmarks_and_a_skip_link_first():
    _, reader = read(made("a"), made("b"))
    assert reader.all("html")[0]["lang"] == "en"
    for tag in ("header", "nav", "main", "footer"):
        assert len(reader.all(tag)) == 1
    first = reader.all("a")[0]
    assert (first["class"], first["href"]) == ("skip", "#content")
    assert reader.all("main")[0]["id"] == "content"


def test_ids_are_unique_and_every_reference_arrives():
    _, reader = read(made("a"), made("a"), without_times(made("a")))
    ids = Counter(attributes["id"] for _, attributes in reader.elements if "id" in attributes)
    assert max(ids.values()) == 1
    for _, attributes in reader.elements:
        for name in ("aria-labelledby", "data-plot"):
            assert attributes.get(name) is None or attributes[name] in ids
        if attributes.get("href", "").startswith("#"):
            assert attributes["href"][1:] in ids


def test_every_figure_has_words_and_a_table():
    text, reader = read(made("a"), without_times(made("b")))
    plots = [one for one in reader.all("div") if one.get("role") == "img"]
    assert len(plots) == len(figures_of(reader)) > 8
    assert all(len(one["aria-label"]) > 40 for one in plots)
    blocks = re.findall(r"<figure.*?</figure>", text, flags=re.DOTALL)
    assert len(blocks) == len(plots)
    for block in blocks:
        assert "<figcaption><h3" in block
        assert "<details><summary>Data of" in block
        assert '<th scope="row">' in block


def test_tables_scroll_by_keyboard_and_have_captions():
    _, reader = read(made("a"))
    regions = [one for one in reader.all("div") if one.get("class") == "scroll"]
    assert len(regions) == len(reader.all("table")) == len(reader.all("caption"))
    assert all(one["tabindex"] == "0" and one["aria-label"] for one in regions)


def test_zoom_is_there_for_the_keyboard_with_each_step():
    _, reader = read(made("a"))
    assert len(reader.all("label")) == len(reader.all("select")) == 1
    assert reader.text("button") == ["Earlier", "Later", "Closer", "Wider"]
    assert reader.text("option") == ["as at first", "all that is drawn", "Step 0", "Step 1"]


def test_texts_have_contrast_in_light_and_dark():
    css = files("metronome.observe").joinpath("page.css").read_text(encoding="utf-8")
    light, dark = css.split("prefers-color-scheme: dark")
    for part, background in ((light, BACKGROUNDS[0]), (dark, BACKGROUNDS[1])):
        colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", part))
        assert {"ink", "soft", "link", "fill"} <= set(colours)
        for name in ("ink", "soft", "link"):
            assert contrast(colours[name], background) >= 4.5
            assert contrast(colours[name], colours["fill"]) >= 4.5


def test_names_notes_and_settings_are_text_and_no_mark_up():
    run = made(HOSTILE, notes=(HOSTILE,), settings={HOSTILE: HOSTILE, "recipe": {HOSTILE: HOSTILE}}, host=HOSTILE)
    run = replace(run, spans=(*run.spans, Span(HOSTILE, HOSTILE, 0.0, 1.0, 0)))
    text, reader = read(run, made("plain"))
    assert not reader.all("img", "b")
    assert "<img" not in text
    assert reader.text("h2")[1] == f"Run {HOSTILE}"
    shown = json.dumps(figures_of(reader))
    assert "<img" not in shown
    assert "&lt;/script&gt;" in shown


def test_a_run_says_what_it_was_and_what_it_lacks():
    _, reader = read(made("a"))
    facts = dict(zip(reader.text("dt"), reader.text("dd"), strict=True))
    assert facts == {"host": "local", "source": "periodic", "workers": "1"}
    assert "Single responses have no times." in reader.text("li")
    assert any("kind: arithmetic" in text for text in reader.text("pre"))


def test_runs_are_compared_with_the_first():
    text, reader = read(made("a"), made("b"))
    assert reader.text("h1") == ["What a and b did"]
    assert "Ratio to a (same work)" in reader.text("th")
    assert "b against a: The same work" in text


def test_all_timelines_show_the_same_length_of_time_at_first():
    slow = made("slow")
    stretched = tuple(replace(span, start=3 * span.start, end=3 * span.end) for span in slow.spans)
    slow = replace(slow, spans=stretched, steps=tuple(replace(step, seconds=12.0) for step in slow.steps))
    _, reader = read(made("fast"), slow)
    ranges = [figure["layout"]["xaxis"]["range"] for key, figure in figures_of(reader).items() if "timeline" in key]
    assert ranges == [[0.0, 24.0], [0.0, 24.0]]


def test_a_bare_record_gives_a_page_that_names_what_is_missing():
    text, reader = read(RunRecord("bare", "csv", None, (Step(0, 2.0),)))
    assert "Recorded by none of these runs: Reward by step" in text
    assert "no clock times" in text
    assert set(figures_of(reader)) == {"parts-0", "seconds"}


def huge():
    """1,000 steps of 1,000 rollouts, 64 workers."""
    steps, rollouts, spans = [], [], []
    for number in range(1000):
        start = 20.0 * number
        rollouts += [
            Rollout(
                number,
                str(index // 8),
                50 + index,
                9,
                start,
                start + 1 + index / 100,
                f"worker {index % 64}",
                0.5,
                number,
            )
            for index in range(1000)
        ]
        spans.append(Span("trainer", "train", start + 11, start + 20, number))
        steps.append(Step(number, 20.0, group_size=8, metrics={"loss/clipped": 0.1}, fingerprint=str(number)))
    return RunRecord("huge", "csv", "bounded", tuple(steps), tuple(rollouts), tuple(spans))


def test_a_huge_run_gives_a_page_of_few_megabytes_and_says_what_it_left_out():
    text = page([huge()], SCRIPT)
    assert len(text) < 5e6  # plotly.js adds five
    assert re.search(r"Only the first \d+ steps of 1,000 are drawn", text)
    assert "24 of 65 lanes are drawn" in text
    assert "Each point is the mean over 2 steps" in text
    assert "1,000,000" in text
