"""OpenRLHF's command line from a recipe's settings, and its check by OpenRLHF's own parser in this process.

OpenRLHF builds its parser inside ``if __name__ == "__main__":``, so nothing can call it. That block is run as it
stands, from the installed file: up to ``train(args)`` it needs nothing but the standard library, so neither Ray, torch
nor flash-attn has to be there.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from metronome.errors import ConfigurationError, MetronomeError, nearest
from metronome_openrlhf.config import arrange
from metronome_openrlhf.cpu import arguments as cpu_arguments
from metronome_openrlhf.flags import PREFIX, check, take
from metronome_openrlhf.host import VERSIONS
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


def validate(flags: Sequence[str], folder: Path, where: str) -> list[str]:
    """What OpenRLHF's main says about ``flags``, and what we set besides, as lines to print.

    Raises ConfigurationError for a flag that OpenRLHF doesn't have, and for what its main or we refuse.
    """
    require_host("openrlhf", VERSIONS, "the adapter")
    block, rest = take(flags)
    notes: list[str] = []
    cpu = block.pop("cpu", False)
    check(block, cpu)
    device = "cpu" if cpu else "npu" if find_spec("torch_npu") else "cuda"  # as the launcher chooses

    def hierarchize(flat: argparse.Namespace) -> Any:
        args = _nested(folder, flat)
        if device == "cpu":
            notes.extend(cpu_arguments.arrange(args))
        if block:
            notes.extend(arrange(args, block, device))
        return args

    trained: list[Any] = []
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            _run_main(folder, rest, where, hierarchize, trained)
    except MetronomeError:
        raise
    except Exception as error:
        message = str(error) if isinstance(error, AssertionError) and str(error) else f"{type(error).__name__}: {error}"
        raise ConfigurationError(
            f"OpenRLHF's main refuses the recipe: {message}", where=f"{where}: args", remedy="change the flag it names"
        ) from None
    if not trained:
        raise _other_main(folder)
    _check_devices(trained[0], where)
    return [*(f"OpenRLHF: {line}" for line in said.getvalue().splitlines() if line), *notes]


def _run_main(folder: Path, rest: Sequence[str], where: str, hierarchize: Any, trained: list[Any]) -> None:
    """Runs the body of OpenRLHF's main with ``rest``; what it would train with is appended to ``trained``."""

    class Parser(argparse.ArgumentParser):
        def __init__(self) -> None:
            super().__init__(add_help=False, allow_abbrev=False)

        def parse_args(self, *_: Any) -> argparse.Namespace:  # type: ignore[override]
            return super().parse_args(list(rest))

        def error(self, message: str) -> NoReturn:
            flags = [flag for action in self._actions for flag in action.option_strings]
            unknown = message.partition("unrecognized arguments: ")[2].split()
            raise ConfigurationError(
                f"OpenRLHF's parser refuses the recipe: {message}",
                where=f"{where}: args",
                remedy=nearest(unknown[0], flags) if unknown else "give the value that this flag takes",
            )

    path = folder / "cli" / "train_ppo_ray.py"
    imports, body = _main(path)
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(ast.Module(imports, []), str(path), "exec"), space)
    space |= {
        "argparse": SimpleNamespace(**{**vars(argparse), "ArgumentParser": Parser}),
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


def _check_devices(args: Any, where: str) -> None:
    """What OpenRLHF's ``train`` asserts once Ray has started (cli/train_ppo_ray.py of 0.11.2)."""
    actors = args.actor.num_nodes * args.actor.num_gpus_per_node
    if (args.train.colocate_all or args.train.colocate_actor_ref) and args.algo.kl.init_coef > 0:
        found = (args.ref.num_nodes, args.ref.num_gpus_per_node)
        if found != (args.actor.num_nodes, args.actor.num_gpus_per_node):
            raise ConfigurationError(
                "the reference model shares the actor's devices and has others",
                found=f"{found[0]} x {found[1]}",
                where=f"{where}: args.ref",
                remedy=f"ref.num_nodes: {args.actor.num_nodes}, ref.num_gpus_per_node: {args.actor.num_gpus_per_node}",
            )
    engines = (args.vllm.num_engines or 0) * args.vllm.tensor_parallel_size
    if args.train.colocate_all and not args.train.async_enable and engines not in (0, actors):
        raise ConfigurationError(
            "engines that share the actor's devices must be as many",
            found=f"{engines} for {actors}",
            where=f"{where}: args.vllm.num_engines",
            remedy=f"vllm.num_engines: {actors // args.vllm.tensor_parallel_size}",
        )
