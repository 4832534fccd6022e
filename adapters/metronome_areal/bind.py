"""Our trainer and our block in the place of AReaL's names, for a user's script that stays as it is.

A script imports ``PPOTrainer`` and ``load_expr_config`` from AReaL's modules; ours stand there before it runs, in its
process alone. A script that imports them from ``metronome_areal`` needs none of this.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from metronome.errors import ConfigurationError
from metronome_areal.host import VERSIONS
from metronome_areal.keys import BLOCK, overrides, refused
from metronome_patches.ledger import Patch, apply


def _heard(load: Callable[..., Any]) -> Callable[..., Any]:
    """``load_expr_config`` that takes ``metronome.x=y``, and says what is wrong with a key in one line."""

    @functools.wraps(load)
    def wrapped(argv: list[str], config_cls: Any) -> Any:
        from areal.api import cli_args
        from omegaconf import OmegaConf

        from metronome_areal.config import read, with_block
        from metronome_areal.paths import check_paths

        argv = overrides(argv)
        with refused(with_block(config_cls), "AReaL's configuration"):
            written, _ = cli_args.parse_cli_args(argv)
            config: Any = OmegaConf.to_object(cli_args.to_structured_cfg(written, config_cls))
        read(config)  # before AReaL leaves its copy among the run's logs
        check_paths(config)
        with refused(with_block(config_cls), "AReaL's configuration"):
            return load(argv, config_cls)

    return wrapped


def _with_block(structured: Callable[..., Any]) -> Callable[..., Any]:
    """``to_structured_cfg`` whose class has our block where the configuration has it."""

    @functools.wraps(structured)
    def wrapped(cfg: Any, config_cls: Any) -> Any:
        from areal.api.cli_args import PPOConfig

        from metronome_areal.config import with_block

        if BLOCK not in cfg:
            return structured(cfg, config_cls)
        if not issubclass(config_cls, PPOConfig):
            raise ConfigurationError(
                "our hooks are in AReaL's PPOTrainer",
                found=f"a {BLOCK} block for {config_cls.__name__}",
                where="AReaL's configuration",
                remedy=f"GRPOConfig, PPOConfig or a class of yours below them, or no {BLOCK} block",
            )
        return structured(cfg, with_block(config_cls))

    return wrapped


def _own_trainer(_: Any) -> Any:
    from metronome_areal.trainer import PPOTrainer

    return PPOTrainer


def _trainer_at(module: str) -> Patch:
    return Patch(
        host="areal",
        target=f"{module}:PPOTrainer",
        host_versions=VERSIONS,
        expects=("config", "train_dataset", "valid_dataset"),
        why="a user's script makes AReaL's PPOTrainer by this name; ours is a subclass of it",
        upstream="areal/trainer/rl_trainer.py: there is no registry of trainers",
        remove_when="AReaL looks its trainers up, or the script imports metronome_areal.PPOTrainer",
        replace=_own_trainer,
    )


PATCHES = (
    Patch(
        host="areal",
        target="areal.api.cli_args:to_structured_cfg",
        host_versions=VERSIONS,
        expects=("cfg", "config_cls"),
        why="AReaL refuses keys that the configuration class lacks: where a metronome block is written, the script's"
        " own class gets a field for it",
        upstream="areal/api/cli_args.py, to_structured_cfg",
        remove_when="AReaL passes unknown sections to plug-ins, or the script's class is metronome_areal.GRPOConfig",
        replace=_with_block,
    ),
    Patch(
        host="areal",
        target="areal.api.cli_args:load_expr_config",
        host_versions=VERSIONS,
        expects=("argv", "config_cls"),
        why="Hydra takes an override of a key that the YAML lacks only with ++ before it, and a misspelt key is a"
        " traceback: metronome.x=y is taken as it is, and what is wrong with a key stands in one line",
        upstream="areal/api/cli_args.py, parse_cli_args",
        remove_when="the script's class is metronome_areal.GRPOConfig and its overrides are written as Hydra has them",
        replace=_heard,
    ),
    *map(_trainer_at, ("areal.trainer", "areal.trainer.rl_trainer", "areal")),
)


def install() -> None:
    """Puts them there; a second call changes nothing."""
    import areal.trainer  # AReaL's package looks its trainers up on first use: here

    assert areal.PPOTrainer is not None
    for patch in PATCHES:
        apply(patch)
