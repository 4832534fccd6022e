"""docs/papers.md has what the recipes and their index say; this file as a program writes its tables."""

from __future__ import annotations

import re
from pathlib import Path

from metronome.recipe_index import Entry, entries

PAGE = Path(__file__).parents[2] / "docs" / "papers.md"
BEGIN, END = "<!-- recipes: written by tests/unit/test_papers_page.py -->", "<!-- end of recipes -->"


def table(found: list[Entry]) -> str:
    """Row of a paper -> recipes -> what was run of each; recipes without a row apart."""
    rows: dict[tuple[str, str], list[Entry]] = {}
    for one in found:
        if one.row is not None:
            papers = ", ".join(re.findall(r"\d{4}\.\d{5}", one.source or ""))
            rows.setdefault((papers, one.row), []).append(one)
    lines = ["| arXiv | row | recipe, device, status |", "| --- | --- | --- |"]
    for (papers, row), recipes in sorted(rows.items(), key=lambda pair: (len(pair[0][0]), pair[0])):
        said = "<br>".join(f"`{one.recipe}`, {one.device}, {one.status}" for one in recipes)
        lines.append(f"| {papers} | {row} | {said} |")
    lines += ["", "Recipes of the local host, which no paper has:", ""]
    lines += ["| what it is | recipe, device, status |", "| --- | --- |"]
    for one in found:
        if one.row is None:
            what = one.description.replace("<", "&lt;")
            lines.append(f"| {what} | `{one.recipe}`, {one.device}, {one.status} |")
    return "\n".join(lines)


def written(page: str) -> str:
    """``page`` with the tables of the recipes as they are."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table(entries())}\n\n{END}{after}"


def test_the_page_has_every_recipe_with_its_row_and_status() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page.count(BEGIN) == page.count(END) == 1
    assert page == written(page), "run python tests/unit/test_papers_page.py"
    for one in entries():
        assert page.count(f"`{one.recipe}`, {one.device}, {one.status}") == 1


def test_another_status_is_noticed() -> None:
    page = PAGE.read_text(encoding="utf-8")
    changed = page.replace("8 GPUs, needs hardware", "8 GPUs, shown here")
    assert changed != page
    assert changed != written(changed)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
