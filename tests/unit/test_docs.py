"""Documentation stands beside the code: every hook, every option, every changelog fragment."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from metronome import contracts, hookspecs, recipes
from metronome.plugins import Offered, offers, plugin_manager
from metronome.settings import SELECTORS, Settings

ROOT = Path(__file__).parents[2]
HOOKS = ROOT / "docs/hooks.md"
PLUGIN_PAGE = ROOT / "docs/plugin_example.md"
OPTIONS = ROOT / "docs/options.md"
EXAMPLE = ROOT / "tests/thirdparty"
SHIPPED = ("periodic", "a3po", "shared_prompt", "sagc")
CONTRACTS = {
    "rollout_source": contracts.RolloutSource,
    "policy_loss": contracts.PolicyLoss,
    "attention": contracts.AttentionBackend,
    "group_controller": contracts.GroupController,
}
RECORDS = [one for one in vars(contracts).values() if dataclasses.is_dataclass(one)]
HOOK_NAMES = [name for name, value in vars(hookspecs).items() if hasattr(value, "metronome_spec")]


def shipped() -> list[Offered]:
    return offers(plugin_manager({"METRONOME_LOAD_PLUGINS": ",".join(SHIPPED)}))


def signature(hook: str) -> str:
    return f"{hook}{inspect.signature(getattr(hookspecs, hook))}".replace("'", "")


def section(text: str, heading: str) -> str:
    """What stands under ``heading`` up to the next heading of its level or above."""
    level = len(heading) - len(heading.lstrip("#"))
    _, found, after = f"\n{text}".partition(f"\n{heading}\n")
    assert found, f"no heading {heading!r}"
    return re.split(rf"\n#{{1,{level}}} ", after, maxsplit=1)[0]


def rows(text: str) -> Iterator[list[str]]:
    """The cells of the tables in ``text``, headings and rules left out."""
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    for line in lines:
        yield [cell.strip() for cell in line.strip("|").split(" | ")]


def test_there_are_five_hooks() -> None:
    assert set(HOOK_NAMES) == {*SELECTORS.values(), "describe"}


@pytest.mark.parametrize("hook", HOOK_NAMES)
def test_every_hook_has_a_heading_with_its_exact_signature(hook: str) -> None:
    assert f"\n## `{signature(hook)}`\n" in HOOKS.read_text(encoding="utf-8")


def members(contract: type) -> set[str]:
    """The attributes of a contract, and its methods as they are called: parameters and defaults without types."""
    found = set(contract.__annotations__)
    for name, value in vars(contract).items():
        if isinstance(value, types.FunctionType) and (name == "__call__" or not name.startswith("_")):
            parameters = list(inspect.signature(value).parameters.values())[1:]
            bare = [one.replace(annotation=inspect.Parameter.empty) for one in parameters]
            found.add(f"{name}{inspect.Signature(bare)}".replace(" ", ""))
    return found


def documented_members(page: str, hook: str) -> set[str]:
    """What stands in the first cells of the hook's table."""
    table = [row[0] for row in rows(section(page, f"## `{signature(hook)}`"))]
    return {one.replace(" ", "") for cell in table for one in re.findall(r"`([^`]+)`", cell)}


@pytest.mark.parametrize("hook", CONTRACTS)
def test_every_member_of_a_contract_is_in_its_hook_s_table_and_nothing_else(hook: str) -> None:
    assert documented_members(HOOKS.read_text(encoding="utf-8"), hook) == members(CONTRACTS[hook])


def test_a_contract_s_member_that_the_page_lacks_is_noticed() -> None:
    page = HOOKS.read_text(encoding="utf-8")
    for gone in ("`prompts(rollout_budget, multiple=1)`", ", *, window=None, sinks=None", "`keeps_proximal`"):
        assert gone in page
        changed = page.replace(gone, "")
        assert any(documented_members(changed, hook) != members(CONTRACTS[hook]) for hook in CONTRACTS)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_every_field_of_a_record_is_documented_with_its_default(record: Any) -> None:
    chapter = section(HOOKS.read_text(encoding="utf-8"), f"### {record.__name__}")
    table = {field.strip("`"): default for field, default, meaning in rows(chapter) if len(meaning) > 5}
    assert list(table) == [field.name for field in dataclasses.fields(record)]
    for field in dataclasses.fields(record):
        made = field.default_factory() if callable(field.default_factory) else field.default
        wanted = "required" if made is dataclasses.MISSING else made
        written = table[field.name]
        assert (written if written == "required" else yaml.safe_load(written.strip("`"))) == wanted


@pytest.mark.parametrize("hook", HOOK_NAMES)
def test_every_hook_has_a_sentence_in_its_specification(hook: str) -> None:
    assert inspect.getdoc(getattr(hookspecs, hook))


@pytest.mark.parametrize("hook", HOOK_NAMES)
def test_every_hook_is_named_by_a_test(hook: str) -> None:
    tests = [path for path in (ROOT / "tests").rglob("test_*.py") if path.name != Path(__file__).name]
    assert any(re.search(rf"\b{hook}\b", path.read_text(encoding="utf-8")) for path in tests)


@pytest.mark.parametrize(
    "path", [*sorted(EXAMPLE.rglob("*.py")), EXAMPLE / "pyproject.toml"], ids=lambda path: path.name
)
def test_the_documented_example_is_the_tested_package(path: Path) -> None:
    if path.name == "__init__.py":
        assert len(path.read_text(encoding="utf-8").splitlines()) == 1
        return
    language = "python" if path.suffix == ".py" else "toml"
    name, code = path.relative_to(EXAMPLE).as_posix(), path.read_text(encoding="utf-8")
    block = f"`{name}`\n\n```{language}\n{code}```\n"
    assert block in PLUGIN_PAGE.read_text(encoding="utf-8")


def test_every_contract_test_that_the_page_names_exists() -> None:
    names = re.findall(r"metronome\.testing\.(\w+)\.(\w+)", HOOKS.read_text(encoding="utf-8"))
    assert len(names) == len(SELECTORS)
    for module, function in names:
        source = (ROOT / "plugins/metronome/testing" / f"{module}.py").read_text(encoding="utf-8")
        assert f"def {function}(" in source


def test_the_selectors_table_is_the_settings_and_the_shipped_names() -> None:
    every = shipped()
    table = list(rows(OPTIONS.read_text(encoding="utf-8").partition("\n## ")[0]))
    assert [row[0].strip("`") for row in table] == list(SELECTORS)
    for selector, default, names in table:
        key = selector.strip("`")
        offered = {one.offer.name for one in every if one.offer.hook == SELECTORS[key]}
        assert default == f"`{getattr(Settings(), key)}`"
        assert set(re.findall(r"`(\w+)`", names)) == offered


def plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


def documented(selector: str, name: str) -> dict[str, Any]:
    chapter = section(OPTIONS.read_text(encoding="utf-8"), f"## {selector}")
    found = {}
    for option, default, meaning in rows(section(chapter, f"### {name}")):
        assert len(meaning) > 10, f"{name}.{option} has no meaning"
        found[option.strip("`")] = yaml.safe_load(default.strip("`"))
    return found


def test_every_option_of_a_shipped_plugin_is_documented_with_its_default() -> None:
    selectors = {hook: selector for selector, hook in SELECTORS.items()}
    for one in shipped():
        offer = one.offer
        assert documented(selectors[offer.hook], offer.name) == plain(dict(offer.options)), offer.name


def test_every_shipped_plugin_is_documented_and_nothing_else() -> None:
    headings = re.findall(r"^### (\w+)$", OPTIONS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert sorted(headings) == sorted(one.offer.name for one in shipped())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("| `tau` | `2.0` |", "| `tau` | `2.5` |"),
        ("| `tau` | `2.0` |", "| `thau` | `2.0` |"),
        ("| `size` | `8` | G, rollouts per prompt, at least 2 |\n", ""),
    ],
    ids=["changed default", "unknown option", "missing option"],
)
def test_a_page_that_differs_from_the_code_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str
) -> None:
    text = OPTIONS.read_text(encoding="utf-8")
    assert before in text
    page = tmp_path / "options.md"
    page.write_text(text.replace(before, after), encoding="utf-8")
    monkeypatch.setitem(globals(), "OPTIONS", page)
    with pytest.raises(AssertionError):
        test_every_option_of_a_shipped_plugin_is_documented_with_its_default()


def dead_links(page: Path) -> list[str]:
    """The relative links of ``page`` that point to nothing; code blocks left out."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)[^)]*\)|^\[[^\]]+\]:\s*(\S+)", text, flags=re.MULTILINE)
    links = [(one or other).partition("#")[0] for one, other in targets]
    local = [link for link in links if link and not re.match(r"[a-z]+:", link)]
    return [link for link in local if not (page.parent / link).exists()]


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_relative_link_points_to_a_file(page: Path) -> None:
    assert dead_links(page) == []


def test_a_dead_link_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text('[a](page.md#part) [b](gone.md "title") [c](https://x.org/y)\n[d]: lost/\n`[e](code.md)`\n')
    assert dead_links(page) == ["gone.md", "lost/"]


@pytest.mark.parametrize("page", ["docs/adding_a_host.md", "CONTRIBUTING.md"])
@pytest.mark.parametrize("function", ["run", "compare"])
def test_a_host_s_functions_are_documented_as_they_are_called(page: str, function: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    [written] = re.findall(rf"^def {function}\(.*\) -> int: \.\.\.$", text, flags=re.MULTILINE)
    [defined] = [node for node in ast.parse(written).body if isinstance(node, ast.FunctionDef)]
    parameters = list(inspect.signature(getattr(recipes.Host, function)).parameters.values())[1:]
    assert [one.arg for one in defined.args.args] == [one.name for one in parameters if one.kind != one.KEYWORD_ONLY]
    assert [one.arg for one in defined.args.kwonlyargs] == [
        one.name for one in parameters if one.kind == one.KEYWORD_ONLY
    ]


def heading_anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", one).lower() for one in headings]
    return {re.sub(r"[\s]", "-", re.sub(r"[^\w\s-]", "", one).strip()) for one in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_to_a_heading_finds_it(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link, anchor in re.findall(r"\]\((?![a-z]+:)([^)#\s]*\.md|)#([^)\s]+)\)", text):
        assert anchor in heading_anchors(page.parent / link if link else page), f"{link}#{anchor}"


TECHNIQUES = ("periodic", "shared_prompt", "megatron", "a3po", "sagc")


@pytest.mark.parametrize("name", TECHNIQUES)
def test_a_technique_s_page_says_what_holds_it_and_when_it_doesn_t_help(name: str) -> None:
    page = (ROOT / f"docs/techniques/{name}.md").read_text(encoding="utf-8")
    assert len(section(page, "## When it doesn't help")) > 100
    held = section(page, "## What holds it")
    files = [ROOT / "docs/techniques" / one for one in re.findall(r"\]\(([^)]+\.py)\)", held)]
    assert files
    sources = "".join(path.read_text(encoding="utf-8") for path in files)
    named = re.findall(r"`(test_\w+)`", held)
    assert named
    assert [one for one in named if f"def {one}(" not in sources] == []


def test_changelog_fragments_are_named_by_issue_and_kind() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    kinds = set(re.findall(r'directory = "(\w+)"\nname', project))
    assert kinds >= {"feature", "bugfix"}
    for path in (ROOT / "docs/changelog").glob("*.md"):
        assert re.fullmatch(rf"\d+\.({'|'.join(sorted(kinds))})(\.\d+)?\.md", path.name), path.name
        assert path.read_text(encoding="utf-8").strip(), f"{path.name} is empty"
