"""Checkpoints: everything that the next period depends on, written so that a kill leaves the last one whole."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml

from metronome.errors import ConfigurationError

if TYPE_CHECKING:
    from metronome_local.trainer import Parts

_FOLDER = "checkpoints"
_STATE = {"period", "version", "stream", "controller", "random", "accuracies"}
_FREE = {"periods"}  # training keys that a resumed run may change


class Checkpoints:
    """The checkpoints of one run folder; keeps the newest ``keep``."""

    def __init__(self, run_folder: Path, keep: int) -> None:
        self.run_folder, self._keep = run_folder, keep

    def save(self, state: dict[str, Any], parts: Parts) -> Path:
        """Writes state, trained weights, optimiser and schedule; returns the checkpoint's folder."""
        folder = self.run_folder / _FOLDER / f"{state['period']:06d}"
        building = folder.with_suffix(".writing")
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        trained = {name: p.detach() for name, p in parts.model.named_parameters() if p.requires_grad}
        torch.save(
            {
                "weights": trained,
                "optimiser": parts.optimiser.state_dict(),
                "scheduler": parts.scheduler.state_dict(),
            },
            building / "trainer.pt",
        )
        (building / "state.json").write_text(json.dumps(state))
        replaced = folder.with_suffix(".replaced")
        if folder.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            folder.rename(replaced)  # until its successor stands it counts as the checkpoint
        building.rename(folder)
        shutil.rmtree(replaced, ignore_errors=True)
        for old in _complete(self.run_folder)[: -self._keep]:
            shutil.rmtree(old)
        return folder


def load_state(run_folder: Path) -> dict[str, Any]:
    """The newest complete checkpoint's state; raises ConfigurationError if there is none or it can't be read."""
    if not run_folder.is_dir():
        raise ConfigurationError("no such run folder", found=str(run_folder), where="--resume", remedy="a run's folder")
    found = _complete(run_folder)
    if not found:
        raise ConfigurationError(
            "the run folder holds no checkpoint",
            found=str(run_folder),
            where="--resume",
            remedy="checkpoints.every",
        )
    try:
        state: dict[str, Any] = json.loads((found[-1] / "state.json").read_text())
        if not isinstance(state, dict) or not set(state) >= _STATE:
            raise ValueError("state.json isn't whole")
    except (OSError, ValueError) as error:  # JSON's own error is a ValueError
        raise ConfigurationError(
            f"the checkpoint can't be read: {error}",
            found=str(found[-1]),
            where="--resume",
            remedy="remove its folder",
        ) from error
    return state | {"folder": str(found[-1])}


def load_tensors(state: dict[str, Any], model: Any, optimiser: torch.optim.Optimizer, scheduler: Any) -> None:
    """Loads weights, optimiser and schedule; raises ConfigurationError if they don't fit the recipe's model."""
    path = Path(state["folder"]) / "trainer.pt"
    try:
        tensors = torch.load(path, weights_only=True)
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if set(parameters) != set(tensors["weights"]):
            raise ValueError("other trained parameters")
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(tensors["weights"][name])
        optimiser.load_state_dict(tensors["optimiser"])
        scheduler.load_state_dict(tensors["scheduler"])
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError) as error:
        raise ConfigurationError(
            f"the checkpoint doesn't fit: {error}",
            found=str(path),
            where="--resume",
            remedy="resume with its own recipe",
        ) from error


def check_recipe(run_folder: Path, new: dict[str, Any]) -> None:
    """Raises ConfigurationError for a key that a resumed run may not change, or if its recipe can't be read."""
    path = run_folder / "recipe.yaml"
    try:
        old = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigurationError(
            f"the run's recipe can't be read: {error}",
            found=str(path),
            where="--resume",
            remedy="start a new run",
        ) from error
    for section in ("model", "task", "sampling", "training", "metronome"):
        before, after = old.get(section, {}), new.get(section, {})
        for key in sorted({*before, *after}):
            free = section == "training" and key in _FREE
            if before.get(key) != after.get(key) and not free:
                raise ConfigurationError(
                    f"a resumed run can't change {section}.{key}",
                    found=after.get(key),
                    where="the recipe",
                    remedy=f"{section}.{key}: {before.get(key)!r}, or start a new run",
                )


def _complete(run_folder: Path) -> list[Path]:
    def whole(path: Path) -> bool:
        kept = path.suffix == ".replaced" and not path.with_suffix("").exists()
        return path.is_dir() and (path.suffix == "" or kept)

    return sorted(path for path in (run_folder / _FOLDER).glob("*") if whole(path))
