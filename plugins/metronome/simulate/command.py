"""``metronome simulate``: reads a cluster, simulates its policies, prints the table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from metronome.errors import ConfigurationError, nearest
from metronome.output import output_place, write_whole
from metronome.recipes import near_file, override, parse_yaml
from metronome.settings import parse_options
from metronome.simulate.cluster import Cluster
from metronome.simulate.model import simulate as simulate_policy
from metronome.simulate.policy import Policy
from metronome.simulate.split import best_split
from metronome.simulate.table import figures, print_figures

_MARK = '"simulated": true'  # stands in every output


def simulate(cluster: str, overrides: Sequence[str], *, out: str | None, as_json: bool) -> int:
    """Simulates each policy of ``cluster`` and searches the best split; prints a table, or JSON.

    Args:
        cluster: a YAML file, or the name of a shipped cluster.
        overrides: ``key=value``, set over the file.
        out: a file that takes the figures as JSON.
        as_json: print JSON instead of the table.

    Raises ConfigurationError for a file, key or value that can't be used, and before anything is simulated for an
    output that has no place or would replace another file than such figures.
    """
    loaded = load_cluster(cluster, overrides)
    target = None if out is None else output_place(out, _MARK, "simulated figures", "figures.json")
    outcomes = [simulate_policy(loaded, policy) for policy in loaded.policies]
    result = figures(cluster, loaded, outcomes, best_split(loaded))
    if target is not None:
        write_whole(target, json.dumps(result, indent=2) + "\n")
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        print_figures(result)
    return 0


def print_file(cluster: str, *, given: bool = False) -> int:
    """Prints the YAML of ``cluster`` as it is, comments included.

    Raises ConfigurationError for one that isn't there, and if keys or outputs were ``given``, which would do nothing.
    """
    if given:
        raise ConfigurationError(
            "--print shows a file as it is: KEY=VALUE, --out and --json do nothing beside it",
            where="metronome simulate --print",
            remedy="leave them out, or leave out --print",
        )
    print(_text(cluster)[0].rstrip("\n"))
    return 0


def shipped() -> list[str]:
    """Names of the shipped clusters."""
    folder = resources.files("metronome.simulate") / "clusters"
    return sorted(one.name.removesuffix(".yaml") for one in folder.iterdir() if one.name.endswith(".yaml"))


def load_cluster(name: str, overrides: Sequence[str] = ()) -> Cluster:
    """The cluster in the YAML file ``name``, or the shipped one of that name, with ``overrides`` applied.

    Raises ConfigurationError for a file that can't be read or isn't a mapping, an unknown name, and a wrong key or
    value.
    """
    text, folder = _text(name)
    values = parse_yaml(text, name)
    if not isinstance(values, dict):
        raise ConfigurationError(
            "a cluster must be a mapping",
            found=type(values).__name__ if values is not None else "an empty file",
            where=name,
            remedy="start from a shipped one: " + ", ".join(shipped()),
        )
    for one in overrides:
        values = override(values, one, name)
    policies = values.get("policies")
    if isinstance(policies, list):
        values["policies"] = [_policy(one, f"{name}.policies.{place}") for place, one in enumerate(policies)]
    lengths = values.get("lengths")
    if isinstance(lengths, dict) and isinstance(lengths.get("file"), str):
        values["lengths"] = {**lengths, "file": str(folder / lengths["file"])}
    return parse_options(Cluster, values, name)


def _policy(values: Any, where: str) -> Policy:
    if not isinstance(values, dict):
        raise ConfigurationError(
            "a policy must be a mapping", found=values, where=where, remedy="{source: periodic, shared_prompt: true}"
        )
    return parse_options(Policy, values, where)


def _text(name: str) -> tuple[str, Path]:
    """The YAML, and the folder from which its relative paths start."""
    path = Path(name)
    if name in shipped() and not path.is_file():
        text = (resources.files("metronome.simulate") / "clusters" / f"{name}.yaml").read_text(encoding="utf-8")
        return text, Path.cwd()
    try:
        return path.read_text(encoding="utf-8"), path.absolute().parent
    except FileNotFoundError:
        known = nearest(name, shipped())
        raise ConfigurationError(
            "no such cluster",
            found=name,
            where="metronome simulate",
            remedy=near_file(path) or f"{known}, or a YAML file",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"the cluster can't be read: {error}", found=name, remedy="give a readable YAML file in UTF-8"
        ) from None
