"""OpenRLHF's command line from a recipe's settings, and its check by OpenRLHF's own parser in this process.

OpenRLHF builds its parser inside ``if __name__ == "__main__":``, so nothing can call it. That block is run as it
stands, from the installed file: up to ``train(args)`` it needs nothing but the standard library, so neither Ray, torch
nor flash-attn has to be there.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import io
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from metronome.errors import ConfigurationError, MetronomeError
from metronome_openrlhf.arguments import value_of
from metronome_openrlhf.config import arrange
from metronome_openrlhf.cpu import arguments as cpu_arguments
from metronome_openrlhf.flags import PREFIX, check, take
from metronome_openrlhf.host import VERSIONS
from metronome_openrlhf.paths import check_named, check_paths
from metronome_patches.ledger import require_host

_PLAIN = re.compile(r"[A-Za-z_/.][A-Za-z0-9_/.\-]*")
_WORDS = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}


def flags_of(args: Mapping[str, Any], block: Mapping[str, Any]) -> list[str]:
    """OpenRLHF's flags and values, then ours.

    Raises ConfigurationError for a value that no flag takes.
    """
    return [
        *(word for key, value in args.items() for word in _flag(key, value)),
        *(f"{PREFIX}{key}" if value is True else f"{PREFIX}{key}={_yaml(value)}" for key, value in block.items()),
    ]


def _flag(key: str, value: Any) -> list[str]:
    flag = f"--{key}"
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    if isinstance(value, list | tuple):
        return [flag, *map(str, value)]
    if isinstance(value, Mapping):
        raise ConfigurationError(
            "a flag of OpenRLHF's takes no mapping", found=dict(value), where=f"args.{key}", remedy="a value or a list"
        )
    text = str(value)
    return [f"{flag}={text}"] if text.startswith("-") else [flag, text]


def _yaml(value: Any) -> str:
    """A value as ``flags.take`` reads it back; text that could be something else is quoted."""
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def openrlhf_folder() -> Path | None:
    """Where the installed OpenRLHF lies, found without importing it; None where it isn't."""
    found = find_spec("openrlhf")
    if found is None or not found.submodule_search_locations:
        return None
    return Path(next(iter(found.submodule_search_locations)))


@dataclass(frozen=True)
class Origin:
    """Where flags come from, for errors: a recipe's ``args``, or the command line where ``recipe`` is None."""

    recipe: str | None

    @property
    def flags(self) -> str:
        """What OpenRLHF refuses."""
        return "these flags" if self.recipe is None else "the recipe"

    def place(self, key: str = "") -> str:
        """Where ``key`` stands."""
        if self.recipe is None:
            return f"--{key}" if key else "the command line"
        return f"{self.recipe}: args" + (f".{key}" if key else "")

    def setting(self, key: str, value: Any) -> str:
        """``key`` with a value, as it is written there."""
        return f"--{key} {value}" if self.recipe is None else f"{key}: {value}"


def validate(flags: Sequence[str], folder: Path, where: str) -> list[str]:
    """What OpenRLHF's main says about a recipe's ``flags``, and what we set besides, as lines to print.

    Raises ConfigurationError for a flag that OpenRLHF doesn't have, and for what its main or we refuse.
    """
    return _validated(flags, folder, Origin(where))[1]


def check_typed(flags: Sequence[str], folder: Path) -> list[str]:
    """Looks at flags that a user typed before anything is imported or started; returns lines to print.

    Raises ConfigurationError as ``validate``, and for a path that isn't there. Where RAY_ADDRESS names a running Ray,
    a line says so instead: its nodes may have it.
    """
    args, _ = _validated(flags, folder, Origin(None))
    return check_paths(partial(value_of, args), bool(os.environ.get("RAY_ADDRESS")))


def print_help(folder: Path) -> None:
    """Prints OpenRLHF's own help.

    Raises ConfigurationError if its main isn't the one that we know.
    """

    class Parser(argparse.ArgumentParser):
        def __init__(self) -> None:
            super().__init__(prog="python -m metronome_openrlhf")

        def parse_args(self, *_: Any) -> NoReturn:  # type: ignore[override]
            self.print_help()
            raise _Printed

    with contextlib.suppress(_Printed):
        _run_main(folder, Parser, lambda flat: flat, [])


class _Printed(Exception):
    """The help is out."""


def _validated(flags: Sequence[str], folder: Path, origin: Origin) -> tuple[Any, list[str]]:
    """OpenRLHF's arguments as its training would get them, and lines to print."""
    require_host("openrlhf", VERSIONS, "the adapter")
    block, rest = take(flags)
    notes: list[str] = []
    cpu = block.pop("cpu", False)
    check(block, cpu)
    device = "cpu" if cpu else "npu" if find_spec("torch_npu") else "cuda"  # as the launcher chooses

    def hierarchize(flat: argparse.Namespace) -> Any:
        args = _nested(folder, flat)
        check_named(partial(value_of, args))
        if device == "cpu":
            notes.extend(cpu_arguments.arrange(args))
        if block:
            notes[:0] = arrange(args, block, device)
        return args

    trained: list[Any] = []
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            _run_main(folder, _parser(rest, origin), hierarchize, trained)
    except MetronomeError:
        raise
    except Exception as error:
        message = str(error) if isinstance(error, AssertionError) and str(error) else f"{type(error).__name__}: {error}"
        raise ConfigurationError(
            f"OpenRLHF refuses {origin.flags}: {message.rstrip('.')}",
            where=origin.place(),
            remedy="change the flag it names",
        ) from None
    if not trained:
        raise _other_main(folder)
    _check_devices(trained[0], origin)
    return trained[0], [*(f"OpenRLHF: {line}" for line in said.getvalue().splitlines() if line), *notes]


def _parser(rest: Sequence[str], origin: Origin) -> type[argparse.ArgumentParser]:
    """A parser of ``rest`` whose errors are ours; a recipe's flags must be written out."""

    class Parser(argparse.ArgumentParser):
        def __init__(self) -> None:
            super().__init__(add_help=False, allow_abbrev=origin.recipe is None)

        def parse_args(self, *_: Any) -> argparse.Namespace:  # type: ignore[override]
            return super().parse_args(list(rest))

        def error(self, message: str) -> NoReturn:
            flags = [flag for action in self._actions for flag in action.option_strings]
            unknown = message.partition("unrecognized arguments: ")[2].split()
            close = difflib.get_close_matches(unknown[0], flags, n=1, cutoff=0.5) if unknown else []
            raise ConfigurationError(
                f"OpenRLHF's parser refuses {origin.flags}: {message}",
                where=origin.place(),
                remedy=f"use {close[0]!r}"
                if close
                else "python -m metronome_openrlhf --help lists every flag"
                if unknown
                else "give the value that this flag takes",
            )

    return Parser


def _run_main(folder: Path, parser: type[argparse.ArgumentParser], hierarchize: Any, trained: list[Any]) -> None:
    """Runs the body of OpenRLHF's main with ``parser``; what it would train with is appended to ``trained``."""
    path = folder / "cli" / "train_ppo_ray.py"
    imports, body = _main(path)
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(ast.Module(imports, []), str(path), "exec"), space)
    space |= {
        "argparse": SimpleNamespace(**{**vars(argparse), "ArgumentParser": parser}),
        "hierarchize": hierarchize,
        "train": trained.append,
    }
    exec(compile(ast.Module(body, []), str(path), "exec"), space)


def _main(path: Path) -> tuple[list[ast.stmt], list[ast.stmt]]:
    """The file's imports of the standard library, and its main block without the import of ``hierarchize``."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        raise _other_main(path.parent.parent) from None
    imports = [one for one in tree.body if isinstance(one, ast.Import | ast.ImportFrom) and _standard(one)]
    blocks = [one for one in tree.body if isinstance(one, ast.If) and ast.unparse(one.test) == "__name__ == '__main__'"]
    body = [one for block in blocks for one in block.body]
    kept = [one for one in body if not (isinstance(one, ast.ImportFrom) and one.module == "openrlhf.utils.config")]
    if len(kept) != len(body) - 1:
        raise _other_main(path.parent.parent)
    return list(imports), kept


def _standard(one: ast.Import | ast.ImportFrom) -> bool:
    names = [one.module or ""] if isinstance(one, ast.ImportFrom) else [name.name for name in one.names]
    return all(name.partition(".")[0] in sys.stdlib_module_names for name in names)


def _nested(folder: Path, flat: argparse.Namespace) -> Any:
    """OpenRLHF's ``hierarchize``, loaded from its file: its package would import torch, and more."""
    path = folder / "utils" / "config.py"
    spec = spec_from_file_location("metronome_openrlhf_hierarchize", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise _other_main(folder)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.hierarchize(flat)


def _other_main(folder: Path) -> ConfigurationError:
    return ConfigurationError(
        "OpenRLHF's main isn't the one that metronome was written for",
        found=str(folder / "cli" / "train_ppo_ray.py"),
        where="openrlhf",
        remedy=f"pip install 'openrlhf{VERSIONS}'",
    )


def _check_devices(args: Any, origin: Origin) -> None:
    """What OpenRLHF's ``train`` asserts once Ray has started (cli/train_ppo_ray.py of 0.11.2)."""
    actors = args.actor.num_nodes * args.actor.num_gpus_per_node
    if (args.train.colocate_all or args.train.colocate_actor_ref) and args.algo.kl.init_coef > 0:
        found = (args.ref.num_nodes, args.ref.num_gpus_per_node)
        if found != (args.actor.num_nodes, args.actor.num_gpus_per_node):
            raise ConfigurationError(
                "the reference model shares the actor's devices and has others",
                found=f"{found[0]} x {found[1]}",
                where=origin.place("ref"),
                remedy=origin.setting("ref.num_nodes", args.actor.num_nodes)
                + ", "
                + origin.setting("ref.num_gpus_per_node", args.actor.num_gpus_per_node),
            )
    engines = (args.vllm.num_engines or 0) * args.vllm.tensor_parallel_size
    if args.train.colocate_all and not args.train.async_enable and engines not in (0, actors):
        raise ConfigurationError(
            "engines that share the actor's devices must be as many",
            found=f"{engines} for {actors}",
            where=origin.place("vllm.num_engines"),
            remedy=origin.setting("vllm.num_engines", actors // args.vllm.tensor_parallel_size),
        )
