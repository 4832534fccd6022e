"""Whole groups in AReaL's mini- and micro-batches, cut only where they can't stay whole."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from areal.api.cli_args import MicroBatchSpec
from areal.trainer.ppo import actor as host
from areal.utils.data import MicroBatchList, pack_tensor_dict

from metronome.errors import ConfigurationError
from metronome_areal.rows import Group, Row, fed, read_groups

_CUT = "split_padded_tensor_dict_into_mb_list"  # the function of AReaL's that cuts a batch into minibatches

if _CUT not in host.PPOActor._ppo_update.__code__.co_names:
    raise ConfigurationError(
        "AReaL doesn't cut a batch into minibatches as we know it",
        found=f"_ppo_update without {_CUT}",
        where="areal.trainer.ppo.actor",
        remedy="areal 1.0.x, or metronome.attention=host",
    )

Bin = list[Group]


def micro_batches(groups: Sequence[Group], budget: int | None) -> list[Bin]:
    """Micro-batches of at most ``budget`` tokens that are fed (None: no bound), as few as longest-first finds.

    A group above the budget is cut into parts that each hold its prompt.

    Raises ConfigurationError if one row is longer than the budget.
    """
    if budget is None:
        return [list(groups)]
    parts = [part for group in groups for part in _within(group, budget)]
    number = max(1, -(-sum(map(fed, parts)) // budget))
    while True:
        bins = _longest_first(parts, number)
        if number >= len(parts) or all(sum(map(fed, one)) <= budget for one in bins):
            return bins
        number += 1


def exactly(bins: Sequence[Bin], number: int) -> list[Bin]:
    """``number >= len(bins)`` bins: the heaviest that can be cut is, between groups first; empty ones when none can."""
    found = [list(one) for one in bins]
    while len(found) < number:
        rows = [sum(len(group) for group in one) for one in found]
        heaviest = max(range(len(found)), key=lambda one: (rows[one] > 1, sum(map(fed, found[one]))))
        if rows[heaviest] < 2:
            found.append([])
        elif len(found[heaviest]) > 1:
            found[heaviest : heaviest + 1] = _longest_first(found[heaviest], 2)
        else:
            group = found[heaviest][0]
            half = len(group) // 2
            found[heaviest : heaviest + 1] = [[group[:half]], [group[half:]]]
    return found


def minibatches(data: dict[str, Any], number: int) -> list[list[int]]:
    """Places of the rows of each of ``number`` minibatches: whole groups, similar in tokens that are fed.

    Raises ConfigurationError for fewer rows than minibatches.
    """
    groups, others = read_groups(data)
    rows = sum(map(len, groups)) + len(others)
    if rows < number:
        raise ConfigurationError(
            "fewer rows than minibatches on this rank",
            found=f"{rows} rows, {number} minibatches",
            where="actor.ppo_n_minibatches",
            remedy=f"at most {rows}",
        )
    bins = exactly(_longest_first(groups, min(number, max(1, len(groups)))), number)
    found = [[row.place for group in one for row in group] for one in bins]
    for row in others:
        min(found, key=len).append(row.place)
    return sorted(sorted(one) for one in found)


@contextlib.contextmanager
def whole_groups() -> Iterator[None]:
    """AReaL's ``PPOActor`` cuts its minibatches between groups meanwhile."""
    stock = getattr(host, _CUT)

    def cut(data: dict[str, Any], mb_spec: MicroBatchSpec, group: Any = None) -> MicroBatchList:
        places = minibatches(data, mb_spec.n_mbs or 1)
        lengths = data["attention_mask"].sum(1).tolist()
        return MicroBatchList(
            data=data,
            mb_spec=mb_spec,
            mbs=[select(data, one) for one in places],
            group_lens=[int(sum(lengths[place] for place in one)) for one in places],
        )

    setattr(host, _CUT, cut)
    try:
        yield
    finally:
        setattr(host, _CUT, stock)


def select(data: dict[str, Any], places: Sequence[int]) -> dict[str, Any]:
    """The rows at ``places``; as in AReaL, only what has a value a token is a row's, the rest stays as it is."""
    shape = data["attention_mask"].shape
    return {
        key: value[torch.as_tensor(places, device=value.device, dtype=torch.int64)]
        if _per_token(value, shape)
        else value
        for key, value in data.items()
    }


def packed(data: dict[str, Any], places: Sequence[int]) -> dict[str, Any]:
    """AReaL's packed micro-batch of those rows; it may have none."""
    if places:
        found: dict[str, Any] = pack_tensor_dict(select(data, places))
        return found
    shape = data["attention_mask"].shape
    found = {key: value[0, :0] if _per_token(value, shape) else value for key, value in data.items()}
    del found["attention_mask"]
    return {**found, "cu_seqlens": torch.zeros(1, dtype=torch.int32), "max_seqlen": 0}


def _per_token(value: Any, shape: torch.Size) -> bool:
    return torch.is_tensor(value) and value.shape[:2] == shape and value.numel() == shape.numel()


def _within(group: Group, budget: int) -> list[Group]:
    """The group, or parts of it in its order that each stay within the budget."""
    parts: list[list[Row]] = []
    used = budget + 1
    for row in group:
        if len(row.ids) > budget:
            raise ConfigurationError(
                "a row is longer than a micro-batch may be",
                found=f"{len(row.ids)} tokens, at most {budget}",
                where="mb_spec.max_tokens_per_mb",
                remedy="a larger mb_spec.max_tokens_per_mb, or shorter responses",
            )
        own = len(row.ids) - row.prompt
        if used + own > budget:
            parts.append([])
            used = row.prompt
        parts[-1].append(row)
        used += own
    return [tuple(one) for one in parts]


def _longest_first(groups: Sequence[Group], number: int) -> list[Bin]:
    """``number`` bins, each group to the lightest so far, heaviest groups first."""
    bins: list[Bin] = [[] for _ in range(number)]
    load = [0] * number
    for group in sorted(groups, key=fed, reverse=True):
        lightest = min(range(number), key=lambda one: load[one])
        bins[lightest].append(group)
        load[lightest] += fed(group)
    return bins
