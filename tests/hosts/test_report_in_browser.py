"""The report in headless Chromium: it draws, asks for nothing, and is read by keyboard, by ear and on a phone."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import chromium_driver
import pytest

offline = pytest.importorskip("plotly.offline", reason="plotly isn't installed")

REASON = chromium_driver.missing()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")

OPEN_ALL = "document.querySelectorAll('details').forEach(one => one.open = true)"


def records():
    """The runs of the report's unit tests."""
    place = Path(__file__).parents[1] / "unit" / "report_records.py"
    spec = importlib.util.spec_from_file_location("report_records_of_unit", place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """``compared``: three runs, the last without clock times and of a hostile name; ``alone``: one; ``many``: five;
    ``laid``: one whose parts were laid end to end."""
    from metronome.observe.page import page

    made = records().made
    runs = [
        made("synchronous-demo"),
        replace(made("periodic-demo"), source="periodic"),
        records().without_times(made("<b onmouseover=alert(1)>&</script>")),
    ]
    folder = tmp_path_factory.mktemp("pages")
    script = offline.get_plotlyjs()
    many = [made(f"a-rather-long-name-of-a-run-{number:02}-of-a-sweep") for number in range(5)]
    stub = "const Plotly = {newPlot: async () => { throw new Error('no canvas') }, relayout: async () => {}};"
    (folder / "undrawn.html").write_text(page(runs[:1], stub), encoding="utf-8")
    laid = [records().laid_run()]
    for name, shown in (("compared", runs), ("alone", runs[:1]), ("many", many), ("laid", laid)):
        (folder / f"{name}.html").write_text(page(shown, script), encoding="utf-8")
    (folder / "bad.html").write_text(
        "<!doctype html><p style='width:3000px'>wide</p><img src='http://127.0.0.1:9/beacon.png'>"
        "<script>throw new Error('broken on purpose')</script>",
        encoding="utf-8",
    )
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    driver = chromium_driver.Browser(tmp_path_factory.mktemp("profile"))
    yield driver
    driver.close()


@pytest.fixture
def opened(browser, pages):
    """``opened(name, width)``: the page is open and drawn, and older logs are emptied."""

    def show(name, width=1280):
        browser.dark(False)
        browser.size(width, 900)
        browser.log("browser")
        browser.requests()
        browser.open(pages / f"{name}.html")
        browser.until("document.documentElement.dataset.drawn")
        return browser

    return show


@pytest.mark.parametrize("name", ["compared", "alone", "laid"])
def test_the_page_draws_every_figure_without_a_request_or_an_error(opened, pages, name):
    browser = opened(name)
    drawn = browser.run(
        """return [...document.querySelectorAll('.plot')].map(plot => [
            plot.querySelectorAll('.main-svg').length > 0,
            plot.querySelectorAll('.scatterlayer .trace .points path, .barlayer .trace .point path').length])"""
    )
    assert len(drawn) == int(browser.run("return document.documentElement.dataset.drawn"))
    assert len(drawn) == {"compared": 12, "alone": 10, "laid": 3}[name]
    assert all(there and marks for there, marks in drawn), drawn
    assert browser.log("browser") == []
    assert [one for one in browser.requests() if not one.startswith("data:")] == [(pages / f"{name}.html").as_uri()]


def test_the_checks_see_requests_errors_and_overflow(browser, pages):
    """Negative control: a page that does what the report must not."""
    browser.size(1280, 900)
    browser.requests()
    browser.open(pages / "bad.html")
    assert "http://127.0.0.1:9/beacon.png" in browser.requests()
    assert any("broken on purpose" in entry["message"] for entry in browser.log("browser"))
    assert overflow(browser) > 0


def overflow(browser):
    return browser.run("return document.documentElement.scrollWidth - document.documentElement.clientWidth")


@pytest.mark.parametrize("width", [1280, 400])
def test_no_width_needs_sideways_scrolling(opened, width):
    browser = opened("compared", width)
    assert overflow(browser) <= 0
    browser.run(OPEN_ALL)
    assert overflow(browser) <= 0


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("name", ["compared", "many", "laid"])
def test_no_label_lies_over_another(opened, name, width):
    over = opened(name, width).run(
        """
        const overlap = (a, b) =>
            a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
        const found = [];
        for (const plot of document.querySelectorAll('.plot')) {
            const texts = '.xtick text, .ytick text, .xtitle, .ytitle, .legendtext, .bartext';
            const labels = [...plot.querySelectorAll(texts)].map(one => [one.textContent, one.getBoundingClientRect()]);
            const frame = plot.getBoundingClientRect();
            labels.forEach(([text, box], index) => {
                if (box.left < frame.left - 1 || box.right > frame.right + 1)
                    found.push(plot.id + ': outside: ' + text);
                for (const [other, place] of labels.slice(index + 1))
                    if (overlap(box, place)) found.push(plot.id + ': ' + text + ' over ' + other);
            });
        }
        return found"""
    )
    assert over == []


def focused(browser):
    return browser.run(
        "const e = document.activeElement; return e === document.body ? null : "
        "[e.tagName, e.className, (e.getAttribute('aria-label') || e.textContent).slice(0, 60)]"
    )


def test_the_skip_link_comes_first_and_leads_to_the_content(opened):
    browser = opened("compared")
    browser.press("Tab")
    assert focused(browser)[1] == "skip"
    box = browser.run("const b = document.activeElement.getBoundingClientRect(); return [b.top, b.bottom]")
    assert 0 <= box[0] < box[1] < 100  # in sight once it has the focus
    browser.press("Enter")
    assert browser.run("return document.activeElement.id") == "content"


def test_the_keyboard_reaches_everything_in_the_order_of_the_page(opened):
    browser = opened("alone")
    wanted = browser.run(
        """return [...document.querySelectorAll('a[href], select, button, summary, [tabindex="0"]')]
            .filter(one => one.checkVisibility()).map(one => [one.tagName, one.className,
            (one.getAttribute('aria-label') || one.textContent).slice(0, 60)])"""
    )
    reached = []
    for _ in range(len(wanted)):
        browser.press("Tab")
        reached.append(focused(browser))
    assert reached == wanted
    assert sum(tag == "SUMMARY" for tag, *_ in reached) == 12  # a recipe, ten figures' data, the fingerprints


def test_a_figures_data_opens_by_keyboard(opened):
    browser = opened("alone")
    browser.run("document.querySelector('figure summary').focus()")
    browser.press("Enter")
    assert browser.run("return document.activeElement.parentElement.open")
    browser.press("Tab")
    assert focused(browser)[1:] == ["scroll", "Table: Stretches drawn"]


def view(browser):
    return browser.run("return document.querySelector('.plot').layout.xaxis.range.map(Number)")


def test_the_timeline_zooms_by_keyboard_and_says_what_is_in_view(opened):
    browser = opened("alone")
    assert view(browser) == [0.0, 8.0]
    browser.run("document.querySelector('.zoom select').focus()")
    browser.press("Down", "Down", "Down")
    browser.until("document.querySelector('.plot').layout.xaxis.range[0] == 4")
    assert view(browser) == [4.0, 8.0]  # the second step
    assert (
        browser.run("return document.querySelector('.view').textContent") == "In view: 4.0 s to 8.0 s; drawn to 8.0 s"
    )
    for button, expected in (
        ("earlier", [2.0, 6.0]),
        ("closer", [3.0, 5.0]),
        ("wider", [2.0, 6.0]),
        ("later", [4.0, 8.0]),
    ):
        browser.run(f"document.querySelector('[data-do={button}]').focus()")
        browser.press("Enter")
        assert view(browser) == expected


def test_a_screen_reader_gets_a_name_for_everything(opened):
    browser = opened("compared")
    browser.run(OPEN_ALL)
    browser.command("Accessibility.enable")
    nodes = [one for one in browser.command("Accessibility.getFullAXTree")["nodes"] if not one.get("ignored")]
    by_role = {}
    for node in nodes:
        by_role.setdefault(node["role"]["value"], []).append(node.get("name", {}).get("value", ""))
    for role in ("image", "figure", "region", "button", "combobox", "heading", "link", "navigation", "table", "status"):
        assert by_role.get(role), role
    # A status speaks its text, and a heading its own.
    unnamed = {role for role, names in by_role.items() if not all(name.strip() for name in names)}
    assert (
        unnamed & {"image", "figure", "region", "button", "combobox", "heading", "link", "navigation", "table"} == set()
    )
    assert "SvgRoot" not in by_role  # what a figure draws is told by its words, not mark by mark
    assert len(by_role["image"]) == 12
    assert {"main", "banner", "contentinfo"} <= set(by_role)


def test_hostile_names_are_shown_as_text(opened):
    browser = opened("compared")
    assert browser.run("return document.querySelectorAll('[onmouseover]').length") == 0
    legends = browser.run("return [...document.querySelectorAll('.legendtext')].map(one => one.textContent)")
    assert any(text.startswith("<b onmouseover=") for text in legends)


def test_a_figure_that_cannot_be_drawn_says_so_and_keeps_its_table(opened):
    browser = opened("undrawn")
    texts = browser.run("return [...document.querySelectorAll('.plot')].map(one => one.textContent)")
    assert len(texts) == 10
    assert all("could not be drawn; its data is in the table below" in text and "no canvas" in text for text in texts)
    assert browser.run("return [...document.querySelectorAll('.zoom')].every(one => !one.checkVisibility())")
    assert browser.run("return document.querySelectorAll('figure table').length") == 10
    assert browser.log("browser") == []


def luminance(colour):
    numbers = [float(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in numbers]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_text_is_readable_in_light_and_dark(opened):
    browser = opened("compared")
    seen = []
    for dark in (False, True):
        browser.dark(dark)
        browser.until(f"matchMedia('(prefers-color-scheme: dark)').matches == {json.dumps(dark)}")
        browser.run("return Promise.all([...document.querySelectorAll('.plot')].map(one => Plotly.relayout(one, {})))")
        paper, ink, tick = browser.run(
            """const fill = one => getComputedStyle(document.querySelector(one));
            return [fill('body').backgroundColor, fill('body').color, fill('.xtick text').fill]"""
        )
        for text in (ink, tick):
            low, high = sorted((luminance(paper), luminance(text)))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (dark, paper, text)
        seen.append(paper)
    assert seen[0] != seen[1]
