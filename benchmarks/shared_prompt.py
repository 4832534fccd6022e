"""Shared prompts on against K separate rows: tokens computed, forward and backward time, theory beside.

    python benchmarks/shared_prompt.py --shapes 512,8,64 2048,8,64
    python benchmarks/shared_prompt.py --model tiny --shapes 512,8,64
    python benchmarks/shared_prompt.py --model smollm2 --shapes 128,8,64 --repeats 3 --out result.json

A shape is prompt,responses,response length. Both ways run interleaved in one process; times are CPU seconds
of the process, medians. The other side is the strongest one: K rows of equal length without padding, native
grouped heads, and for models logits at response positions only.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from metronome.shared_prompt.cost import attention_ratio, token_ratio
from metronome.shared_prompt.huggingface import attach
from metronome.shared_prompt.logits import head_of, response_log_probs
from metronome.shared_prompt.options import SharedPromptOptions
from metronome.shared_prompt.plan import SharedPromptPlan
from metronome.shared_prompt.select import SharedPromptAttention

HEADS, KV_HEADS, WIDTH = 9, 3, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["128,8,64", "512,8,64", "2048,8,64"])
    parser.add_argument("--model", help="tiny, smollm2 or a local directory; without it, attention alone")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--backend", default="auto", choices=["auto", "cascade", "reference"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    dtype = getattr(torch, arguments.dtype)
    backend = SharedPromptAttention(SharedPromptOptions(backend=arguments.backend, self_check=False))
    model = load(arguments.model, dtype) if arguments.model else None
    rows = []
    print(f"{'Lp,K,Lr':>14} {'tokens':>15} {'separate s':>11} {'shared s':>9} {'ratio':>6}  theory")
    for shape in arguments.shapes:
        prompt, count, length = (int(part) for part in shape.split(","))
        plan = SharedPromptPlan.build([(prompt, [length] * count)])
        if model is None:
            separate, shared = attention_ways(plan, prompt, count, length, backend, dtype)
        else:
            separate, shared = model_ways(model, plan, prompt, count, length, backend)
        times = interleaved(separate, shared, arguments.repeats)
        row = {
            "shape": [prompt, count, length],
            "tokens_separate": plan.tokens_separate,
            "tokens_shared": plan.tokens_shared,
            "seconds_separate": times[0],
            "seconds_shared": times[1],
            "ratio": times[0] / times[1],
            "theory_attention": attention_ratio(prompt, [length] * count),
            "theory_tokens": token_ratio(prompt, [length] * count),
        }
        rows.append(row)
        theory = f"attention {row['theory_attention']:.2f}, tokens {row['theory_tokens']:.2f}"
        print(
            f"{shape:>14} {plan.tokens_separate:>6} ->{plan.tokens_shared:>6}"
            f" {times[0]:>11.3f} {times[1]:>9.3f} {row['ratio']:>6.2f}  {theory}"
        )
    if arguments.out:
        facts = {
            "what": arguments.model or "attention",
            "dtype": arguments.dtype,
            "backend": arguments.backend,
            "threads": arguments.threads,
            "repeats": arguments.repeats,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "processor": platform.processor() or platform.machine(),
            "clock": "process CPU seconds, median, interleaved",
        }
        arguments.out.write_text(json.dumps({**facts, "rows": rows}, indent=2) + "\n")


def interleaved(separate: Callable[[], None], shared: Callable[[], None], repeats: int) -> tuple[float, float]:
    """Median CPU seconds of both, run in turns after one warm-up each."""
    times: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats + 1):
        for way, found in zip((separate, shared), times, strict=True):
            start = time.process_time()
            way()
            if repeat:
                found.append(time.process_time() - start)
    return statistics.median(times[0]), statistics.median(times[1])


def attention_ways(
    plan: SharedPromptPlan,
    prompt: int,
    count: int,
    length: int,
    backend: SharedPromptAttention,
    dtype: torch.dtype,
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Forward and backward of one attention layer over K rows, and over the shared row."""
    q, k, v = (
        torch.randn(plan.tokens, heads, WIDTH, dtype=dtype, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    batched = [
        torch.randn(count, heads, prompt + length, WIDTH, dtype=dtype, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]

    def separate() -> None:
        out = torch.nn.functional.scaled_dot_product_attention(*batched, is_causal=True, enable_gqa=True)
        torch.autograd.grad(out, batched, torch.ones_like(out))

    def shared() -> None:
        out = backend.attend(q, k, v, plan, WIDTH**-0.5)
        torch.autograd.grad(out, [q, k, v], torch.ones_like(out))

    return separate, shared


def model_ways(
    model: Any, plan: SharedPromptPlan, prompt: int, count: int, length: int, backend: SharedPromptAttention
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Forward, log-probs and backward of a whole model over K rows, and over the shared row."""
    ids = torch.randint(3, model.config.vocab_size, (plan.tokens,))
    responses = ids[prompt:].reshape(count, length)
    batch = torch.cat([ids[:prompt].expand(count, -1), responses], dim=1)
    row_plan = SharedPromptPlan.build([(prompt, [length])] * count)
    decoder, head = model.get_decoder(), head_of(model, model.config)

    def separate() -> None:
        model.zero_grad()
        hidden = decoder(input_ids=batch, use_cache=False).last_hidden_state.flatten(0, 1)
        found, _ = response_log_probs(hidden, head, ids[prompt:], row_plan, model.config.vocab_size)
        found.sum().backward()

    def shared() -> None:
        model.zero_grad()
        handle = attach(model, backend)
        found, _ = handle.log_probs(ids, plan)
        found.sum().backward()
        handle.detach()

    return separate, shared


def load(name: str, dtype: torch.dtype) -> Any:
    """``tiny`` (random, 6 layers, width 192), or whatever the local host loads."""
    if name != "tiny":
        from metronome_local.models import load_model

        return load_model(name).to(dtype).train()
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=65536,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).to(dtype).train()


if __name__ == "__main__":
    main()
