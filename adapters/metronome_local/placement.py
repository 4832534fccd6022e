"""Threads and cores of the trainer and its rollout workers."""

from __future__ import annotations

import os
from dataclasses import dataclass

from metronome_local.recipe import Machine


@dataclass(frozen=True)
class Placement:
    """Threads of each process, and the cores they are bound to where there is one for each thread (else None)."""

    threads: int
    trainer: tuple[int, ...] | None
    workers: list[tuple[int, ...] | None]
    available: tuple[int, ...]  # cores of the process before it bound itself


def placement_of(machine: Machine) -> Placement:
    """The cores divided among the processes; nobody is bound where ``pin`` is off or cores don't suffice."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    processes = machine.workers + 1
    each = machine.threads or max(1, len(cores) // processes)
    if not machine.pin or not hasattr(os, "sched_setaffinity") or each * processes > len(cores):
        return Placement(each, None, [None] * machine.workers, tuple(cores))
    shares = [tuple(cores[i * each : (i + 1) * each]) for i in range(processes)]
    return Placement(each, shares[-1], list(shares[:-1]), tuple(cores))


def bind_trainer(placement: Placement) -> None:
    """Sets the threads of this process and binds it to the trainer's cores."""
    import torch

    torch.set_num_threads(placement.threads)
    if placement.trainer is not None:
        os.sched_setaffinity(0, placement.trainer)


def release_trainer(placement: Placement) -> None:
    """Gives this process its cores back, so that a next run in it can place its own processes."""
    if placement.trainer is not None:
        os.sched_setaffinity(0, placement.available)
