"""Periodic asynchrony against the synchronous schedule: same placement, same work, paired and interleaved.

    python benchmarks/overlap.py --pairs 10 --out docs/results/overlap.json

Each pair runs the same period (weights, prompts, seeds, lengths) under both schedules, in alternating order, one core
a side. Beside it, in the same run: a colocated synchronous period with all cores and the default OpenMP policy, the
closed form from the period's own arrivals and work times, and what the suite itself costs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from rich.console import Console

from metronome.contracts import GroupStats, RolloutSource, StepStats
from metronome.periodic.closed_form import speed_bound
from metronome.periodic.normalizer import StreamingNormalizer
from metronome.periodic.sources import Periodic, Synchronous
from metronome.periodic.stream import GroupStream
from metronome.recipes import load_recipe
from metronome_local.build import build
from metronome_local.validation import validate

RECIPE = str(Path(__file__).with_name("overlap.yaml"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--recipe", default=RECIPE)
    parser.add_argument("--out")
    parser.add_argument("--folder", default="runs/overlap-benchmark")
    parser.add_argument("--colocated", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.colocated:
        return serve_colocated(arguments.recipe)
    result = measure(arguments)
    print(json.dumps({key: value for key, value in result.items() if key != "pairs"}, indent=2))
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(result, indent=2) + "\n")
    return 0


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    from metronome_local.paired import paired_period

    every_core = os.sched_getaffinity(0)
    parsed, settings, selection, device = validate(load_recipe(arguments.recipe), arguments.recipe)
    folder = Path(f"{arguments.folder}-{time.strftime('%Y%m%d-%H%M%S')}")
    base = Path(arguments.recipe).parent
    trainer = build(parsed, settings, selection, device, folder, Console(stderr=True), base=base)
    prompts, size = parsed.training.prompts, trainer.controller.size()
    colocated = Colocated(arguments.recipe, every_core)
    pairs: list[dict[str, Any]] = []
    try:
        trainer.start()
        for number in range(-1, arguments.pairs):  # the first one warms up and isn't counted
            sources: list[RolloutSource] = [Periodic(), Synchronous()] if number % 2 else [Synchronous(), Periodic()]
            first = (number + 1) * prompts
            pair = paired_period(trainer, sources, prompts, size, first)
            together = colocated.period(first, prompts, size)
            if number < 0:
                continue
            sync, periodic = pair.measured["synchronous"], pair.measured["periodic"]
            pairs.append(
                {
                    "synchronous": pair.seconds("synchronous"),
                    "periodic": pair.seconds("periodic"),
                    "colocated": together["generation"] + together["training"] + together["step"],
                    "ratio": pair.seconds("synchronous") / pair.seconds("periodic"),
                    "bound": speed_bound(max(sync.arrivals), sum(sync.work)),
                    "periodic_over_closed_form": periodic.seconds / periodic.closed_form("periodic"),
                    "synchronous_over_closed_form": sync.seconds / sync.closed_form("synchronous"),
                    "gradient_difference": pair.difference,
                    "groups_sampled_alike": pair.sampled_alike,
                    "generation": max(sync.arrivals),
                    "training": sum(sync.work),
                    "generation_while_training": max(periodic.arrivals),
                    "training_while_generating": sum(periodic.work),
                    "step": pair.step,
                    "publish": pair.publish,
                    "colocated_parts": together,
                    "load_average": os.getloadavg()[0],
                }
            )
            print(
                f"pair {number + 1}: synchronous {pairs[-1]['synchronous']:.2f} s, periodic "
                f"{pairs[-1]['periodic']:.2f} s, ratio {pairs[-1]['ratio']:.2f}, closed form "
                f"{pairs[-1]['periodic_over_closed_form']:.4f}, colocated {pairs[-1]['colocated']:.2f} s",
                file=sys.stderr,
            )
        overhead = suite_overhead(trainer, prompts, size)
    finally:
        colocated.close()
        trainer.close()
        trainer.parts.progress.close()
    middle = {key: statistics.median(pair[key] for pair in pairs) for key in pairs[0] if key != "colocated_parts"}
    own = sum(overhead.values())
    return {
        "command": "python benchmarks/overlap.py " + " ".join(sys.argv[1:]),
        "machine": {"cores": os.cpu_count(), "processor": platform.processor() or platform.machine()},
        "work": {
            "prompts": prompts,
            "group_size": size,
            "slots": parsed.sampling.slots,
            "lengths": parsed.sampling.fixed_lengths,
        },
        "median": middle,
        "ratio_min_max": [min(p["ratio"] for p in pairs), max(p["ratio"] for p in pairs)],
        "colocated_over_periodic": statistics.median(p["colocated"] / p["periodic"] for p in pairs),
        "largest_deviation_from_closed_form": max(abs(p["periodic_over_closed_form"] - 1) for p in pairs),
        "suite_seconds_a_period": overhead,
        "suite_share_of_a_period": own / middle["periodic"],
        "pairs": pairs,
    }


def suite_overhead(trainer: Any, prompts: int, size: int) -> dict[str, float]:
    """Seconds that the suite itself costs in one period: queue, normaliser, loss beyond plain PPO, controller."""
    import torch

    from metronome.a3po.loss import A3po
    from metronome.a3po.ppo import Ppo
    from metronome.contracts import LossBatch
    from metronome.sagc.controller import SagcController
    from metronome.sagc.options import SagcOptions

    def median(action: Any, repeats: int = 30) -> float:
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            action()
            times.append(time.perf_counter() - started)
        return statistics.median(times)

    def queue() -> None:
        def finished(_ticket: Any) -> Future[list[int]]:
            future: Future[list[int]] = Future()
            future.set_result([0])
            return future

        stream: GroupStream[int, list[int]] = GroupStream(Periodic(), lambda i: i, finished, lambda g: g)
        stream.open_period(0, prompts)
        for _ in stream.arrivals():
            pass
        stream.close_period()

    def normaliser() -> None:
        one = StreamingNormalizer("token-mean", expected_rows=prompts * size, max_tokens=12)
        for _ in range(prompts):
            one.row_weights([8] * size)
        one.final_factor()

    tokens = 8 * size
    theta = torch.randn(tokens)
    batch = LossBatch(
        log_probs=theta.clone().requires_grad_(),
        behavior_log_probs=theta + 0.01,
        old_log_probs=theta.clone(),
        advantages=torch.randn(tokens),
        mask=torch.ones(tokens, dtype=torch.bool),
        staleness=torch.full((tokens,), 2),
        cu_seqlens=torch.tensor([0, tokens]),
    )

    def loss(one: Any) -> float:
        return median(lambda: one(batch).loss.sum().backward())

    controller = SagcController(SagcOptions(), seed=0)
    draw = random.Random(0)
    stats = StepStats(
        0, [GroupStats(16, [draw.randint(4, 12) for _ in range(16)], [False] * 16, [0.5] * 16, 0, 1)] * prompts
    )
    return {
        "queue": median(queue),
        "normaliser": median(normaliser),
        "loss_beyond_ppo": max(0.0, loss(A3po()) - loss(Ppo())) * prompts,
        "controller": median(lambda: controller.observe(stats)),
    }


class Colocated:
    """A process of its own that generates and then trains with every core; it waits while others are measured."""

    def __init__(self, recipe: str, cores: set[int]) -> None:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("OMP_")}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--colocated", "--recipe", recipe],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )

    def period(self, first: int, prompts: int, size: int) -> dict[str, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([first, prompts, size]), file=self._process.stdin, flush=True)
        answer: dict[str, float] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def serve_colocated(recipe_path: str) -> int:
    """The colocated side: one model, the same engine and gradient code, all threads, nothing overlapped."""
    import torch

    from metronome_local.engine import Continuation, Engine
    from metronome_local.gradient import Gradient, TrainGroup
    from metronome_local.logprobs import log_probs_of
    from metronome_local.models import eos_ids, load_tokenizer, policy_model
    from metronome_local.rollouts import Row
    from metronome_local.scoring import advantages
    from metronome_local.tasks import load_task

    recipe, _, selection, _ = validate(load_recipe(recipe_path), recipe_path)
    tokenizer = load_tokenizer(recipe.model.name)
    task = load_task(recipe.task, tokenizer, recipe.training.seed, Path(recipe_path).parent)
    model = policy_model(recipe.model)
    optimiser = torch.optim.AdamW(model.parameters(), lr=recipe.training.lr, fused=True)
    log_probs = log_probs_of(model, selection.attention, 1.0, "float32")
    gradient = Gradient(model, log_probs, selection.loss, recipe.training, None, max_tokens=21, on_policy=True)
    engine = Engine(model, recipe.sampling.slots, eos_ids(model, tokenizer), 1.0)
    assert recipe.sampling.fixed_lengths is not None
    for line in sys.stdin:
        first, prompts, size = json.loads(line)
        started = time.monotonic()
        chosen = [task.prompt(first + i) for i in range(prompts)]
        for place, prompt in enumerate(chosen):
            for member in range(size):
                rng = random.Random(f"{recipe.training.seed} {prompt.index} {member}")
                length = rng.randint(*recipe.sampling.fixed_lengths)
                engine.submit(Continuation((place, member), prompt.ids, length, rng, ignore_eos=True))
        sampled: dict[tuple[int, int], Any] = {}
        while engine.busy:
            sampled.update(engine.step())
        generated = time.monotonic()
        gradient.begin(prompts * size)
        for place, prompt in enumerate(chosen):
            rows = [Row(list(prompt.ids)) for _ in range(size)]
            for member, row in enumerate(rows):
                row.add_sampled(sampled[place, member])
            texts = [tokenizer.decode(row.response) for row in rows]
            values = advantages(task.rewards([prompt] * size, texts), "group-std")
            gradient.add([TrainGroup(place, [[row] for row in rows], values)], 0)
        gradient.finish()
        trained = time.monotonic()
        torch.nn.utils.clip_grad_norm_(gradient.parameters, 1.0)
        optimiser.step()
        ended = time.monotonic()
        answer = {"generation": generated - started, "training": trained - generated, "step": ended - trained}
        print(json.dumps({**answer, "threads": torch.get_num_threads()}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
