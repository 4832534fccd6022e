"""Our state in OpenRLHF's checkpoints: the rollout source's and the group controller's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from metronome.errors import ConfigurationError


def saved(part: Any) -> dict[str, Any]:
    """The state for ``client_states["metronome"]``."""
    return {
        "rollout_source": part.mode,
        "group_controller": part.settings.group_controller,
        "states": {
            "rollout_source": part.selection.rollout_source.state_dict(),
            "group_controller": part.selection.group_controller.state_dict(),
        },
    }


def restored(part: Any, state: Mapping[str, Any] | None) -> None:
    """Loads ``saved``'s; a controller or source other than the checkpoint's starts anew, which is printed.

    Raises ConfigurationError if a group controller is set and the checkpoint has no state of any, or if another rollout
    source would lose prompts that the checkpoint has.
    """
    if state is None:
        if part.owns_groups:
            raise ConfigurationError(
                "the checkpoint has no state of the group controller",
                found="a checkpoint of OpenRLHF's own trainer",
                where="--ckpt.load_enable",
                remedy="leave --metronome.group_controller out, or --ckpt.load_enable",
            )
        return
    if state.get("again") and part.mode != state["rollout_source"]:
        raise ConfigurationError(
            "the checkpoint has prompts that were taken and aren't trained, which another rollout source would lose",
            found=f"{len(state['again'])} prompts of {state['rollout_source']}, now {part.mode}",
            where="--ckpt.load_enable",
            remedy=f"--metronome.rollout_source {state['rollout_source']}",
        )
    chosen = {"rollout_source": part.mode, "group_controller": part.settings.group_controller}
    for hook, name in chosen.items():
        if state[hook] == name:
            getattr(part.selection, hook).load_state_dict(state["states"][hook])
        else:
            print(f"metronome: {hook} {name} starts anew: the checkpoint is of {state[hook]}", flush=True)
