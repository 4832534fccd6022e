"""What a checkpoint of verl's holds of ours: ``metronome.json``, read and checked before verl loads anything.

verl 0.9.1 saves its weights, the data's position (``data.pt``) and, in asynchronous modes, the queue with the prompts
in flight (``transfer_queue``): finished groups go on as they are, the others are generated again. Where one of these
is missing it starts without. Our file says what must be there.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from metronome.errors import ConfigurationError, guarded

FILE = "metronome.json"
_DATA, _QUEUE = "data.pt", "transfer_queue"
_KINDS: dict[str, type] = {
    "step": int,
    "block": dict,
    "rollout_source": dict,
    "group_controller": dict,
    "data": dict,
    "in_flight": list,
}
_EARLIER = "an earlier checkpoint (trainer.resume_mode=resume_path trainer.resume_from_path=.../global_step_N)"


# --- the file -------------------------------------------------------------------------------------------


def write(folder: Path, state: Mapping[str, Any]) -> None:
    """Writes ``state`` into ``folder``: all of it or nothing, so that a run stopped meanwhile leaves no half of it.

    Raises PluginError for what JSON can't hold, which only a controller or a source of others can bring.
    """
    text = guarded(lambda: json.dumps(state, indent=2), "a state isn't JSON", where=str(folder / FILE))
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f"{FILE}.tmp"
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(folder / FILE)


def read(folder: Path) -> dict[str, Any] | None:
    """The state in the checkpoint ``folder`` (``global_step_N``); None where there is no file.

    Raises ConfigurationError for a file that is damaged, lacks a part or belongs to another step.
    """
    path = folder / FILE
    if not path.exists():
        return None
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from None
    if not isinstance(state, dict):
        raise _damaged(path, f"a {type(state).__name__} instead of a mapping")
    for key, kind in _KINDS.items():
        if not isinstance(state.get(key), kind):
            raise _damaged(path, f"{key}: {state.get(key)!r}")
    if folder.name != f"global_step_{state['step']}":
        raise _damaged(path, f"step: {state['step']} in {folder.name}")
    return state


def _damaged(path: Path, found: str) -> ConfigurationError:
    return ConfigurationError(
        "the checkpoint's state can't be read", found=found, where=str(path), remedy=f"resume from {_EARLIER}"
    )


def latest(root: Path) -> Path | None:
    """The checkpoint that verl's tracker file in ``root`` names; None where there is none."""
    tracker = root / "latest_checkpointed_iteration.txt"
    if not tracker.is_file():
        return None
    folder = root / f"global_step_{tracker.read_text(encoding='utf-8').strip()}"
    return folder if folder.is_dir() else None


# --- the trainer ----------------------------------------------------------------------------------------


def of(trainer: Any) -> dict[str, Any]:
    """The state of ``trainer`` at the end of a step; ``in_flight`` are the prompts drawn and not yet trained."""
    return {
        "step": int(trainer.global_steps),
        "block": dict(trainer.arranged.block),
        "rollout_source": trainer.arranged.selection.rollout_source.state_dict(),
        "group_controller": trainer.controller.state_dict(),
        "data": _data(trainer),
        "in_flight": [] if trainer.arranged.mode == "synchronous" else sorted(_prompts(_queued())),
    }


def take(trainer: Any) -> dict[str, Any] | None:
    """Checks the checkpoint that verl will load, and gives the controller its state; None without checkpoint or state.

    Raises ConfigurationError for a checkpoint of another rollout source or of other data, and for one in which
    something is missing that ``of`` promised.
    """
    settings = trainer.config.trainer
    if settings.resume_mode == "disable":
        return None
    by_path = settings.resume_mode == "resume_path"
    folder = Path(settings.resume_from_path) if by_path else latest(Path(settings.default_local_dir))
    if folder is None:
        return None
    state = read(folder)
    if state is None:
        _without_state(folder, trainer.owns_groups)
        return None
    trainer.arranged.selection.rollout_source.load_state_dict(state["rollout_source"])
    _check_data(folder, state["data"], _data(trainer))
    _check_queue(folder, len(state["in_flight"]))
    _controller(trainer, state, str(folder / FILE))
    for key in ("loss", "attention"):
        saved, chosen = (block.get(key, "verl's own") for block in (state["block"], trainer.arranged.block))
        if saved != chosen:
            _tell(f"{key} is {chosen} from here on: the checkpoint is of {saved}")
    return state


def settle(trainer: Any, state: Mapping[str, Any]) -> None:
    """After verl has loaded: every prompt in flight is there again, and rows that are trained are gone.

    verl saves while the rows of the step's batch are still in the queue, and would keep them for ever.
    Raises ConfigurationError if the queue has other prompts than the state says.
    """
    if trainer.arranged.mode == "synchronous":
        return
    items = _queued()
    prompts, promised = _prompts(items), set(state["in_flight"])
    if prompts != promised:
        raise ConfigurationError(
            "the checkpoint's queue doesn't hold the prompts that were in flight",
            found=f"{len(promised - prompts)} missing, {len(prompts - promised)} unknown, of {len(promised)}",
            where=_QUEUE,
            remedy=f"resume from {_EARLIER}",
        )
    trained = [key for key in items if key.split("_")[0] not in prompts]
    if trained:
        import transfer_queue as tq

        tq.kv_clear(keys=trained, partition_id="train")
    if prompts:
        again = sum(items[key]["status"] in ("pending", "running") for key in prompts)
        _tell(f"{len(prompts)} prompts were in flight at the checkpoint: {again} are generated again")


def _controller(trainer: Any, state: Mapping[str, Any], where: str) -> None:
    if state["in_flight"] and ("group_controller" in state["block"]) != trainer.owns_groups:
        raise ConfigurationError(
            "prompts in flight carry their G if a group controller chose it, and those of the checkpoint don't match",
            found=state["block"].get("group_controller"),
            where=where,
            remedy="leave metronome.group_controller as it was: set, or left out",
        )
    saved, chosen = (block.get("group_controller", "fixed") for block in (state["block"], trainer.arranged.block))
    if saved != chosen:
        _tell(f"group controller {chosen} starts anew: the checkpoint is of {saved}")
        return
    guarded(
        lambda: trainer.controller.load_state_dict(state["group_controller"]),
        f"group controller {chosen!r} raised in load_state_dict()",
        where=where,
    )
    if trainer.owns_groups:  # warm-up prompts go out before the first step sets it
        trainer.config.actor_rollout_ref.rollout.n = trainer.controller.size()


def _without_state(folder: Path, owns_groups: bool) -> None:
    if owns_groups:
        raise ConfigurationError(
            "the checkpoint has no state of the group controller",
            found=str(folder / FILE),
            where="trainer.resume_mode",
            remedy="leave metronome.group_controller out, or trainer.resume_mode=disable",
        )
    if (folder / _QUEUE).exists():
        raise ConfigurationError(
            "the checkpoint is of an asynchronous trainer without metronome, whose prompts in flight can't go on here",
            found=str(folder / _QUEUE),
            where="trainer.resume_mode",
            remedy="remove that folder to give these prompts up, or leave trainer.v1.trainer_mode=metronome out",
        )
    if folder.is_dir():
        _tell("the checkpoint was written without metronome; only verl's part is restored")


def _check_data(folder: Path, saved: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    if not (folder / _DATA).exists():
        _tell(f"the checkpoint has no {_DATA}: the data begins anew, and prompts that were used come again")
    elif saved != mine:
        raise ConfigurationError(
            "the checkpoint's position is one in other data, so that prompts would come twice or never",
            found=f"{dict(saved)}, now {dict(mine)}",
            where="data",
            remedy=f"data.train_files and data.shuffle of the checkpoint; or remove {_DATA} from it, to begin anew",
        )


def _check_queue(folder: Path, in_flight: int) -> None:
    if in_flight and not _holds_rows(folder):
        raise ConfigurationError(
            f"{in_flight} prompts were in flight at the checkpoint, and their rows weren't saved with it",
            found=str(folder / _QUEUE),
            where="transfer_queue.backend",
            remedy=f"the backend SimpleStorage, checkpoints where all nodes see them; or resume from {_EARLIER}",
        )


def tell_unsaved(folder: Path, in_flight: int) -> None:
    """Says so at once where ``folder`` can't be resumed from."""
    if in_flight and not _holds_rows(folder):
        _tell(
            f"{folder.name} can't be resumed from: the queue's storage backend doesn't save {in_flight} prompts' rows"
        )


def _holds_rows(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / _QUEUE / "metadata.json").read_text(encoding="utf-8"))["storage_saved"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _data(trainer: Any) -> dict[str, Any]:
    """What a position in the data depends on; the batch size isn't among it (torchdata counts rows)."""
    dataset, data = trainer.train_dataset, trainer.config.data
    found = {"rows": len(dataset), "shuffle": bool(data.get("shuffle", True)), "seed": data.get("seed")}
    table = getattr(dataset, "dataframe", None)  # verl's own data set; others are known by their number of rows
    if table is not None and len(table):
        places = sorted({len(table) * part // 16 for part in range(16)})
        prompts = [repr(table[place].get(data.get("prompt_key", "prompt"))) for place in places]
        found["prompts"] = hashlib.blake2b("\0".join(prompts).encode(), digest_size=8).hexdigest()
    return found


def _queued() -> dict[str, Any]:
    import transfer_queue as tq

    return dict((tq.kv_list("train") or {}).get("train", {}))


def _prompts(items: Mapping[str, Any]) -> set[str]:
    return {key for key, tag in items.items() if tag.get("is_prompt", False)}


def _tell(line: str) -> None:
    print(f"metronome: {line}", flush=True)
