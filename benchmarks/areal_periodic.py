"""Periodic asynchrony against AReaL's own loop with ``max_head_offpolicyness=0``, on a CPU, the same work.

    python benchmarks/areal_periodic.py --out docs/results/areal_periodic.json

Two runs, one after the other, in one process with the same placement: one rollout engine and one trainer rank, which
computes with one thread. The engine's decoding is simulated by sleeping (areal_timed.py), so that it takes no processor
time from training: it stands for a device of its own. AReaL's ``PPOTrainer.train``, its dispatcher, workflow, FSDP
engine and loss, log-probs, the update and the publication of weights are real; stock is AReaL's own actor with its
packs mended. The k-th request of a run gets the same tokens in both. The first step isn't counted.

AReaL's polls in these runs, the same on both sides: its rollout thread takes new prompts in every 50 ms while others
run. Its prepare_batch looks every second whether to submit more, but is woken by every result. None of its others
stand here: half a second between two looks of a paused rollout (nothing runs at a publication), half a second of an
interrupted request, and a second and more of a weight update through files, which the room does without and a run on
servers with ``actor.weight_update_mode=xccl``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "areal_host"))

from metronome.periodic.closed_form import periodic_seconds, speed_bound, synchronous_seconds

KINDS = ("synchronous", "periodic")
PARTS = ("step", "waiting", "training", "own", "publication", "rest")
PROMPT = "1+2+3+4+5+6+7+8+9+1+2+3+4+5+6+{}=?"
NORM = "ppo_actor/update/grad_norm"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--size", type=int, default=8)
    parser.add_argument("--longest", type=int, default=128, help="tokens of the longest response")
    parser.add_argument("--slots", type=int, default=12, help="responses that the engine decodes at a time")
    parser.add_argument("--pack", type=int, default=1024, help="tokens of a pass: mb_spec.max_tokens_per_mb")
    parser.add_argument("--delay", type=float, help="seconds a token; without it, generation takes as long as training")
    parser.add_argument("--steps", type=int, default=4, help="counted steps")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    work = {key: value for key, value in vars(arguments).items() if key != "out"}
    with contextlib.redirect_stdout(sys.stderr):  # AReaL's log
        found = measure(work)
    result = {"command": "python benchmarks/areal_periodic.py " + " ".join(sys.argv[1:]), **found}
    print(json.dumps({key: value for key, value in result.items() if key != "runs"}, indent=2))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def measure(work: dict[str, Any]) -> dict[str, Any]:
    import areal_room as room  # of tests/areal_host; attaches the CPU room
    import torch
    from areal_passes import passes
    from simulated import balanced, lengths

    from metronome_areal.cpu import assets

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        assets.make(folder, hidden=work["hidden"], layers=work["layers"])
        rows = prompts(work)
        work["tokens"] = tokens(folder, rows)
        beside = passes(room.configuration(folder, keys("synchronous", work)), work)
        if work["delay"] is None:
            found = lengths(work["prompts"] * work["size"], work["longest"])
            work["delay"] = balanced(beside["whole"], found, work["slots"])
        runs = {kind: run(kind, work, folder, rows) for kind in KINDS}
    return {
        "machine": {"cores": os.cpu_count(), "processor": platform.processor() or platform.machine()},
        "work": {**work, "dtype": "float32", "threads": 1},
        "load_average": {kind: one["load_average"] for kind, one in runs.items()},
        **figures(runs, work, beside),
        "runs": runs,
    }


def prompts(work: Mapping[str, Any]) -> list[dict[str, Any]]:
    """As many as the steps take, all of one length."""
    texts = [PROMPT.format(100 + number) for number in range(work["prompts"] * (1 + work["steps"]))]
    return [{"messages": [{"role": "user", "content": text}], "answer": "none"} for text in texts]


def tokens(folder: Path, rows: Sequence[Mapping[str, Any]]) -> int:
    """Tokens of a prompt."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    text = tokenizer.apply_chat_template(rows[0]["messages"], tokenize=False, add_generation_prompt=True)
    return len(tokenizer(text)["input_ids"])


def keys(kind: str, work: Mapping[str, Any]) -> dict[str, Any]:
    """AReaL's settings over those of tests/areal_host, and what periodic mode adds to them."""
    found: dict[str, Any] = {
        "total_train_steps": 1 + work["steps"],
        "gconfig.n_samples": work["size"],
        "gconfig.max_new_tokens": work["longest"],
        "train_dataset.batch_size": work["prompts"],
        "rollout.consumer_batch_size": work["prompts"],
        "rollout.max_concurrent_rollouts": work["prompts"],
        "rollout.max_head_offpolicyness": 0,
        "rollout.request_timeout": 3600,
        "actor.max_new_tokens": work["longest"],
        "actor.mb_spec.max_tokens_per_mb": work["pack"],
        "actor.adv_norm": {"mean_level": "group", "std_level": "group", "group_size": work["size"]},
        "actor.optimizer.lr": 1e-4,
        # ratios to the actor's own log-probs: the simulated engine has none
        "actor.use_decoupled_loss": False,
        "actor.recompute_logprob": True,
        "actor.prox_logp_method": "recompute",
    }
    return found | ({"metronome.rollout_source": "periodic"} if kind == "periodic" else {})


def run(kind: str, work: Mapping[str, Any], folder: Path, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    import areal_room as room
    import areal_timed

    print(f"{kind}: {1 + work['steps']} steps", file=sys.stderr, flush=True)
    before = os.getloadavg()[0]

    class Trainer(areal_timed.Trainer):
        pass

    Trainer.work = dict(work)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with room.trainer(room.configuration(folder, keys(kind, work)), Trainer) as one:
        one.train(workflow=room.workflow(one.config))
    if len(one.steps) != 1 + work["steps"]:
        raise SystemExit(f"{kind}: ended after {len(one.steps)} steps")
    return {"load_average": [before, os.getloadavg()[0]], "steps": one.steps}


def figures(
    runs: Mapping[str, Mapping[str, Any]], work: Mapping[str, Any], beside: Mapping[str, float]
) -> dict[str, Any]:
    """Ratios, their bound and our share; ``beside`` is what areal_passes.py found."""
    counted = {kind: one["steps"][1:] for kind, one in runs.items()}
    medians = {kind: _middle([step["seconds"] for step in steps]) for kind, steps in counted.items()}
    sync, ours = medians["synchronous"], medians["periodic"]
    came = [sorted(step["groups"]) for step in counted["synchronous"]]
    arrivals = [statistics.median(time for time, _ in group) for group in zip(*came, strict=True)]
    size = [statistics.median(tokens for _, tokens in group) for group in zip(*came, strict=True)]
    shares = [one / sum(size) for one in size]
    alone, own_passes = ([(part["training"] + part["own"]) * share for share in shares] for part in (sync, ours))
    fixed, ours_fixed = (part["publication"] + part["rest"] for part in (sync, ours))
    trained = sum(alone)
    share = [step["seconds"]["own"] / step["seconds"]["step"] for step in counted["periodic"]]
    return {
        "median_seconds": medians,
        "faster": sync["step"] / ours["step"],
        "bound": speed_bound(arrivals[-1], trained),
        # the same with what neither half can hide: publication and the rest of the step
        "bound_of_the_step": (arrivals[-1] + trained + fixed) / (max(arrivals[-1], trained) + fixed),
        "closed_form_ratio": synchronous_seconds(arrivals, alone, 0.0, fixed)
        / periodic_seconds(arrivals, alone, 0.0, fixed),
        "periodic_over_closed_form": ours["step"] / periodic_seconds(arrivals, own_passes, 0.0, ours_fixed),
        "arrivals": arrivals,
        "overhead": {"share": statistics.median(share), "share_largest": max(share), "seconds": ours["own"]},
        "passes": {
            "end_to_end": ours["training"] / sync["training"],
            "in_one_process": beside["parts"] / beside["whole"],
            "parts": statistics.median(step["metrics"]["metronome/periodic/parts"] for step in counted["periodic"]),
            "groups": work["prompts"],
            "seconds": dict(beside),
        },
        "same_work": alike(runs["synchronous"]["steps"], runs["periodic"]["steps"]),
    }


def _middle(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {part: statistics.median(step[part] for step in steps) for part in PARTS}


def alike(one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How far two runs of the same work are apart, over all steps, and the first one, before any update."""
    pairs = [(a["metrics"], b["metrics"]) for a, b in zip(one, other, strict=True)]

    def apart(name: str) -> list[float]:
        return [abs(a[name] - b[name]) / max(abs(a[name]), 1e-12) for a, b in pairs]

    norms = apart(NORM)
    return {
        "steps": len(pairs),
        "grad_norms": [a[NORM] for a, _ in pairs],
        "largest_reward_difference": max(apart("rollout/reward")),
        "first_grad_norm_difference": norms[0],
        "largest_grad_norm_difference": max(norms),
    }


if __name__ == "__main__":
    sys.exit(main())
