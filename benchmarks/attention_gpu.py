"""Shared-prompt attention on a GPU against flash attention over separate rows. NOT RUN YET: we had no GPU.

    python benchmarks/attention_gpu.py --out docs/results/attention_gpu.json

bfloat16, one attention layer of Qwen2.5-1.5B's shapes (12 query heads, 2 key/value heads, width 128) on random
inputs, forward and backward. The other side is the strongest one: K rows packed without padding in one call of
the same flash kernel for packed sequences that ``varlen`` uses. Each backend is first held against float64
arithmetic at the shape. The goal is 0.9 of the attention theory (query-key pairs); the token theory stands beside
it. Times are milliseconds between CUDA events, medians, ways in turns.

Without a GPU it says so and ends with exit code 2.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from metronome.shared_prompt.cost import attention_ratio, token_ratio
from metronome.shared_prompt.interface import Signature
from metronome.shared_prompt.plan import SharedPromptPlan
from metronome.shared_prompt.select import backend_named, tensor_need
from metronome.shared_prompt.selfcheck import check_attention

HEADS, KV_HEADS, WIDTH = 12, 2, 128
PROMPTS, COUNTS, LENGTHS = (1024, 2048, 4096, 8192, 16384), (8, 16), (256, 512, 1024)
BACKENDS = ("varlen", "flex")
GOAL = 0.9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, nargs="+", default=PROMPTS)
    parser.add_argument("--counts", type=int, nargs="+", default=COUNTS)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("not run: torch sees no GPU here; run it on a machine with a CUDA build of torch", file=sys.stderr)
        return 2
    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, bfloat16, {HEADS}/{KV_HEADS} heads x {WIDTH}, forward and backward")
    print(
        f"{'Lp,K,Lr':>15} {'rows ms':>8} {'theory':>7} {'tokens':>7}  backend: ms, ratio, to theory, same as reference"
    )
    rows = [
        measured(*shape, arguments.repeats) for shape in product(arguments.prompts, arguments.counts, arguments.lengths)
    ]
    ran = [one for row in rows for one in row["backends"].values() if one["milliseconds"]]
    met = sum(one["to_theory"] >= GOAL for one in ran)
    print(f"{met} of {len(ran)} reach {GOAL} of the attention theory")
    if arguments.out:
        facts = {
            "device": name,
            "capability": torch.cuda.get_device_capability(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
            "dtype": "bfloat16",
            "heads": [HEADS, KV_HEADS, WIDTH],
            "repeats": arguments.repeats,
            "clock": "CUDA events, medians, ways in turns",
            "goal_to_theory": GOAL,
        }
        arguments.out.write_text(json.dumps({**facts, "rows": rows}, indent=2) + "\n")
    return 0


def measured(prompt: int, count: int, length: int, repeats: int) -> dict[str, Any]:
    """One shape: every backend that serves it, against separate rows."""
    plan = SharedPromptPlan.build([(prompt, [length] * count)], device="cuda")
    separate = SharedPromptPlan.build([(prompt + length, [0])] * count, device="cuda")
    q, k, v = (_drawn(plan.tokens, heads) for heads in (HEADS, KV_HEADS, KV_HEADS))
    rows = tuple(_drawn(separate.tokens, heads) for heads in (HEADS, KV_HEADS, KV_HEADS))
    flash = backend_named("varlen")
    need = tensor_need(q, k, v, window=False, sinks=False)
    refused = flash.supports(need)
    if refused is not None:
        raise SystemExit(f"not run: {refused}")  # the other side needs the kernel
    scale = WIDTH**-0.5
    layer = Signature(HEADS, KV_HEADS, WIDTH, WIDTH, torch.bfloat16, scale, None, False)
    ways = {"rows": _step(lambda: flash.attend(*rows, separate, scale), rows)}
    found: dict[str, dict[str, Any]] = {}
    for name in BACKENDS:
        backend = backend_named(name)
        reason = backend.supports(need)
        found[name] = {"milliseconds": None, "refused": reason}
        if reason is None:
            check_attention(backend, plan, layer, torch.device("cuda"))  # raises where it isn't the same
            ways[name] = _step(lambda backend=backend: backend.attend(q, k, v, plan, scale), (q, k, v))
    times = interleaved(ways, repeats)
    theory = attention_ratio(prompt, [length] * count)
    for name in ways:
        if name != "rows":
            ratio = times["rows"] / times[name]
            found[name] |= {"milliseconds": times[name], "ratio": ratio, "to_theory": ratio / theory}
    tokens = token_ratio(prompt, [length] * count)
    shown = "; ".join(
        f"{name}: {one['milliseconds']:.2f}, {one['ratio']:.2f}, {one['to_theory']:.2f}, yes"
        if one["milliseconds"]
        else f"{name}: {one['refused']}"
        for name, one in found.items()
    )
    print(
        f"{prompt},{count},{length}".rjust(15) + f" {times['rows']:8.2f} {theory:7.2f} {tokens:7.2f}  {shown}",
        flush=True,
    )
    return {
        "shape": [prompt, count, length],
        "milliseconds_rows": times["rows"],
        "theory_attention": theory,
        "theory_tokens": tokens,
        "backends": found,
    }


def interleaved(ways: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median milliseconds between CUDA events around each way, in turns after three warm-ups."""
    times: dict[str, list[float]] = {way: [] for way in ways}
    for repeat in range(repeats + 3):
        for way, run in ways.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            if repeat >= 3:
                times[way].append(start.elapsed_time(end))
    return {way: statistics.median(found) for way, found in times.items()}


def _step(attend: Callable[[], Tensor], inputs: tuple[Tensor, ...]) -> Callable[[], Any]:
    def run() -> None:
        out = attend()
        torch.autograd.grad(out, inputs, torch.ones_like(out))

    return run


def _drawn(tokens: int, heads: int) -> Tensor:
    return torch.randn(tokens, heads, WIDTH, dtype=torch.bfloat16, device="cuda", requires_grad=True)


if __name__ == "__main__":
    sys.exit(main())
