"""verl's real FSDP2 training worker in one process: shared prompts and A-3PO against what verl does without them.

    python benchmarks/verl_update.py --out docs/results/verl_update.json

A random model of SmolLM2-135M's shape in float32, sdpa on both sides. The update is verl's ``train_mini_batch`` with
one optimiser step; a pass takes half of verl's rows (memory), which is more than the whole shared group. verl's rows
are computed both ways that it knows: packed into one row (``use_remove_padding``, its default; without flash
attention torch computes the whole square and masks it) and as equally long rows, which have no padding; the faster
one is the other side. Ways take turns, after one round that isn't counted; the packed way runs once. The
proximal log-probs are timed on the same batch against verl's pass for old log-probs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import verl_worker
from bench_common import in_turns, save_smollm2
from verl_worker import Groups, worker

from metronome.shared_prompt.cost import token_ratio


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="512,8,64", help="prompt,responses,response length")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result = {
        "command": "python benchmarks/verl_update.py " + " ".join(sys.argv[1:]),
        **measure(tuple(map(int, arguments.shape.split(","))), arguments.layers, arguments.repeats, arguments.threads),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    return 0


def measure(shape: Sequence[int], layers: int, repeats: int, threads: int) -> dict[str, Any]:
    from verl.utils import tensordict_utils as tu
    from verl.workers.engine_workers import TrainingWorker

    from metronome.shared_prompt.select import SharedPromptAttention
    from metronome_verl.accumulate import AccumulatingWorker
    from metronome_verl.engine import building

    torch.set_num_threads(threads)
    prompt, count, length = shape
    with tempfile.TemporaryDirectory() as folder:
        model = save_smollm2(Path(folder), layers)
        budget = max(-(-count // 2) * (prompt + length), prompt + count * length)
        stock = worker(TrainingWorker, model, budget)
        with building(SharedPromptAttention()) as engines:
            shared = worker(AccumulatingWorker, model, budget)
    assert engines == [shared.engine]
    shared.attends = True  # as our actor worker tells it
    groups = Groups(1, prompt, count, length, 49152)
    metrics: dict[str, Any] = {}
    first: dict[str, float] = {}  # gradient norms; the first updates of both workers are of the same weights

    def update(way: str, made: Any, **settings: Any) -> Callable[[], None]:
        def run() -> None:  # counts of shared attention start anew with each update
            metrics[way] = tu.get(made.train_mini_batch(groups.batch(**settings)), "metrics")
            first.setdefault(way, float(torch.tensor(metrics[way]["grad_norm"]).mean()))

        return run

    def log_probs(made: Any, **settings: Any) -> Callable[[], None]:
        # as verl's trainer asks for old log-probs: with entropies, without a loss
        return lambda: made.infer_batch(groups.batch(compute_loss=False, calculate_entropy=True, **settings))

    updates = in_turns(
        {
            "rows": update("rows", stock, use_remove_padding=False),
            "packed": update("packed", stock, use_remove_padding=True),
            "shared": update("shared", shared),
        },
        repeats,
        once="packed",
    )
    passes = in_turns(
        {
            "rows": log_probs(stock, use_remove_padding=False),
            "packed": log_probs(stock, use_remove_padding=True),
            "shared": log_probs(shared),
        },
        repeats,
        once="packed",
        warm=True,  # by the updates
    )
    fed, separate = (metrics["shared"][f"metronome/attention/{key}"] for key in ("tokens_fed", "tokens_separate"))
    return {
        "machine": {"cores": os.cpu_count(), "processor": platform.processor() or platform.machine()},
        "model": {"shape": "SmolLM2-135M", "layers": layers, "weights": "random", "dtype": "float32"},
        "shape": list(shape),
        "tokens_a_pass": budget,
        "threads": threads,
        "repeats": repeats,
        "torch": torch.__version__,
        "clock": "wall seconds, medians of ways in turns",
        "load_average": os.getloadavg()[0],
        "tokens": {"separate": separate, "fed": fed, "ratio": separate / fed},
        "theory_tokens": token_ratio(prompt, [length] * count),
        "update": compared(updates),
        "old_log_prob": compared(passes),
        "first_grad_norm": {way: first[way] for way in ("rows", "shared")},
        "a3po": proximal(groups, min(statistics.median(passes[way]) for way in ("packed", "rows"))),
    }


def compared(times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Medians, and how often the shared way fits into each of verl's own and into the faster of them."""
    middle = {way: statistics.median(seconds) for way, seconds in times.items()}
    ratios = {way: middle[way] / middle["shared"] for way in ("packed", "rows")}
    return {
        "seconds": middle,
        "all_seconds": {way: list(seconds) for way, seconds in times.items()},
        "over_packed": ratios["packed"],
        "over_rows": ratios["rows"],
        "over_the_faster": min(ratios.values()),
    }


def proximal(groups: Groups, forward: float, repeats: int = 31) -> dict[str, Any]:
    """What A-3PO computes instead of ``forward`` seconds: the interpolation, and its whole loss beside verl's own."""
    from verl.workers.config import FSDPActorConfig, FSDPEngineConfig
    from verl.workers.utils.losses import ppo_loss

    from metronome.a3po.loss import A3po
    from metronome.a3po.proximal import alpha, loglinear
    from metronome_verl.loss import HostLoss

    config = verl_worker.actor_config(FSDPEngineConfig(strategy="fsdp2"), FSDPActorConfig)
    size = {"dp_size": 1, "batch_num_tokens": sum(map(len, groups.responses)), "metronome_version": 2}
    data = groups.batch(**size)
    theta = (data["input_ids"].values() % 7 - 9.0).requires_grad_()
    output = {"log_probs": torch.nested.nested_tensor_from_jagged(theta, data["input_ids"].offsets())}
    behavior = torch.cat(groups.behavior)
    target, staleness = behavior + 0.05, torch.full(behavior.shape, 2)
    ours = HostLoss(config, A3po())

    def whole(loss: Callable[..., Any]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(loss(model_output=output, data=data, dp_group=None)[0], theta)

    times = in_turns(
        {
            "interpolation": lambda: loglinear(behavior, target, alpha(staleness, strict=False)),
            "loss": whole(ours),
            "loss_of_verl": whole(lambda **given: ppo_loss(config, **given)),
        },
        repeats,
    )
    middle = {way: statistics.median(seconds) for way, seconds in times.items()}
    return {
        "tokens": behavior.numel(),
        "seconds": {"old_log_prob": forward, **middle},
        "old_log_prob_over_interpolation": forward / middle["interpolation"],
        # versions, metrics and checks included
        "old_log_prob_over_all_that_the_loss_adds": forward / max(middle["loss"] - middle["loss_of_verl"], 1e-6),
    }


if __name__ == "__main__":
    sys.exit(main())
