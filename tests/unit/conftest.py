"""The core's tests run without torch too: files that import it are left out where it isn't installed."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

HEAVY = {"torch", "transformers"}
MISSING = {name for name in HEAVY if find_spec(name) is None}


def imports_at_top(path: Path) -> set[str]:
    """The root packages that the module at ``path`` imports when it is imported itself."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names


collect_ignore = [
    path.name for path in sorted(Path(__file__).parent.glob("test_*.py")) if imports_at_top(path) & MISSING
]


def pytest_report_header() -> str:
    """Says what was left out and why."""
    if not collect_ignore:
        return "core tests: all files"
    return f"core tests: without {', '.join(sorted(MISSING))}: left out {', '.join(collect_ignore)}"
