"""The documentation site: every page has a place in it, links out of docs/ are mended, messages are the code's."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TROUBLES = DOCS / "troubleshooting.md"


def settings() -> dict[str, Any]:
    """mkdocs.yml; its tags of MkDocs' own are read as text."""

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_multi_constructor("!", lambda loader, suffix, node: suffix)
    found: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader=Loader)
    return found


def pages(entry: Any) -> list[str]:
    """The pages of a navigation entry, in order."""
    if isinstance(entry, str):
        return [entry]
    return [page for one in (entry.values() if isinstance(entry, dict) else entry) for page in pages(one)]


def test_every_page_has_one_place_in_the_navigation() -> None:
    found = pages(settings()["nav"])
    there = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md") if path.parent.name != "changelog"]
    assert sorted(found) == sorted(there)
    assert len(set(found)) == len(found)


def test_the_site_is_strict_and_asks_no_other_host_for_anything() -> None:
    found = settings()
    assert found["strict"] is True
    assert found["theme"]["font"] is False
    assert "repo_url" not in found  # material would ask its host for stars
    assert found["plugins"] == ["search"]
    assert all((DOCS / path).is_file() for path in found["extra_css"])
    assert "extra_javascript" not in found


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mkdocs_hooks", ROOT / "mkdocs_hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("before", "source", "after"),
    [
        ("[a](hooks.md#x) [b](#y) [c](https://x.org/z)", "", "[a](hooks.md#x) [b](#y) [c](https://x.org/z)"),
        (
            "see [the code](../plugins/x.py#L3).",
            "https://h/b/main",
            "see [the code](https://h/b/main/plugins/x.py#L3).",
        ),
        ("see [the code](../plugins/x.py).", "", "see the code (`plugins/x.py`)."),
        ("see [x.py](../plugins/x.py), [`x.py`](../plugins/x.py)", "", "see x.py, `x.py`"),
        (
            "[results](results) and [results](results/#verl)",
            "",
            "[results](results/README.md) and [results](results/README.md#verl)",
        ),
        (
            "`[e](../code.md)` and\n\n```python\n[f](../g.py)\n```\n",
            "",
            "`[e](../code.md)` and\n\n```python\n[f](../g.py)\n```\n",
        ),
        ("![a curve](learn.png)", "", "![a curve](learn.png)"),
    ],
    ids=["within", "to the repository", "as a path", "named by its text", "to a folder", "code", "image"],
)
def test_a_link_out_of_the_pages_is_mended(hooks: ModuleType, before: str, source: str, after: str) -> None:
    assert hooks.mended(before, "page.md", str(DOCS), source) == after


def test_a_link_of_a_page_in_a_folder_is_taken_from_there(hooks: ModuleType) -> None:
    assert hooks.mended("[x](../../tests/a.py)", "techniques/a3po.md", str(DOCS), "s") == "[x](s/tests/a.py)"
    assert (
        hooks.mended("[x](../results/README.md)", "techniques/a3po.md", str(DOCS), "s") == "[x](../results/README.md)"
    )


# --- troubleshooting ----------------------------------------------------------------------------------


def messages() -> set[str]:
    """Every text in the packages; what a format string fills in stands as an ellipsis, white space as one blank."""
    found = set()
    for folder in ("plugins", "adapters", "patches"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                text = spelled(node)
                if text is not None:
                    found.add(" ".join(text.split()))
    return found


def spelled(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    return None


def quoted(page: str) -> list[str]:
    return re.findall(r"^### `(.+)`$", page, flags=re.MULTILINE)


def missing(page: str) -> list[str]:
    every = messages()
    return [one for one in quoted(page) if not any(" ".join(one.split()) in text for text in every)]


def test_every_quoted_message_is_one_of_the_code_s() -> None:
    page = TROUBLES.read_text(encoding="utf-8")
    found = quoted(page)
    assert len(found) > 50
    assert len(set(found)) == len(found)
    assert missing(page) == []


def test_a_message_that_the_code_no_longer_has_is_noticed() -> None:
    assert missing("### `no such recipe`\n### `no such recipy`\n") == ["no such recipy"]


def test_every_entry_says_what_to_do() -> None:
    """Headings that follow one another share what comes after the last."""
    page = TROUBLES.read_text(encoding="utf-8")
    for part in re.split(r"^(?:### `.+`\n)+", page, flags=re.MULTILINE)[1:]:
        assert len(part.partition("\n## ")[0].strip()) > 40, part
