"""What AReaL's recovery checkpoints hold of ours, and whether this run can go on from it.

AReaL saves its dataloader's state rank by rank, so ours goes with it: prompts that are out, the controller's and the
rollout source's state, and what a position in the data depends on.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sized
from typing import Any

from areal.infra.data_service.rdataset import RDataset
from areal.utils.recover import InValidRecoverInfo, RecoverHandler, RecoverInfo

from metronome.errors import ConfigurationError, guarded
from metronome_areal.config import Part
from metronome_areal.prompts import KEY, Prompts

_WHERE = "recover.mode"
_AGAIN = "recover.mode=off or a trial_name of its own (metronome run: args.trial_name=NAME with --output FOLDER)"


class KeptPrompts(Prompts):
    """``Prompts`` whose checkpoint holds the run's state too; ``take`` reads that before any engine is made.

    Args:
        loader: AReaL's.
        part: the run's settings.
        data: ``data_of`` the run.
    """

    def __init__(self, loader: Any, part: Part, data: Mapping[str, Any]) -> None:
        super().__init__(loader)
        self._part, self._data = part, dict(data)

    def state_dict(self) -> dict[str, Any]:
        """AReaL's and ours."""
        state = super().state_dict()
        state[KEY] |= {"run": saved(self._part), "data": self._data}
        return state


def data_of(config: Any, dataset: Any) -> dict[str, Any]:
    """What a position in the data depends on."""
    rows = len(dataset) if isinstance(dataset, Sized) and not isinstance(dataset, RDataset) else None
    return {"prompts": rows, "train_dataset.batch_size": int(config.train_dataset.batch_size)}


def take(config: Any, part: Part, data: Mapping[str, Any]) -> None:
    """Gives the run's source and controller their states, where AReaL will recover.

    Args:
        config: AReaL's.
        part: the run's settings.
        data: ``data_of`` the run.

    Raises ConfigurationError for a checkpoint of another controller, source, data or number of ranks, for one without
    the state needed, and for one that AReaL can't read: it would begin anew and overwrite it.
    """
    recover = config.recover
    path = RecoverHandler.recover_info_path(recover.experiment_name, recover.trial_name, recover.fileroot)
    if recover.mode in ("off", "disabled") or not os.path.exists(path):
        return
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    try:
        states = RecoverInfo.load(path).dataloader_info
    except InValidRecoverInfo as error:
        states, found = None, f"{path}: {error.__cause__}"
    else:
        found = f"{len(states)} ranks, now {ranks}"
    if isinstance(states, list):
        states = states[int(os.environ.get("RANK", "0"))] if len(states) == ranks else None
    if states is None:
        if part.block:
            raise ConfigurationError(
                "AReaL can't go on from the checkpoint that is there, and would begin anew",
                found=found,
                where=_WHERE,
                remedy=f"as many ranks as the checkpoint has; {_AGAIN}",
            )
        return
    own = states.get(KEY)
    if own is None:
        _without_state(part)
    else:
        _check_data(own, data, part)
        restored(part, own["run"], len(own["prompts"]))


def saved(part: Part) -> dict[str, Any]:
    """The state of a run's rollout source and group controller."""
    selection = part.selection
    return {
        "rollout_source": part.mode if part.owns_rollouts else None,
        "group_controller": part.settings.group_controller if part.owns_groups else None,
        "states": {
            "rollout_source": selection.rollout_source.state_dict(),
            "group_controller": selection.group_controller.state_dict(),
        },
    }


def restored(part: Part, state: Mapping[str, Any], out: int) -> None:
    """Gives the run's source and controller their states from ``saved``'s.

    Args:
        part: the run's settings.
        state: from the checkpoint.
        out: prompts of the checkpoint that were taken from the data and not trained.

    Raises ConfigurationError for another group controller, for another bound, and for another source while prompts
    are out.
    """
    found, mine = state["group_controller"], part.settings.group_controller if part.owns_groups else None
    if found != mine:
        raise ConfigurationError(
            "the checkpoint was written with another group controller",
            found=f"{_named(found)}, now {_named(mine)}",
            where="metronome.group_controller",
            remedy=f"{_kept('group_controller', found)}, or {_AGAIN}",
        )
    if mine is not None:
        _load(part.selection.group_controller, state["states"]["group_controller"], f"group controller {mine!r}")
    found, mine = state["rollout_source"], part.mode if part.owns_rollouts else None
    if found == mine:
        _load(part.selection.rollout_source, state["states"]["rollout_source"], f"rollout source {mine!r}")
    elif out and (found == "bounded" or mine is None):
        raise ConfigurationError(
            f"{out} prompts were out at the checkpoint, and only the source that sent them trains them",
            found=f"{_named(found)}, now {_named(mine)}",
            where="metronome.rollout_source",
            remedy=f"{_kept('rollout_source', found)}, or {_AGAIN}",
        )
    else:
        _tell(f"rollout source {_named(mine)} starts anew: the checkpoint is of {_named(found)}")


def _load(owner: Any, state: Mapping[str, Any], name: str) -> None:
    guarded(lambda: owner.load_state_dict(state), f"{name} raised in load_state_dict()", where="the checkpoint")


def _without_state(part: Part) -> None:
    if part.owns_groups:
        raise ConfigurationError(
            "the checkpoint has no state of the group controller",
            found="a checkpoint of AReaL's own trainer",
            where=_WHERE,
            remedy=f"leave metronome.group_controller out, or {_AGAIN}",
        )
    if part.owns_rollouts:
        _tell(f"rollout source {part.mode} starts anew: the checkpoint is of AReaL's own trainer")


def _check_data(own: Mapping[str, Any], mine: Mapping[str, Any], part: Part) -> None:
    known = {name: value for name, value in mine.items() if value is not None}
    if part.owns_rollouts and known != {name: own["data"][name] for name in known}:
        raise ConfigurationError(
            "the checkpoint's position is one in other data, so that prompts would come twice or never",
            found=f"{own['data']}, now {dict(mine)}",
            where="train_dataset",
            remedy=f"the data and the batch size of the checkpoint, or {_AGAIN}",
        )


def _named(name: str | None) -> str:
    return "AReaL's own" if name is None else name


def _kept(key: str, name: str | None) -> str:
    return f"leave metronome.{key} out" if name is None else f"metronome.{key}={name}"


def _tell(line: str) -> None:
    print(f"metronome: {line}", flush=True)
