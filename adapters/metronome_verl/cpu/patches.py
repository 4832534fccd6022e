"""What the CPU room changes in verl, beside its registries."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from metronome_patches.ledger import Patch
from metronome_verl.flush import FLUSH
from metronome_verl.host import HOST_VERSIONS

from . import ROLLOUT


def one_gloo(init_process_group: Callable[..., Any]) -> Callable[..., Any]:
    """``init_process_group`` that takes ``cpu:gloo,cpu:gloo`` for ``cpu:gloo``."""

    @functools.wraps(init_process_group)
    def wrapped(backend: str | None = None, *args: Any, **named: Any) -> Any:
        return init_process_group("cpu:gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **named)

    return wrapped


def with_our_rollout(registry: dict[tuple[str, str], str]) -> dict[tuple[str, str], str]:
    """The same dictionary, with the weight receiver of our rollout."""
    registry[(ROLLOUT, "async")] = "metronome_verl.cpu.replica.ServerAdapter"
    return registry


PATCHES = (
    Patch(
        host="verl",
        target="torch.distributed:init_process_group",
        host_versions=HOST_VERSIONS,
        expects=("backend", "init_method", "timeout"),
        why="verl composes the backend cpu:gloo,<device>:<backend>, on a CPU cpu:gloo,cpu:gloo, which torch refuses",
        upstream="verl/utils/distributed.py, initialize_global_process_group and initialize_global_process_group_ray",
        remove_when="verl names a device once in the backend string",
        replace=one_gloo,
    ),
    Patch(
        host="verl",
        target="verl.workers.rollout.base:_ROLLOUT_REGISTRY",
        host_versions=HOST_VERSIONS,
        expects=dict,
        why="the class that receives weights for a rollout name is looked up in a dictionary without a function to add",
        upstream="verl/workers/rollout/base.py, get_rollout_class",
        remove_when="verl offers a function that registers it, as it does for replicas",
        replace=with_our_rollout,
    ),
    FLUSH,
)
