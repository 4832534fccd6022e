"""What stops a step of our trainers: samples of another version, weights that stand still, a hook left out."""

from __future__ import annotations

from typing import Any

from metronome.errors import MetronomeError, VersionMismatch


def check_versions(rows: list[Any], wanted: int, where: str) -> None:
    """Holds every trained token of a period to one version of the weights.

    Args:
        rows: experiences with ``versions`` (``VersionedExperience``).
        wanted: the version that the engines hold.
        where: shown in the error.

    Raises VersionMismatch for a token of another version, or of an unknown one.
    """
    for row in rows:
        if row.versions is None:
            found = "no versions"
        else:
            stamped = row.versions[row.action_mask.bool()]
            if bool((stamped == wanted).all()):
                continue
            found = f"versions {int(stamped.min())} to {int(stamped.max())}"
        raise VersionMismatch(
            "a sample of another version of the weights came into a periodic batch",
            found=f"{found}, trained is {wanted}",
            where=where,
            remedy="generate every turn through the engine that the executor was given, or --metronome.rollout_source"
            " bounded",
        )


def check_change(status: dict[str, Any], where: str) -> None:
    """Stops a publication that changes nothing: a gradient, a learning rate above 0, and every weight as before.

    Weights that aren't numbers stop the run too: DeepSpeed steps with a gradient that isn't finite, whose norm it gives
    as a finite one. Nothing is checked in a step that didn't train the actor.

    Raises MetronomeError.
    """
    if "metronome/weights/changed" not in status:
        return
    norm, rate = float(status.get("actor_grad_norm", 0.0)), float(status["metronome/weights/lr"])
    if not status["metronome/weights/finite"]:
        raise MetronomeError(
            "weights aren't numbers after the optimiser step",
            found=f"policy_loss {status.get('policy_loss')}, reward {status.get('reward')}",
            where=where,
            remedy="look at the rewards; resume from the last checkpoint, with a smaller --actor.adam.lr",
        )
    if norm > 0 and rate > 0 and not status["metronome/weights/changed"]:
        raise MetronomeError(
            "the optimiser step changed no weight, so that its publication would change nothing",
            found=f"gradient norm {norm:g}, learning rate {rate:g}",
            where=where,
            remedy="a larger --actor.adam.lr: weights of 16 bits don't show a smaller step",
        )


class ZeroRate:
    """Says once that a step moved no weight since its rate is 0 or none was taken, and not for a fault.

    Args:
        args: OpenRLHF's.
    """

    def __init__(self, args: Any) -> None:
        self._args, self._said = args, False

    def __call__(self, status: dict[str, Any], global_step: int) -> None:
        """Looks at the ``status`` of the step after ``global_step``."""
        if self._said or float(status.get("metronome/weights/lr", 1.0)) > 0:
            return
        self._said = True
        # OpenRLHF moves its schedule after a step alone: a rate above 0 behind the first one says that it was taken.
        warms_up = not global_step and float(self._args.actor.lr_warmup_ratio) > 0
        if warms_up and float(status.get("actor_lr", 0.0)) > 0:
            why = "its learning rate is 0: OpenRLHF's warm-up begins there, and --actor.lr_warmup_ratio 0 leaves it out"
        else:
            why = f"its rows fill no --train.batch_size {self._args.train.batch_size}, or its learning rate is 0"
        print(f"metronome: step {global_step + 1} leaves the weights as they are: {why}", flush=True)


def check_life(status: dict[str, Any], part: Any, where: str) -> None:
    """Stops a step that trained the actor and in which a hook that is set wasn't called.

    Raises MetronomeError naming the hook.
    """
    if "metronome/weights/changed" not in status:
        return
    wanted = [name for name, on in (("loss", part.own_loss), ("attention", part.shares_prompt)) if on]
    for hook in wanted:
        calls = status.get(f"metronome/{hook}/calls", 0)
        if not calls:
            raise MetronomeError(
                f"--metronome.{hook} is set and wasn't called in this step",
                found=f"metronome/{hook}/calls = {calls}",
                where=where,
                remedy=f"leave --metronome.{hook} out, or report the versions that metronome doctor prints",
            )


def check_received(before: list[float], after: list[float], changed: bool, where: str) -> None:
    """Stops a run whose rollout engines still hold the weights of the publication before, though the trainer's moved.

    Args:
        before: a number that changes with the weights, of each engine before the publication.
        after: the same after it.
        changed: whether the trainer's weights moved since the publication before.
        where: shown in the error.

    Raises MetronomeError.
    """
    stale = [place for place, (old, new) in enumerate(zip(before, after, strict=True)) if old == new]
    if changed and stale:
        raise MetronomeError(
            "the new weights didn't reach the rollout engines",
            found=f"engines {stale} of {len(after)} hold the weights of the publication before",
            where=where,
            remedy="another --vllm.sync_backend; with --ds.lora.rank a larger --actor.adam.lr: adapters are added to"
            " weights of 16 bits",
        )
