"""How many rows a batch may have, so that OpenRLHF's accumulation windows come out whole when G changes."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, lcm
from typing import Any

from metronome.contracts import GroupController
from metronome.controller_check import checked_prompts
from metronome.errors import ConfigurationError


@dataclass(frozen=True)
class Windows:
    """A batch of P groups of G rows: within ``budget`` rows, and a multiple of ``multiple`` rows.

    Attributes:
        budget: R, rows of a batch at most: ``--rollout.batch_size`` prompts of the controller's largest G.
        steps: optimiser steps a batch, whatever G is.
        multiple: rows by which a batch divides into equal shares of ranks, whole micro-batches and ``steps`` windows.
    """

    budget: int
    steps: int
    multiple: int

    def check(self, size: int) -> None:
        """Raises ConfigurationError if the fewest groups of G = ``size`` that fill whole windows exceed the budget."""
        fewest = lcm(self.multiple, size)
        if fewest > self.budget:
            raise ConfigurationError(
                f"groups of G = {size} leave a half-filled accumulation window in every batch of {self.budget} rows",
                found=f"rows must be a multiple of {fewest}: of G, and of {self.multiple} for the steps, ranks and"
                " micro-batches",
                where="--rollout.batch_size",
                remedy=f"--rollout.batch_size larger, fewer optimiser steps a batch (--train.batch_size {self.budget}),"
                f" or a G that divides {self.multiple}",
            )

    def prompts(self, controller: GroupController, size: int) -> int:
        """P for G = ``size``, by the controller's budget, rounded down to what fills whole windows.

        Raises ConfigurationError as ``check``.
        """
        self.check(size)
        return checked_prompts(controller, self.budget, self.multiple // gcd(self.multiple, size))


def windows(args: Any, largest: int, streamed: bool) -> Windows:
    """The rule for this run.

    Args:
        args: OpenRLHF's arguments.
        largest: the largest G.
        streamed: whether batches are trained by parts, which has one step a batch and no windows to fill.

    Raises ConfigurationError if ``--train.batch_size`` doesn't divide the budget.
    """
    budget = int(args.rollout.batch_size) * largest
    if streamed:
        return Windows(budget, 1, 1)
    rows = int(args.train.batch_size)
    if budget % rows:
        raise ConfigurationError(
            f"a batch of {args.rollout.batch_size} groups of G = {largest} leaves a half-filled accumulation window",
            found=f"{budget} rows, {rows} a window",
            where="--train.batch_size",
            remedy=f"--train.batch_size {budget}, or a divisor of it",
        )
    ranks = int(args.actor.num_nodes * args.actor.num_gpus_per_node)
    ranks //= int(args.ds.ring_attn_size * args.ds.tensor_parallel_size)
    steps = budget // rows
    micro, made = int(args.train.micro_batch_size), int(args.rollout.micro_batch_size)
    return Windows(budget, steps, lcm(steps * micro * ranks, made * ranks))
