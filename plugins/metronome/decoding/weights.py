"""Weights of a model that decodes, replaced by those of a trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from metronome.errors import WorkerFailed


@torch.no_grad()
def replace_weights(model: Any, named: Mapping[str, torch.Tensor], *, where: str, remedy: str) -> None:
    """Copies ``named`` into ``model``, all or nothing; weights that the model ties may come under either name.

    Args:
        model: its parameters get the values.
        named: a full tensor for each parameter, under the names of ``model.state_dict()``.
        where: of the error.
        remedy: of the error.

    Raises WorkerFailed: a weight is missing, unknown or of another shape; nothing is copied then.
    """
    ours = model.state_dict()
    storage = {name: tensor.data_ptr() for name, tensor in ours.items()}
    given = {storage[name]: name for name in named if name in storage}
    complaints = {
        "unknown": [name for name in named if name not in ours],
        "missing": [name for name, _ in model.named_parameters() if storage[name] not in given],
        "of another shape": [name for name in named if name in ours and named[name].shape != ours[name].shape],
        # One tensor here, two in the trainer: whichever comes last would win silently.
        "tied here, not in the trainer": [
            name
            for name in named
            if name in ours
            and named[given[storage[name]]].shape == named[name].shape
            and not torch.equal(named[given[storage[name]]], named[name])
        ],
    }
    for what, names in complaints.items():
        if names:
            raise WorkerFailed(
                f"the published weights don't fit the model: {len(names)} {what}",
                found=sorted(names)[:3],
                where=f"{where}, {type(model).__name__}",
                remedy=remedy,
            )
    for name, tensor in named.items():
        ours[name].copy_(tensor)
