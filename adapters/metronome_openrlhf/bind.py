"""Which of OpenRLHF's classes are ours in a run, and where each is put.

OpenRLHF has no registries. Its Ray classes are looked up as module attributes in the launching process when its main
is run, so ours stand there before; each is a subclass in a module of this package, which Ray's workers import by name.
Inside a worker, our class puts the other classes that its base looks up into place (``policy.inside``), so that
nothing depends on what a launcher had bound elsewhere.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from metronome_openrlhf.host import VERSIONS
from metronome_openrlhf.seen import Seen
from metronome_patches.ledger import Patch, apply

_listeners: list[Callable[[Any], None]] = []
_trainers: list[Any] = []


def _heard(hierarchize: Callable[..., Any]) -> Callable[..., Any]:
    """``hierarchize`` whose result passes by this process' listener."""

    @functools.wraps(hierarchize)
    def wrapped(args: Any) -> Any:
        nested = hierarchize(args)
        for listener in _listeners:
            listener(nested)
        return nested

    return wrapped


ARGUMENTS = Patch(
    host="openrlhf",
    target="openrlhf.utils.config:hierarchize",
    host_versions=VERSIONS,
    expects=("args",),
    why="the parser is made inside main and called there; this function gets what it parsed, before main's own checks:"
    " our settings join OpenRLHF's arguments there, and Ray starts only when both are right",
    upstream="openrlhf/cli/train_ppo_ray.py, __main__",
    remove_when="OpenRLHF's main takes arguments, or offers them to a plug-in before it starts",
    replace=_heard,
)


def listen(listener: Callable[[Any], None]) -> None:
    """Calls ``listener`` with OpenRLHF's arguments, nested, when its main has parsed them; the latest one alone."""
    apply(ARGUMENTS)
    _listeners[:] = [listener]


def classes(args: Any, device: str) -> None:
    """Puts our Ray classes in the place of OpenRLHF's, in the launching process; those read ``args.metronome``.

    Rollout engines get no arguments of OpenRLHF's: a sampling seed is all that ours need of them. There is one on a
    CPU, and with ``--train.full_determinism_enable``.
    """
    import ray
    from openrlhf.trainer import ppo_trainer
    from openrlhf.trainer.ray import launcher, ppo_actor, vllm_engine

    from metronome_openrlhf import policy, reference, rollout, trainer

    seeded = device == "cpu" or args.train.full_determinism_enable
    ppo_actor.PolicyModelActor = ray.remote(num_gpus=1)(policy.MetronomePolicy)
    launcher.ReferenceModelActor = ray.remote(num_gpus=1)(reference.MetronomeReference)
    main: Any = sys.modules["__main__"]  # OpenRLHF's, which has imported these two by name before it parsed
    main.PolicyModelActor, main.ReferenceModelActor = ppo_actor.PolicyModelActor, launcher.ReferenceModelActor
    vllm_engine.RolloutRayActor = Given(
        ray.remote(rollout.MetronomeRollout), sampling_seed=int(args.train.seed) if seeded else None
    )
    ppo_trainer.PPOTrainer = Kept(ray.remote(trainer.MetronomeTrainer))
    if args.train.async_enable:
        from openrlhf.trainer import ppo_trainer_async

        from metronome_openrlhf import bounded

        ppo_trainer_async.PPOTrainerAsync = Kept(ray.remote(bounded.MetronomeTrainerAsync))


def seen() -> Seen | None:
    """What the trainer that OpenRLHF's main started last saw; None where there is none, or it doesn't answer."""
    import ray

    if not _trainers:
        return None
    try:
        found: Seen = ray.get(_trainers.pop().metronome_seen.remote())
    except ray.exceptions.RayError:
        return None
    return found


class Kept:
    """A Ray actor class whose actor stays until ``seen`` has asked it."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def remote(self, *arguments: Any, **named: Any) -> Any:
        """As Ray's."""
        _trainers[:] = [self._actor.remote(*arguments, **named)]
        return _trainers[0]


class Given:
    """A Ray actor class with arguments that its caller doesn't know of."""

    def __init__(self, actor: Any, **given: Any) -> None:
        self._actor, self._given = actor, given

    def options(self, **named: Any) -> Given:
        """As Ray's."""
        return Given(self._actor.options(**named), **self._given)

    def remote(self, *arguments: Any, **named: Any) -> Any:
        """As Ray's, with the arguments that were given."""
        return self._actor.remote(*arguments, **named, **self._given)
