"""The local host's page and its schema are alike: every key, every default, every metric."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from metronome_local.recipe import (
    Arithmetic,
    Checkpoints,
    Dataset,
    Evaluation,
    Lora,
    Machine,
    Model,
    ReasoningGym,
    Recipe,
    Sampling,
    Section,
    Training,
)

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/local.md"
RECORD = ROOT / "adapters/metronome_local/record.py"
SECTIONS: dict[str, type[BaseModel]] = {
    "recipe": Recipe,
    "model": Model,
    "model.lora": Lora,
    "task (arithmetic)": Arithmetic,
    "task (reasoning_gym)": ReasoningGym,
    "task (dataset)": Dataset,
    "sampling": Sampling,
    "training": Training,
    "evaluation": Evaluation,
    "machine": Machine,
    "checkpoints": Checkpoints,
}
BLOCKS = {"model", "task", "sampling", "training", "evaluation", "machine", "checkpoints", "metronome"}
REQUIRED = "required"


def rows(text: str, heading: str) -> list[list[str]]:
    """The cells of the table under ``heading``, without its head."""
    _, found, after = text.partition(f"\n{heading}\n")
    assert found, f"no heading {heading!r}"
    part = re.split(r"\n##", after, maxsplit=1)[0]
    return [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in part.splitlines() if line.startswith("| `")
    ]


def documented(text: str, section: str) -> dict[str, Any]:
    """Key -> default as the page has it."""
    found = {}
    for key, default, meaning in rows(text, f"### {section}"):
        assert len(meaning) > 5, f"{section}: {key} has no meaning"
        found[key.strip("`")] = default if default == REQUIRED else yaml.safe_load(default.strip("`"))
    return found


def defaults(model: type[BaseModel]) -> dict[str, Any]:
    """Key -> default as the schema has it; the recipe's blocks have sections of their own."""
    found: dict[str, Any] = {}
    for key, field in model.model_fields.items():
        if model is Recipe and key in BLOCKS:
            continue
        value = field.get_default(call_default_factory=True)
        plain = list(value) if isinstance(value, tuple) else value
        found[key] = REQUIRED if value is PydanticUndefined else plain
    return found


@pytest.mark.parametrize("section", SECTIONS)
def test_every_recipe_key_is_documented_with_its_default(section: str) -> None:
    page = documented(PAGE.read_text(encoding="utf-8"), section)
    schema = defaults(SECTIONS[section])
    assert page == schema
    assert list(page) == list(schema)  # in the same order


def test_every_block_of_a_recipe_has_a_section() -> None:
    headings = re.findall(r"^### (.+)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert headings == list(SECTIONS)
    blocks = {name.partition(".")[0].partition(" ")[0] for name in SECTIONS} - {"recipe"} | {"metronome"}
    assert blocks == set(BLOCKS)
    assert set(Recipe.model_fields) >= set(BLOCKS)
    assert set(Section.__subclasses__()) == set(SECTIONS.values())


@pytest.mark.parametrize(
    ("section", "before", "after"),
    [
        ("sampling", "| `slots` | `32` |", "| `slots` | `16` |"),
        ("training", "| `warmup` | `0` |", "| `warm_up` | `0` |"),
        ("task (dataset)", "| `path` | required |", "| `path` | `data.jsonl` |"),
        ("machine", "| `pin` | `true` | bind each process to its own cores where there are enough |\n", ""),
    ],
    ids=["changed default", "unknown key", "required key", "missing key"],
)
def test_a_page_that_differs_from_the_schema_is_noticed(section: str, before: str, after: str) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert before in text
    assert documented(text.replace(before, after), section) != defaults(SECTIONS[section])


def written(*functions: str) -> set[str]:
    """The keys of the records that functions of record.py return."""
    tree = ast.parse(RECORD.read_text(encoding="utf-8"))
    bodies = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name in functions]
    assert len(bodies) == len(functions)
    dictionaries = [n for body in bodies for n in ast.walk(body) if isinstance(n, ast.Dict)]
    return {key.value for one in dictionaries for key in one.keys if isinstance(key, ast.Constant)}


def test_every_metric_of_a_period_is_explained_and_no_other() -> None:
    table = rows(PAGE.read_text(encoding="utf-8"), "## Metrics")
    explained = {name for cells in table for name in re.findall(r"`([^`]+)`", cells[0])}
    assert explained - {"loss/...", "group/..."} == written("period_record", "_counters")
    assert all(len(cells[1]) > 10 for cells in table)


def test_every_field_of_a_trained_prompt_is_named() -> None:
    text = PAGE.read_text(encoding="utf-8").partition("`groups.jsonl` has")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", text)) == written("trained_record")
