"""Periodic asynchrony against OpenRLHF's own synchronous trainer: unmodified main on a CPU, the same work.

    python benchmarks/openrlhf_periodic.py --out docs/results/openrlhf_periodic.json

Two runs, one after the other, with the same placement: one rollout engine and one actor rank, which computes with one
thread. The engine is OpenRLHF's rollout actor whose decoding is simulated by sleeping (openrlhf_engine.py), so that
it takes no processor time from training: it stands for a device of its own. Ray, DeepSpeed ZeRO-2, log-probs, the
update and the publication of weights are real. OpenRLHF's loss stays on both sides. Prompts have one text, since
OpenRLHF shuffles by chance; the k-th request of a run gets the same tokens in both. A stopwatch stands around the
trainers (openrlhf_timed.py). The first step isn't counted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "openrlhf_host"))

from openrlhf_engine import WORK
from simulated import balanced, lengths

from metronome.periodic.closed_form import periodic_seconds, speed_bound, synchronous_seconds

HERE = Path(__file__).parent
TESTS = HERE.parent / "tests" / "openrlhf_host"
KINDS = ("synchronous", "periodic")
PARTS = ("step", "generation", "training", "publish", "rest")
PROMPT = "1+2+3+4+5+6+7+8+9+1+2+3+4+5+6+7"  # and the template's "="
TOKENS = len(PROMPT) + 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--size", type=int, default=8)
    parser.add_argument("--longest", type=int, default=128, help="tokens of the longest response")
    parser.add_argument("--slots", type=int, default=16, help="responses that the engine decodes at a time")
    parser.add_argument("--micro", type=int, default=16, help="rows of a pass")
    parser.add_argument("--delay", type=float, help="seconds a token; without it, generation takes as long as training")
    parser.add_argument("--steps", type=int, default=4, help="counted steps")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result = {"command": "python benchmarks/openrlhf_periodic.py " + " ".join(sys.argv[1:]), **measure(arguments)}
    print(json.dumps({key: value for key, value in result.items() if key != "runs"}, indent=2))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    from openrlhf_passes import passes

    from metronome_openrlhf.cpu import assets

    work = {key: value for key, value in vars(arguments).items() if key != "out"}
    with tempfile.TemporaryDirectory() as folder:
        made = assets.make(Path(folder), hidden=arguments.hidden, layers=arguments.layers)
        line = json.dumps({"input": PROMPT, "label": "73"}) + "\n"
        made.prompts.write_text(line * (arguments.prompts * (1 + arguments.steps)))
        beside = passes(made.model, work, TOKENS)
        if work["delay"] is None:
            found = lengths(work["prompts"] * work["size"], work["longest"])
            work["delay"] = balanced(beside["whole"], found, work["slots"])
        runs = {kind: run(kind, work, made, Path(folder)) for kind in KINDS}
    return {
        "machine": {"cores": os.cpu_count(), "processor": platform.processor() or platform.machine()},
        "work": {**work, "prompt": TOKENS, "dtype": "bfloat16", "threads": 1},
        "load_average": {kind: one["load_average"] for kind, one in runs.items()},
        **figures(runs, work, beside),
        "runs": runs,
    }


def flags(kind: str, work: Mapping[str, Any], assets: Any, folder: Path) -> list[str]:
    """OpenRLHF's command line, and what periodic mode adds to it."""
    import openrlhf_session

    rows = work["prompts"] * work["size"]
    found = openrlhf_session.stock(replace(assets, reward=HERE / "openrlhf_engine.py"), folder / kind)
    found[found.index("--reward.remote_url")] = "--train.agent_func_path"
    values = {
        "--rollout.batch_size": work["prompts"],
        "--rollout.n_samples_per_prompt": work["size"],
        "--rollout.micro_batch_size": work["micro"],
        "--rollout.max_new_tokens": work["longest"],
        "--train.batch_size": rows,
        "--train.micro_batch_size": work["micro"],
        "--data.max_len": TOKENS + work["longest"],
        "--data.max_samples": work["prompts"] * (1 + work["steps"]),
        "--actor.adam.lr": 1e-4,
    }
    for flag, value in values.items():
        found[found.index(flag) + 1] = str(value)
    found += ["--ds.grad_accum_dtype", "fp32", "--metronome.cpu"]
    return [*found, "--metronome.rollout_source", "periodic"] if kind == "periodic" else found


def run(kind: str, work: Mapping[str, Any], assets: Any, folder: Path) -> dict[str, Any]:
    import openrlhf_session

    print(f"{kind}: {1 + work['steps']} steps", file=sys.stderr, flush=True)
    before = os.getloadavg()[0]
    output = openrlhf_session.run(
        flags(kind, work, assets, folder),
        module="openrlhf_timed",
        variables={
            WORK: json.dumps({**work, "reward": str(assets.reward)}),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), str(TESTS), os.environ.get("PYTHONPATH")])),
        },
    )
    if output.returncode or len(output.steps) != 1 + work["steps"]:
        raise SystemExit(f"{kind}: ended with {output.returncode} after {len(output.steps)} steps:\n{output.tail()}")
    return {
        "load_average": [before, os.getloadavg()[0]],
        "seconds": output.seconds,
        "metrics": [dict(step) for step in output.steps],
    }


def parts_of(step: Mapping[str, Any]) -> dict[str, float]:
    """A step's seconds: waiting for samples, training, publication, and what is left."""
    found = dict(step["benchmark"])
    training = found["training"] + found.get("optimiser", 0.0)
    rest = found["step"] - found["generation"] - training - found["publish"]
    return {**{part: found[part] for part in PARTS[:-1]}, "training": training, "rest": rest}


def figures(
    runs: Mapping[str, Mapping[str, Any]], work: Mapping[str, Any], beside: Mapping[str, float]
) -> dict[str, Any]:
    """Ratios, their bound and our share; ``beside`` is what openrlhf_passes.py found."""
    counted = {kind: [step for step in one["metrics"] if step["step"] > 1] for kind, one in runs.items()}
    medians = {kind: _middle([parts_of(step) for step in steps]) for kind, steps in counted.items()}
    sync, ours = medians["synchronous"], medians["periodic"]
    came = [step["benchmark"]["arrivals"] for step in counted["synchronous"]]
    arrivals = [statistics.median(group) for group in zip(*came, strict=True)]
    longest = counted["synchronous"][0]["benchmark"]["longest"]
    shares = [one / sum(longest) for one in longest]  # rows of a pass are padded to the longest
    alone, own_passes = ([part["training"] * share for share in shares] for part in (sync, ours))
    fixed, ours_fixed = (part["publish"] + part["rest"] for part in (sync, ours))
    own = [step["benchmark"]["own"] for step in counted["periodic"]]
    share = [step["benchmark"]["own"] / step["benchmark"]["step"] for step in counted["periodic"]]
    return {
        "median_seconds": medians,
        "faster": sync["step"] / ours["step"],
        "bound": speed_bound(arrivals[-1], sync["training"]),
        # the same with what neither half can hide: publication and the rest of the step
        "bound_of_the_step": (arrivals[-1] + sync["training"] + fixed) / (max(arrivals[-1], sync["training"]) + fixed),
        "closed_form_ratio": synchronous_seconds(arrivals, alone, 0.0, fixed)
        / periodic_seconds(arrivals, alone, 0.0, fixed),
        "periodic_over_closed_form": ours["step"] / periodic_seconds(arrivals, own_passes, 0.0, ours_fixed),
        "arrivals": arrivals,
        "overhead": {
            "share": statistics.median(share),
            "share_largest": max(share),
            "seconds": statistics.median(own),
            "seconds_in_worker": statistics.median(s["benchmark"]["own_in_worker"] for s in counted["periodic"]),
        },
        "passes": {
            "end_to_end": ours["training"] / sync["training"],
            "in_one_process": beside["parts"] / beside["whole"],
            "parts": statistics.median(step["metronome/periodic/parts"] for step in counted["periodic"]),
            "groups": work["prompts"],
            "seconds": dict(beside),
        },
        "same_work": alike(runs["synchronous"]["metrics"], runs["periodic"]["metrics"]),
    }


def _middle(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {part: statistics.median(step[part] for step in steps) for part in PARTS}


def alike(one: Sequence[Mapping[str, float]], other: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """How far two runs of the same work are apart, over all steps, and the first one, before any update."""
    pairs = list(zip(one, other, strict=True))

    def apart(name: str) -> list[float]:
        return [abs(a[name] - b[name]) / max(abs(a[name]), 1e-12) for a, b in pairs]

    norms = apart("actor_grad_norm")
    return {
        "steps": len(pairs),
        "response_lengths": sorted({round(step["rollout/response_length_mean"], 3) for pair in pairs for step in pair}),
        "largest_reward_difference": max(apart("rollout/reward_mean")),
        "first_grad_norm_difference": norms[0],
        "largest_grad_norm_difference": max(norms),
    }


if __name__ == "__main__":
    sys.exit(main())
