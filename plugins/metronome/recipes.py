"""Recipes: one YAML mapping per run, ``key=value`` overrides over it, and the host that it names.

The core reads the file and finds the host; every key but ``host`` is validated by the host's own schema.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Hashable, Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Protocol, cast

import yaml

from metronome.errors import ConfigurationError, nearest

HOSTS = "metronome.hosts"
"""Entry-point group of the hosts: name -> module with the two functions of ``Host``."""


class Host(Protocol):
    """What a host's module offers to the command line."""

    def run(
        self,
        recipe: dict[str, Any],
        *,
        where: str,
        output: str | None,
        resume: str | None,
        dry_run: bool,
        smoke: bool,
    ) -> int:
        """Validates ``recipe`` and runs it; returns the exit code. ``where`` names the recipe in errors.

        ``smoke`` asks for a short run with a tiny model on a CPU; a host without such runs refuses it.
        """

    def compare(self, recipe: dict[str, Any], vary: tuple[str, list[str]], *, where: str, output: str | None) -> int:
        """Runs the same work once per value of the key ``vary[0]``; returns the exit code."""


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """The recipe in the YAML file ``path`` with ``overrides`` applied in their order.

    Raises ConfigurationError for a file that can't be read, isn't YAML, repeats a key or isn't a mapping, for
    an override that doesn't fit, and for a host that isn't installed.
    """
    where = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigurationError(
            "no such recipe",
            found=where,
            remedy=near_file(Path(path)) or "give the path of a YAML file, such as recipes/local/demo.yaml",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"the recipe can't be read: {error}", found=where, remedy="give a readable YAML file in UTF-8"
        ) from None
    loaded = parse_yaml(text, where)
    if not isinstance(loaded, dict):
        raise ConfigurationError(
            "a recipe must be a mapping",
            found=type(loaded).__name__ if loaded is not None else "an empty file",
            where=where,
            remedy="start it with host: local",
        )
    recipe: dict[str, Any] = loaded
    for one in overrides:
        recipe = override(recipe, one, where)
    host_of(recipe, where)
    return recipe


def near_file(path: Path) -> str | None:
    """A remedy that names the file or folder beside ``path`` whose name is nearest to its own; None if none is near."""
    try:
        names = sorted(one.name for one in path.parent.iterdir())
    except OSError:
        return None
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.6)
    return f"use {str(path.with_name(close[0]))!r}" if close else None


def override(recipe: Mapping[str, Any], assignment: str, where: str = "recipe") -> dict[str, Any]:
    """A copy of ``recipe`` with ``a.b.c=value`` set; the value is YAML, missing mappings are made.

    Raises ConfigurationError for an assignment without ``=``, an empty part of the path, a value that isn't
    YAML, and a path that runs through something other than a mapping.
    """
    path, equals, value = assignment.partition("=")
    parts = path.strip().split(".")
    if not equals or not all(parts):
        raise ConfigurationError(
            "an override must read key=value", found=assignment, where="the command line", remedy="a.b=value"
        )
    result = copy.deepcopy(dict(recipe))
    inner = result
    for depth, part in enumerate(parts[:-1], start=1):
        if inner.get(part) is None:
            inner[part] = {}
        inner = inner[part]
        if not isinstance(inner, dict):
            raise ConfigurationError(
                f"the override {assignment!r} runs through {'.'.join(parts[:depth])}, which isn't a mapping",
                found=inner,
                where=where,
                remedy=f"set {'.'.join(parts[:depth])} itself",
            )
    inner[parts[-1]] = parse_yaml(value, f"the override {assignment!r}")
    return result


def parse_vary(text: str) -> tuple[str, list[str]]:
    """``key=a,b`` as ``("key", ["a", "b"])``; commas inside brackets, braces and quotes belong to a value.

    Raises ConfigurationError unless there are at least two values, all different and none empty.
    """
    key, equals, rest = text.partition("=")
    values, depth, quote = [""], 0, ""
    for sign in rest:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "\"'":
            quote = sign
        elif sign in "[{":
            depth += 1
        elif sign in "]}":
            depth -= 1
        if sign == "," and not depth and not quote:
            values.append("")
        else:
            values[-1] += sign
    values = [value.strip() for value in values]
    if not equals or not key.strip() or not all(values) or not len(values) == len(set(values)) >= 2:
        raise ConfigurationError(
            "--vary takes one key and at least two different values",
            found=text,
            where="the command line",
            remedy="--vary metronome.rollout_source=synchronous,periodic",
        )
    return key.strip(), values


def host_of(recipe: Mapping[str, Any], where: str) -> str:
    """The name under ``host``; raises ConfigurationError if it's missing or nobody installed such a host."""
    name = recipe.get("host")
    known = host_points()
    if not isinstance(name, str):
        raise ConfigurationError(
            "a recipe must name its host",
            found=name,
            where=f"{where}: host",
            remedy=f"host: {' | '.join(known) or 'local'}",
        )
    if name not in known:
        raise ConfigurationError("no such host", found=name, where=f"{where}: host", remedy=nearest(name, known))
    return name


def host_points() -> dict[str, EntryPoint]:
    """The installed hosts by name, whether or not what they need is installed too."""
    return {point.name: point for point in sorted(entry_points(group=HOSTS), key=lambda point: point.name)}


def load_host(name: str) -> Host:
    """The module of the host called ``name``; raises ConfigurationError with the extra that is missing.

    An ImportError from within the host's own package or the core is a fault, not a missing extra, and goes
    through as it is.
    """
    point = host_points()[name]
    distribution = point.dist.name if point.dist else "metronome-rl"
    try:
        module = point.load()
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("metronome", point.module.partition(".")[0]):
            raise
        raise ConfigurationError(
            f"the host {name!r} needs a package that isn't installed",
            found=missing,
            where=point.value,
            remedy=f'pip install "{distribution}[{name}]"',
        ) from error
    return cast(Host, module)


# --- YAML -----------------------------------------------------------------------------------------


def parse_yaml(text: str, where: str) -> Any:
    """``text`` as YAML; repeated keys are refused, ``2e-5`` is a number (PyYAML alone reads a string).

    Raises ConfigurationError with the line and column of what doesn't parse.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{where}, line {mark.line + 1}, column {mark.column + 1}" if mark else where
        raise ConfigurationError(
            f"not valid YAML: {error.problem or error.context}", where=place, remedy="mend that line"
        ) from None
    except yaml.YAMLError as error:
        raise ConfigurationError(f"not valid YAML: {error}", where=where, remedy="mend the file") from None


class _Loader(yaml.SafeLoader):
    """YAML's safe loader with unique keys and numbers such as ``2e-5``."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """The mapping at ``node``; raises MarkedYAMLError for a key that stands twice."""
        seen: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            name = (key.tag, key.value)
            if name in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value!r} stands twice, first on line {seen[name]}",
                    problem_mark=key.start_mark,
                )
            seen[name] = key.start_mark.line + 1
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)
