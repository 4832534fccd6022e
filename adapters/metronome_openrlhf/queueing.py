"""What ``--metronome.rollout_source bounded`` needs of OpenRLHF's arguments, and what it refuses.

OpenRLHF's queue bounds staleness by itself. A place in it is freed when a batch is taken for training, at version g;
the batch generated for that place, under weights of at least g, is taken ``--train.async_queue_size`` batches later. So
no token is staler than the queue is long, and with a trainer that is slower than the engines all are as stale.
"""

from __future__ import annotations

from math import lcm
from typing import Any

from metronome.errors import ConfigurationError
from metronome_openrlhf.arguments import WHERE, put, refuse

_BOUND = f"{WHERE}.bounded.max_staleness"


def over_publications(args: Any, part: Any, notes: list[str]) -> None:
    """OpenRLHF's asynchronous trainer, with a queue that lets staleness come as far as its bound.

    Raises ConfigurationError for a bound that can't be kept or is never met, with the flag that mends it.
    """
    put(args, "train.async_enable", True, notes, "batches are generated while others are trained")
    if part.in_flight == "finish":
        refuse(
            args.train.partial_rollout_enable,
            f"{WHERE}.in_flight says what a publication does to running requests, and finish lets them end",
            "train.partial_rollout_enable",
            True,
            f"{WHERE}.in_flight resume, or leave --train.partial_rollout_enable out",
        )
    else:
        put(args, "train.partial_rollout_enable", True, notes, f"in_flight: {part.in_flight}")
    _check_bound(args, part.selection.rollout_source.max_staleness, notes)
    oversampled = args.rollout.vllm_generate_batch_size
    refuse(
        oversampled and oversampled != args.rollout.batch_size,
        "batches wait in the queue, where their age is bounded, and not in the generator",
        "rollout.vllm_generate_batch_size",
        oversampled,
        "leave it out, or a longer --train.async_queue_size",
    )
    refuse(
        not args.vllm.num_engines,
        "generation needs engines of its own",
        "vllm.num_engines",
        args.vllm.num_engines,
        "--vllm.num_engines 1 or more",
    )
    window(args)


def _check_bound(args: Any, bound: int, notes: list[str]) -> None:
    queue = int(args.train.async_queue_size)
    refuse(queue < 1, "a queue holds a batch or more", "train.async_queue_size", queue, "--train.async_queue_size 1")
    refuse(
        bound == 0,
        "a batch is generated while another is trained, so that a bound of 0 would drop each of them",
        _BOUND.removeprefix("--"),
        bound,
        f"{_BOUND} 1, or {WHERE}.rollout_source periodic",
    )
    if queue == 1:  # OpenRLHF's default
        put(args, "train.async_queue_size", bound, notes, f"samples may be {bound} versions old: {_BOUND}")
        return
    refuse(
        bound > queue,
        f"no sample would be {bound} versions old: a queue of {queue} batches lets none be older than {queue}",
        _BOUND.removeprefix("--"),
        bound,
        f"{_BOUND} {queue}, or --train.async_queue_size {bound}",
    )


def window(args: Any) -> int:
    """Rows by which a batch comes out whole: it fills accumulation windows, on every rank as many.

    Raises ConfigurationError if ``--rollout.batch_size`` groups are no multiple of it.
    """
    size, rows = int(args.rollout.n_samples_per_prompt), int(args.train.batch_size)
    ranks = int(args.actor.num_nodes * args.actor.num_gpus_per_node)
    ranks //= int(args.ds.ring_attn_size * args.ds.tensor_parallel_size)
    multiple = lcm(rows, int(args.rollout.micro_batch_size) * ranks)
    batch = int(args.rollout.batch_size) * size
    if batch % multiple:
        raise ConfigurationError(
            f"a batch of {args.rollout.batch_size} groups of G = {size} leaves a half-filled accumulation window",
            found=f"{batch} rows; --train.batch_size {rows}, --rollout.micro_batch_size {args.rollout.micro_batch_size}"
            f" on {ranks} rank(s)",
            where="--train.batch_size" if batch % rows else "--rollout.micro_batch_size",
            remedy=f"--train.batch_size {batch}, or a divisor of it"
            if batch % rows
            else f"a --rollout.micro_batch_size by which {batch // ranks} rows come out whole",
        )
    return multiple
