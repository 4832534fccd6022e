"""Periodic asynchrony against verl's own trainers: unmodified main_ppo on a CPU, the same work, one run after another.

    python benchmarks/verl_periodic.py --out docs/results/verl_periodic.json

Three runs of the same prompts, seeds, lengths and model: verl's separate trainer made synchronous (no warm-up batch,
one update and one publication a batch, so that one half always waits for the other), verl's colocated trainer, and
ours in periodic mode, placed as the separate one: one rollout replica, one trainer rank, a thread each. Generation is
a real model slowed down to ``--delay`` seconds a token, which stands for a rollout device. verl's replay buffer looks
for finished groups every two seconds; that would flatter us, so verl's runs look every 20 ms in even steps
(verl_sampler.py) and both are told. The first step isn't counted. A finished run is kept in ``--folder`` and not
repeated; remove the folder to measure again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from metronome.periodic.closed_form import periodic_seconds, speed_bound, synchronous_seconds

HERE = Path(__file__).parent
ACTOR, ROLLOUT, V1 = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "trainer.v1"
KINDS = ("separate", "periodic", "colocated")
PARTS = ("step", "generation", "training", "publish", "rest")
MARK = "groups-arrived "
PROMPT = 23  # tokens of a prompt of the tiny data


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--size", type=int, default=8)
    parser.add_argument("--length", type=int, default=64, help="tokens of every response")
    parser.add_argument("--slots", type=int, default=8, help="responses that the replica decodes at a time")
    parser.add_argument(
        "--delay", type=float, help="least seconds of a decode step; without it, generation takes as long as training"
    )
    parser.add_argument("--steps", type=int, default=4, help="counted steps; verl's separate run makes twice as many")
    parser.add_argument("--folder", type=Path, default=Path("runs/verl-periodic-benchmark"))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result = {"command": "python benchmarks/verl_periodic.py " + " ".join(sys.argv[1:]), **measure(arguments)}
    print(json.dumps({key: value for key, value in result.items() if key != "runs"}, indent=2))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    from pyarrow import concat_tables, parquet

    from metronome_verl.cpu import assets

    work = {key: value for key, value in vars(arguments).items() if key not in ("folder", "out")}
    folder = arguments.folder.absolute()
    tiny = assets.make(folder / "assets", hidden=arguments.hidden, layers=arguments.layers)
    rows = parquet.read_table(tiny.train)  # one epoch must hold every step
    copies = arguments.prompts * (2 * arguments.steps + 1) // len(rows) + 1
    parquet.write_table(concat_tables([rows] * copies), tiny.train)

    def passes() -> dict[str, Any]:
        from verl_passes import passes

        return {"seconds": passes(tiny.model, arguments.prompts, PROMPT, arguments.size, arguments.length)}

    beside = kept(folder / "passes.json", work, passes)["seconds"]
    if arguments.delay is None:
        work["delay"] = balanced(beside["whole"], work)
    runs = {kind: kept(folder / f"{kind}.json", work, partial(run, kind, work, folder / "assets")) for kind in KINDS}
    return {
        "machine": {"cores": os.cpu_count(), "processor": platform.processor() or platform.machine()},
        "work": {**work, "dtype": "float32", "threads_a_process": 1},
        "load_average": {kind: run["load_average"] for kind, run in runs.items()},
        **figures(runs, arguments.prompts, beside),
        "runs": runs,
    }


def balanced(update: float, work: Mapping[str, Any]) -> float:
    """Seconds a token with which generation takes as long as training: an update, a third of it for old log-probs."""
    decode_steps = work["prompts"] * work["size"] / work["slots"] * work["length"]
    return round(update * 4 / 3 / decode_steps, 4)


def kept(path: Path, work: Mapping[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What was measured before for the same work, or is now."""
    if path.is_file():
        found: dict[str, Any] = json.loads(path.read_text())
        if found["work"] == work:
            return found
    found = {"work": dict(work), **make()}
    path.write_text(json.dumps(found))
    return found


def overrides(kind: str, work: Mapping[str, Any], assets: Path) -> list[str]:
    """verl's command line: what the CPU room needs, the work, and where generation and training stand."""
    from metronome_verl.command import spelt
    from metronome_verl.smoke import CPU_ROOM

    steps = 2 * work["steps"] if kind == "separate" else work["steps"]
    args = {
        key: value.replace("{assets}", str(assets)) if isinstance(value, str) else value
        for key, value in CPU_ROOM.items()
    }
    args |= {
        f"{ROLLOUT}.nnodes": 0 if kind == "colocated" else 1,
        f"{ROLLOUT}.n_gpus_per_node": 1,
        f"{ROLLOUT}.checkpoint_engine.backend": "naive" if kind == "colocated" else "metronome_ray",
        "algorithm.adv_estimator": "grpo",
        "data.train_batch_size": work["prompts"],
        "data.max_response_length": work["length"],
        "data.shuffle": False,
        "actor_rollout_ref.model.use_remove_padding": False,
        f"{ACTOR}.ppo_mini_batch_size": work["prompts"],
        f"{ACTOR}.use_dynamic_bsz": True,
        f"{ACTOR}.ppo_max_token_len_per_gpu": 8192,
        f"{ACTOR}.optim.lr": 1e-5,
        f"{ROLLOUT}.n": work["size"],
        f"{ROLLOUT}.ignore_eos": True,
        f"{ROLLOUT}.calculate_log_probs": True,
        f"{ROLLOUT}.max_num_seqs": work["slots"],
        f"{ROLLOUT}.log_prob_use_dynamic_bsz": True,
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu": 8192,
        f"+{ROLLOUT}.engine_kwargs.metronome_hf.seconds_per_token": work["delay"],
        "trainer.total_training_steps": 1 + steps,
        f"{V1}.trainer_mode": {"separate": "separate_async", "colocated": "sync", "periodic": "metronome"}[kind],
    }
    if kind == "periodic":
        args["+metronome.rollout_source"] = "periodic"
    else:
        args |= {
            f"{V1}.sampler.custom_sampler.path": str(HERE / "verl_sampler.py"),
            f"{V1}.sampler.custom_sampler.name": kind.capitalize(),
        }
    if kind == "separate":
        args |= {
            "actor_rollout_ref.hybrid_engine": False,
            f"{V1}.separate_async.num_warmup_batches": 0,
            f"{V1}.separate_async.parameter_sync_step": 1,
        }
    return [f"{key}={spelt(value)}" for key, value in args.items()]


def run(kind: str, work: Mapping[str, Any], assets: Path) -> dict[str, Any]:
    sys.path.insert(0, str(HERE.parent / "tests" / "verl_host"))
    from ray_session import run_main_ppo, shared_session

    session = shared_session(lambda line: print(f"{kind}: {line}", file=sys.stderr, flush=True))
    before = os.getloadavg()[0]
    # verl 0.9.1's separate trainer without hybrid_engine raises at its default log level (PATCHES.md)
    output = run_main_ppo(overrides(kind, work, assets), session, variables={"VERL_LOGGING_LEVEL": "WARNING"})
    if output.returncode:
        raise RuntimeError(f"{kind}: main_ppo ended with {output.returncode}:\n{output.tail()}")
    return {
        "load_average": [before, os.getloadavg()[0]],
        "seconds": output.wall_seconds,
        "metrics": list(output.metrics),
        "arrivals": arrivals_of(output.text),
    }


def arrivals_of(text: str) -> dict[str, list[float]]:
    """``{step: seconds}`` that verl_sampler.py printed."""
    found = (json.loads(line) for line in re.findall(re.escape(MARK) + r"(\{.*?\})", text))
    return {str(one["step"]): one["seconds"] for one in found}


def parts_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """A step's seconds by verl's own timers: waiting for samples, training, publication, and what is left."""
    timers = {key.removeprefix("timing_s/"): value for key, value in metrics.items() if key.startswith("timing_s/")}
    training = sum(timers.get(name, 0.0) for name in ("old_log_prob", "adv", "update_actor", "optimizer_step"))
    waiting = metrics.get("metronome/periodic/seconds_waiting", 0.0) + timers["gen"]
    found = {"step": timers["step"], "generation": waiting, "training": training, "publish": timers["update_weights"]}
    return {**found, "rest": found["step"] - waiting - training - found["publish"]}


def middle(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each part over steps."""
    found = [parts_of(step) for step in steps]
    return {name: statistics.median(one[name] for one in found) for name in PARTS}


def figures(runs: Mapping[str, Mapping[str, Any]], prompts: int, beside: Mapping[str, float]) -> dict[str, Any]:
    """Ratios, their bound and the suite's share; ``beside`` is what verl_passes.py found."""
    counted = {kind: [step for step in run["metrics"] if step["step"] > 1] for kind, run in runs.items()}
    even = {kind: [step for step in steps if step["step"] % 2 == 0] for kind, steps in counted.items()}
    odd = {kind: [step for step in steps if step["step"] % 2] for kind, steps in counted.items()}
    medians = {
        "periodic": middle(counted["periodic"]),
        "separate": middle(odd["separate"]),
        "separate_short_poll": middle(even["separate"]),
        "colocated": middle(odd["colocated"]),
        "colocated_short_poll": middle(even["colocated"]),
    }
    sync, ours = medians["separate_short_poll"], medians["periodic"]
    came = [runs["separate"]["arrivals"][str(int(step["step"]))] for step in even["separate"]]
    arrivals = [statistics.median(group) for group in zip(*came, strict=True)]
    alone, beside_it = [sync["training"] / prompts] * prompts, [ours["training"] / prompts] * prompts
    own = [step["metronome/periodic/overhead"] for step in counted["periodic"]]
    closed = periodic_seconds(arrivals, beside_it, 0.0, ours["publish"] + ours["rest"])
    fixed = sync["publish"] + sync["rest"]
    return {
        "median_seconds": medians,
        "faster_than": {kind: medians[kind]["step"] / ours["step"] for kind in medians if kind != "periodic"},
        "bound": speed_bound(arrivals[-1], sync["training"]),
        # the same with what neither half can hide: publication and the rest of the step
        "bound_of_the_step": (arrivals[-1] + sync["training"] + fixed) / (max(arrivals[-1], sync["training"]) + fixed),
        "closed_form_ratio": synchronous_seconds(arrivals, alone, 0.0, fixed)
        / periodic_seconds(arrivals, alone, 0.0, fixed),
        "periodic_over_closed_form": ours["step"] / closed,
        "arrivals": arrivals,
        "overhead": {
            "trainer_share": statistics.median(own),
            "trainer_share_largest": max(own),
            "late_seconds": statistics.median(s["metronome/periodic/seconds_late"] for s in counted["periodic"]),
            "worker_seconds": beside["own"],
            "share": statistics.median(own) + beside["own"] / ours["step"],
        },
        "passes": {
            "end_to_end": ours["training"] / sync["training"],
            "in_one_process": beside["parts"] / beside["whole"],
            "parts": statistics.median(step["metronome/periodic/parts"] for step in counted["periodic"]),
            "seconds": dict(beside),
        },
        "same_work": alike(runs["separate"]["metrics"], runs["periodic"]["metrics"]),
    }


def alike(one: Sequence[Mapping[str, float]], other: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """How far two runs of the same work are apart, over the steps that both made."""
    pairs = list(zip(one, other, strict=False))
    lengths = {step[f"response_length/{how}"] for pair in pairs for step in pair for how in ("min", "max")}
    return {
        "steps": len(pairs),
        "response_lengths": sorted(lengths),
        "largest_score_difference": max(abs(a["critic/score/mean"] - b["critic/score/mean"]) for a, b in pairs),
        "largest_grad_norm_difference": max(
            abs(a["actor/grad_norm"] - b["actor/grad_norm"]) / a["actor/grad_norm"] for a, b in pairs
        ),
    }


if __name__ == "__main__":
    sys.exit(main())
