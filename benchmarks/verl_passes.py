"""What training a batch group by group costs in verl's worker beside one pass over it all, and what of that is ours."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from verl_worker import Groups, worker


def passes(model: Path, groups: int, prompt: int, size: int, length: int, repeats: int = 3) -> dict[str, float]:
    """Seconds of one update: verl's ``train_mini_batch`` over the batch, and ``accumulate`` per group with one step.

    Own is what ``accumulate`` and ``step`` take beyond the engine's passes, its optimiser and its schedule.
    """
    from verl.workers.engine_workers import TrainingWorker

    from metronome_verl.accumulate import AccumulatingWorker

    torch.set_num_threads(1)
    stock, ours = worker(TrainingWorker, model), worker(AccumulatingWorker, model)
    ours.longest = length
    data = Groups(groups, prompt, size, length, int(ours.engine.module.config.vocab_size))
    inside = 0.0

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            nonlocal inside
            started = time.perf_counter()
            found = call(*arguments, **options)
            inside += time.perf_counter() - started
            return found

        return run

    for name in ("forward_backward_batch", "optimizer_step", "lr_scheduler_step"):
        setattr(ours.engine, name, timed(getattr(ours.engine, name)))
    whole, parts, own = [], [], []
    for _ in range(repeats + 1):
        batch = data.batch(use_remove_padding=False)
        pieces = [data.batch([group], use_remove_padding=False) for group in range(groups)]
        started = time.perf_counter()
        stock.train_mini_batch(batch)
        between, inside = time.perf_counter(), 0.0
        for piece in pieces:
            ours.accumulate(piece)
        ours.step(data.rows)
        ended = time.perf_counter()
        whole.append(between - started)
        parts.append(ended - between)
        own.append(ended - between - inside)
    return {
        name: statistics.median(seconds[1:]) for name, seconds in (("whole", whole), ("parts", parts), ("own", own))
    }
