"""The page of the planning commands and the cluster's schema are alike: every key, every default; and its counts."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from metronome.reproduce.catalogue import ROWS
from metronome.simulate.cluster import (
    Cluster,
    EmpiricalLengths,
    Engines,
    Failures,
    LawCurve,
    LognormalLengths,
    PointCurve,
    Trainer,
)
from metronome.simulate.policy import Policy

PAGE = Path(__file__).parents[2] / "docs/planning.md"
SECTIONS: dict[str, type[BaseModel]] = {
    "cluster": Cluster,
    "engines": Engines,
    "engines.decode (law)": LawCurve,
    "engines.decode (points)": PointCurve,
    "trainer": Trainer,
    "lengths (lognormal)": LognormalLengths,
    "lengths (empirical)": EmpiricalLengths,
    "failures": Failures,
    "policies": Policy,
}
BLOCKS = {
    "engines",
    "decode",
    "trainer",
    "lengths",
    "failures",
    "policies",
    "kind",
}  # sections, and what tells them apart
REQUIRED = "required"


def documented(text: str, section: str) -> dict[str, Any]:
    """Key -> default as the page has it."""
    _, found, after = text.partition(f"\n### {section}\n")
    assert found, f"no section {section!r}"
    table = {}
    for line in re.split(r"\n##", after, maxsplit=1)[0].splitlines():
        if line.startswith("| `"):
            key, default, meaning = (cell.strip() for cell in line.strip("|").split(" | "))
            assert len(meaning) > 5, f"{section}: {key} has no meaning"
            written = default.strip("`")
            fraction = re.fullmatch(r"\d+/\d+", written)
            table[key.strip("`")] = float(Fraction(written)) if fraction else yaml.safe_load(written)
    return table


def defaults(model: type[BaseModel]) -> dict[str, Any]:
    """Key -> default as the schema has it; SAGC's options, documented elsewhere, are what a file may leave out."""
    found: dict[str, Any] = {}
    for key, field in model.model_fields.items():
        if key in BLOCKS:
            continue
        value = field.get_default(call_default_factory=True)
        if isinstance(value, BaseModel):
            value = value.model_dump(exclude_unset=True)
        found[key] = REQUIRED if value is PydanticUndefined else value
    return found


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_of_a_cluster_is_documented_with_its_default(section: str) -> None:
    page, schema = documented(PAGE.read_text(encoding="utf-8"), section), defaults(SECTIONS[section])
    assert page == schema
    assert list(page) == list(schema)  # in the same order


def test_every_block_of_a_cluster_has_a_section() -> None:
    chapter = PAGE.read_text(encoding="utf-8").partition("\n## The keys of a cluster\n")[2]
    assert re.findall(r"^### (.+)$", chapter, flags=re.MULTILINE) == list(SECTIONS)
    named = {part for name in SECTIONS for part in name.partition(" ")[0].split(".")}
    assert named - {"cluster"} == BLOCKS - {"kind"}


@pytest.mark.parametrize(
    ("section", "before", "after"),
    [
        ("engines", "| `slots` | required |", "| `slots` | `32` |"),
        ("trainer", "| `forward_share` | `1/3` |", "| `forward_share` | `1/4` |"),
        ("policies", "| `proximal` | `none` |", "| `proxymal` | `none` |"),
        ("lengths (empirical)", "| `cap` | `null` |", "| `cup` | `null` |"),
    ],
    ids=["required key", "changed default", "unknown key", "missing key"],
)
def test_a_page_that_differs_from_the_clusters_schema_is_noticed(section: str, before: str, after: str) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert before in text
    assert documented(text.replace(before, after), section) != defaults(SECTIONS[section])


def test_what_the_papers_rows_need_is_counted_right() -> None:
    computed = [row for row in ROWS if row.compute is not None]
    torch, transformers, simpy = (
        sum(package in row.needs for row in computed) for package in ("torch", "transformers", "simpy")
    )
    said = (
        f"of the {len(computed)} rows that can be computed {torch} need torch "
        f"({transformers} of them transformers too) and {simpy} simpy"
    )
    assert said in " ".join(PAGE.read_text(encoding="utf-8").split())
    assert all("torch" in row.needs for row in computed if "transformers" in row.needs)
