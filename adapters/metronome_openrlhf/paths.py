"""Files and folders that OpenRLHF's flags name, looked for before Ray starts: there, a wrong one is a traceback."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from metronome.errors import ConfigurationError
from metronome.recipes import near_file

_DATA = (".py", ".json", ".jsonl", ".csv", ".parquet", ".arrow")
"""Endings by which OpenRLHF reads a data set from a file (datasets/utils.py of 0.11.2)."""


def absent(value_of: Callable[[str], Any]) -> Iterator[tuple[str, str]]:
    """The flags, without dashes, that name what isn't on this machine, and the paths.

    Only what can't be anything else counts as a path: what begins with ``/``, ``~`` or ``.``, and files by their
    endings. Names of a hub, addresses and patterns are left alone.

    Args:
        value_of: the value of a flag.
    """
    for flag, path in _named(value_of):
        if path.startswith("~") or not Path(path).exists():
            yield flag, path


def check_paths(value_of: Callable[[str], Any], elsewhere: bool, where: str = "--{}", remedy: str = "") -> list[str]:
    """Raises ConfigurationError for the first path that isn't there; returns lines to print in place of that.

    Args:
        value_of: the value of a flag.
        elsewhere: whether workers may run on other machines than this, which may have it: a line says so then.
        where: the place shown in the error; ``{}`` stands for the flag.
        remedy: what to do where no name beside it is near.
    """
    agent = value_of("train.agent_func_path")
    if agent and not str(agent).endswith(".py"):
        raise ConfigurationError(
            "OpenRLHF reads an agent from a Python file",
            found=agent,
            where=where.format("train.agent_func_path"),
            remedy="a file whose name ends in .py",
        )
    notes = []
    for flag, path in absent(value_of):
        if elsewhere and not path.startswith("~"):
            notes.append(f"--{flag} {path} isn't on this machine")
            continue
        raise ConfigurationError(
            "OpenRLHF doesn't expand ~" if path.startswith("~") else "no such file or folder",
            found=path,
            where=where.format(flag),
            remedy=os.path.expanduser(path)
            if path.startswith("~")
            else near_file(Path(path)) or remedy or "a path that exists",
        )
    return notes


def check_named(value_of: Callable[[str], Any]) -> None:
    """Raises ConfigurationError where there is no model, no data or no reward: OpenRLHF has a default for none."""
    rewards = ("reward.remote_url", "reward.model_name_or_path", "train.agent_func_path")
    for what, flags in (
        ("no model to train", ("actor.model_name_or_path",)),
        ("no prompts to train with", ("data.prompt_dataset",)),
        ("nothing gives rewards", rewards),
    ):
        if not any(value_of(flag) for flag in flags):
            remedy = " or ".join(f"--{flag}" for flag in flags)
            raise ConfigurationError(what, where=f"--{flags[0]}", remedy=remedy)


def _named(value_of: Callable[[str], Any]) -> Iterator[tuple[str, str]]:
    """Every flag that is read, and each path in it."""
    agent, rewards = _words(value_of("train.agent_func_path")), _words(value_of("reward.remote_url"))
    for path in agent:
        yield "train.agent_func_path", path
    for path in () if agent else rewards:
        if _local(path) or (path.endswith(".py") and "://" not in path):
            yield "reward.remote_url", path
    models = ["actor.model_name_or_path"]
    if value_of("algo.advantage.estimator") in (None, "gae"):
        models.append("critic.model_name_or_path")
    if not (agent or rewards):
        models.append("reward.model_name_or_path")
    for flag in models:
        name = value_of(flag)
        if isinstance(name, str) and _local(name):
            yield flag, name
    for flag in ("data.prompt_dataset", "eval.dataset"):
        for word in _words(value_of(flag)):
            path = word.partition("@")[0].strip()
            ends = os.path.splitext(path)[1] in _DATA
            if (_local(path) or ends) and "://" not in path and not set(path) & set("*?["):
                yield flag, path


def _local(path: str) -> bool:
    return path.startswith(("/", "~", "."))


def _words(value: Any) -> list[str]:
    """The parts of a value between commas; OpenRLHF's main makes a list of some."""
    parts = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else []
    return [str(part).strip() for part in parts if str(part).strip()]
