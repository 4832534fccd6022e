"""Our trainer and our block in the place of AReaL's names, for a user's script that stays as it is.

A script imports ``PPOTrainer`` and ``load_expr_config`` from AReaL's modules; ours stand there before it runs, in its
process alone. A script that imports them from ``metronome_areal`` needs none of this.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from metronome_areal.host import VERSIONS
from metronome_patches.ledger import Patch, apply

BLOCK = "metronome"


def overrides(arguments: Sequence[str]) -> list[str]:
    """``metronome.x=y`` as Hydra takes it where the YAML has no such key: ``++metronome.x=y``."""
    return [f"++{one}" if one.startswith((f"{BLOCK}.", f"{BLOCK}=")) else one for one in arguments]


def _with_block(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def wrapped(argv: list[str], config_cls: type[Any]) -> Any:
        from metronome_areal.config import with_block

        return load(overrides(argv), with_block(config_cls))

    return wrapped


def _own_trainer(_: Any) -> Any:
    from metronome_areal.trainer import PPOTrainer

    return PPOTrainer


def _trainer_at(target: str) -> Patch:
    return Patch(
        host="areal",
        target=target,
        host_versions=VERSIONS,
        expects=("config", "train_dataset", "valid_dataset"),
        why="a user's script makes AReaL's PPOTrainer by this name; ours is a subclass of it",
        upstream="areal/trainer/rl_trainer.py: no registry of trainers",
        remove_when="AReaL looks trainers up by name, or the script imports metronome_areal.PPOTrainer",
        replace=_own_trainer,
    )


PATCHES = (
    Patch(
        host="areal",
        target="areal.api.cli_args:load_expr_config",
        host_versions=VERSIONS,
        expects=("argv", "config_cls"),
        why="AReaL refuses keys that the configuration class lacks: the script's own class gets the metronome block",
        upstream="areal/api/cli_args.py, to_structured_cfg",
        remove_when="AReaL passes unknown sections to plug-ins, or the script's class is metronome_areal.GRPOConfig",
        replace=_with_block,
    ),
    _trainer_at("areal.trainer:PPOTrainer"),
    _trainer_at("areal:PPOTrainer"),
)


def install() -> None:
    """Puts them there; a second call changes nothing."""
    import areal.trainer  # AReaL's package looks its trainers up on first use: here

    assert areal.PPOTrainer is not None
    for patch in PATCHES:
        apply(patch)
