"""AReaL's FSDP engine in one process: shared prompts and A-3PO against what it does without them.

    python benchmarks/areal_update.py --out docs/results/areal_update.json

A random model of SmolLM2-135M's shape in float32, sdpa on both sides. The update is AReaL's own of one group with one
optimiser step, with its GRPO loss; old log-probs are its actor's ``compute_logp``. Stock is AReaL's actor, whose packs
are mended: without that its rows see each other under sdpa, which is another computation. A pack of it takes half of
the rows (memory), which is more than the whole shared group; the default shape fills AReaL's pages of 256 tokens
without padding. A first round isn't counted: from the same weights on both sides it gives log-probs and, with one
update, gradients to compare, and makes the first-use check. Then ways take turns. The proximal log-probs are timed on
as many tokens against the forward of ``prox_logp_method=recompute``, which they make needless.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TQDM_DISABLE", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "areal_host"))

import areal_engines as engines
import areal_room as room  # of tests/areal_host; attaches the CPU room
import torch
from bench_common import in_turns, save_smollm2

from metronome.shared_prompt.cost import token_ratio

VOCABULARY = 49152


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="512,8,64", help="prompt,responses,response length")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    shape = tuple(map(int, arguments.shape.split(",")))
    with contextlib.redirect_stdout(sys.stderr):  # AReaL's log
        found = measure(shape, arguments.layers, arguments.repeats, arguments.threads)
    text = json.dumps({"command": "python benchmarks/areal_update.py " + " ".join(sys.argv[1:]), **found}, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    return 0


def measure(shape: Sequence[int], layers: int, repeats: int, threads: int) -> dict[str, Any]:
    prompt, count, length = shape
    if count % 2:
        raise SystemExit(f"--shape: {count} responses; AReaL's side takes half of them a pack, so give an even number")
    pack = (prompt + length) * count // 2
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        config = configuration(folder, shape, pack, {})
        save_smollm2(folder / "model", layers)  # with the tiny model's tokenizer
        packed = stack.enter_context(engines.stock(config))
        sharing = {"metronome.attention": "shared_prompt"}
        shared = stack.enter_context(engines.ours(configuration(folder, shape, pack, sharing)))
        torch.set_num_threads(threads)
        rows = group(shape)
        first, second = log_probs(packed, rows), log_probs(shared, rows)
        trained = rows["loss_mask"][:, 1:].bool()
        same = {
            "log_probs": float((first - second)[:, :-1][trained].abs().max()),
            **same_gradients(packed, shared, rows, first),
        }
        updates = in_turns(
            {"packed": lambda: update(packed, rows, first), "shared": lambda: update(shared, rows, first)},
            repeats,
            warm=True,
        )
        passes = in_turns(
            {"packed": lambda: log_probs(packed, rows), "shared": lambda: log_probs(shared, rows)}, repeats, warm=True
        )
        fed, whole = tokens(shared, rows)
        a3po = proximal(folder, rows, statistics.median(passes["packed"]))
    return {
        "machine": {"cores": os.cpu_count(), "processor": platform.processor() or platform.machine()},
        "model": {"shape": "SmolLM2-135M", "layers": layers, "weights": "random", "dtype": "float32"},
        "shape": list(shape),
        "tokens_a_pack": pack,
        "threads": threads,
        "repeats": repeats,
        "torch": torch.__version__,
        "clock": "wall seconds, medians of ways in turns",
        "load_average": os.getloadavg()[0],
        "tokens": {"separate": whole, "fed": fed, "ratio": whole / fed},
        "theory_tokens": token_ratio(prompt, [length] * count),
        "same": same,
        "update": compared(updates),
        "old_log_prob": compared(passes),
        "a3po": a3po,
    }


def configuration(folder: Path, shape: Sequence[int], pack: int, block: Mapping[str, Any]) -> Any:
    keys = {
        "actor.mb_spec.max_tokens_per_mb": pack,
        "actor.adv_norm": {"mean_level": "group", "std_level": "group", "group_size": shape[1]},
        "actor.max_new_tokens": shape[2],
        "actor.optimizer.lr": 1e-6,
        "actor.optimizer.gradient_clipping": 1e9,
        "actor.use_decoupled_loss": False,  # ratios to the actor's own log-probs
        "actor.recompute_logprob": True,
        "actor.prox_logp_method": "recompute",
    }
    return room.configuration(folder, {**keys, **block})


def group(shape: Sequence[int]) -> dict[str, Any]:
    """Rows of one group: a prompt, and responses drawn at random with alternating rewards; nothing is padded."""
    prompt, count, length = shape
    draw = torch.Generator().manual_seed(1)
    asked = torch.randint(3, VOCABULARY, (1, prompt), generator=draw).expand(count, -1)
    ids = torch.cat([asked, torch.randint(3, VOCABULARY, (count, length), generator=draw)], 1)
    mask = (torch.arange(prompt + length)[None] >= prompt).expand(count, -1)
    return {
        "input_ids": ids.int(),
        "attention_mask": torch.ones_like(mask),
        "loss_mask": mask.int(),
        "logprobs": -4.0 * torch.rand(ids.shape, generator=draw) * mask,
        "versions": torch.where(mask, 0, -1).int(),
        "rewards": (-1.0) ** torch.arange(count),
    }


def _copied(rows: Mapping[str, Any]) -> dict[str, Any]:
    """AReaL writes into a batch."""
    return {name: value.clone() for name, value in rows.items()}


def log_probs(engine: Any, rows: Mapping[str, Any]) -> torch.Tensor:
    found: torch.Tensor = engine.compute_logp([_copied(rows)])[0]
    return found


def update(engine: Any, rows: Mapping[str, Any], old: torch.Tensor) -> None:
    engine.ppo_update(engine.compute_advantages([{**_copied(rows), "prox_logp": old.clone()}]))


def tokens(shared: Any, rows: Mapping[str, Any]) -> tuple[float, float]:
    """What one pass of the shared group computes, and what AReaL's rows are."""
    shared.attention_found(None)  # forgets those so far
    log_probs(shared, rows)
    found = shared.attention_found(None)
    return found["metronome/attention/tokens_fed"], found["metronome/attention/tokens_separate"]


def same_gradients(packed: Any, shared: Any, rows: Mapping[str, Any], old: torch.Tensor) -> dict[str, float]:
    """The first update of both: the norm, and the largest difference of an element by the largest element."""
    found = []
    for engine in (packed, shared):
        update(engine, rows, old)
        found.append(engines.gradients(engine))
    one, other = found
    return {"gradient": float((one - other).abs().max() / one.abs().max()), "grad_norm": float(one.norm())}


def compared(times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    middle = {way: statistics.median(seconds) for way, seconds in times.items()}
    return {
        "seconds": middle,
        "all_seconds": {way: list(seconds) for way, seconds in times.items()},
        "over_packed": middle["packed"] / middle["shared"],
    }


def proximal(folder: Path, rows: Mapping[str, Any], forward: float, repeats: int = 31) -> dict[str, Any]:
    """What A-3PO computes instead of ``forward`` seconds: the interpolation; and its whole loss beside AReaL's."""
    from areal.trainer.ppo.actor import grpo_loss_fn

    from metronome.a3po.proximal import alpha, loglinear
    from metronome_areal.config import read
    from metronome_areal.loss import HostLoss

    ours = HostLoss(read(room.configuration(folder, {"metronome.loss": "a3po"})).selection.loss)
    ours.version = 2  # sampled by version 0
    data, theta = packed_rows(rows)
    stock = functools.partial(
        grpo_loss_fn, eps_clip=0.2, eps_clip_higher=None, c_clip=None, use_decoupled_loss=True, current_version=2
    )
    trained = data["loss_mask"]
    behavior, target = data["logprobs"][trained], theta.detach()[trained]
    staleness = torch.full(behavior.shape, 2)

    def whole(loss: Callable[..., Any], more: Mapping[str, Any]) -> Callable[[], object]:
        entropy = torch.zeros_like(theta)
        return lambda: torch.autograd.grad(loss(theta, entropy, {**data, **more}), theta)

    times = in_turns(
        {
            "interpolation": lambda: loglinear(behavior, target, alpha(staleness, strict=False)),
            "loss": whole(ours, {}),
            "loss_of_areal": whole(stock, {"prox_logp": data["logprobs"]}),
        },
        repeats,
    )
    middle = {way: statistics.median(seconds) for way, seconds in times.items()}
    return {
        "tokens": behavior.numel(),
        "seconds": {"recompute": forward, **middle},
        "recompute_over_interpolation": forward / middle["interpolation"],
        # versions, metrics and checks included
        "recompute_over_all_that_the_loss_adds": forward / max(middle["loss"] - middle["loss_of_areal"], 1e-6),
    }


def packed_rows(rows: Mapping[str, Any]) -> tuple[dict[str, Any], torch.Tensor]:
    """The group as AReaL's engine hands it to a loss: one row, shifted to the token before; and new log-probs."""
    count, width = rows["input_ids"].shape
    shifted = {name: torch.roll(rows[name], -1, -1).flatten() for name in ("loss_mask", "logprobs", "versions")}
    shifted["loss_mask"] = shifted["loss_mask"].bool()
    advantages = rows["rewards"][:, None].expand(count, width).flatten() * shifted["loss_mask"]
    theta = shifted["logprobs"] + 0.05 * torch.sin(torch.arange(count * width))
    cu_seqlens = torch.arange(count + 1, dtype=torch.int32) * width
    return {**shifted, "advantages": advantages, "cu_seqlens": cu_seqlens}, theta.requires_grad_()


if __name__ == "__main__":
    sys.exit(main())
