"""Engines of AReaL's and of ours beside each other, and what a test asks of them: gradients, weights, metrics."""

import contextlib
import copy

import areal_room as room
import torch
from areal.api import FinetuneSpec
from areal.engine import FSDPPPOActor
from areal.utils import stats_tracker

from metronome_areal.packing import RowsApart


class StockApart(RowsApart, FSDPPPOActor):
    """AReaL's own actor, whose packs alone are mended: what it says of whole groups of one size is right then."""


@contextlib.contextmanager
def stock(config, kind=StockApart):
    """AReaL's own engine with our tests' configuration."""
    room.enter(config)
    room._another_port()
    made = kind(config.actor)
    made.create_process_group()
    made.initialize(None, FinetuneSpec(1, 64, 4))
    try:
        yield made
    finally:
        stats_tracker.export_all()
        made.destroy()


@contextlib.contextmanager
def ours(config):
    """Our engine."""
    with room.actor(config) as made:
        try:
            yield made
        finally:
            stats_tracker.export_all()


def gradients(engine):
    """Every gradient of an engine whose step was stopped, in one row."""
    return torch.cat([one.grad.full_tensor().flatten().clone() for one in engine.model.parameters()])


@contextlib.contextmanager
def stepless(engine):
    """Gradients stay where they are: neither clipped nor applied."""
    kept = engine.__dict__.get("optimizer_step")
    engine.optimizer_step = lambda: {"update_successful": 1.0, "grad_norm": 0.0, "lr": 0.0}
    try:
        yield
    finally:
        del engine.optimizer_step
        if kept is not None:
            engine.optimizer_step = kept


def fresh(sizes, references=False, seed=0, **named):
    """Groups of an engine that is close to the model, so that ratios are near one on both sides of the clip."""
    groups = room.random_groups(sizes, seed=seed, **named)
    draw = torch.Generator().manual_seed(seed + 1)
    for group in groups:
        if references:
            group["ref_logp"] = -4.0 * torch.rand(group["logprobs"].shape, generator=draw)
    return groups


def near(engine, groups):
    """The engine's log-probs with noise as the rollout's, so that some ratios are clipped and most aren't."""
    draw = torch.Generator().manual_seed(9)
    for group, theirs in zip(groups, engine.compute_logp(groups), strict=True):
        noise = 0.3 * torch.randn(theirs.shape, generator=draw)
        group["logprobs"] = torch.roll(theirs + noise, 1, -1) * group["loss_mask"]
    return groups


def whole(engine, groups):
    """The gradient of one update with the whole batch."""
    groups = copy.deepcopy(groups)
    with stepless(engine):
        if engine.config.should_compute_prox_logp():
            for group, found in zip(groups, engine.compute_logp(groups), strict=True):
                group["prox_logp"] = found
        engine.ppo_update(engine.compute_advantages(groups))
        return gradients(engine)


def in_parts(engine, parts):
    """The gradient of a period of these parts."""
    with stepless(engine):
        engine.metronome_begin()
        for part in copy.deepcopy(parts):
            engine.metronome_part(engine.metronome_level(part))
        engine.metronome_step()
        return gradients(engine)


def split(groups, *places):
    """``groups`` in parts: the places of each part's groups."""
    return [[groups[place] for place in part] for part in places]


def apart(one, other):
    return float((one - other).norm() / other.norm())


@torch.no_grad()
def full(engine):
    return torch.cat([one.full_tensor().flatten().clone() for one in engine.model.parameters()])
