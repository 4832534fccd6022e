"""Times A-3PO's proximal log-probs against the forward pass that they replace, on the same batch.

    python benchmarks/proximal.py --model smollm2 --rows 4 --length 256 --out proximal.json

The two are interleaved; the medians and their ratio are printed as one JSON line. ``--model`` takes ``tiny``
(a small random Llama), ``smollm2``, or a directory of a Hugging Face model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from metronome.a3po.proximal import alpha, loglinear


def load(name: str) -> Any:
    if name == "tiny":
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=4096,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        return LlamaForCausalLM(config)
    if name == "smollm2":
        from metronome_local.models import load_model

        return load_model(name)
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(name)


def forward_pass(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Log-probs of every token but the first, ``[rows * (length - 1)]``."""
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        chosen = logits.gather(-1, ids[:, 1:, None]).squeeze(-1)
        return (chosen - logits.logsumexp(-1)).flatten()


def seconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(model: Any, rows: int, length: int, repeats: int, device: torch.device) -> dict[str, Any]:
    torch.manual_seed(0)
    model = model.to(device).eval()
    ids = torch.randint(model.config.vocab_size, (rows, length), device=device)
    target = forward_pass(model, ids)
    behavior = target + 0.05 * torch.randn_like(target)
    staleness = torch.randint(0, 5, target.shape, device=device)

    def interpolate() -> torch.Tensor:
        return loglinear(behavior, target, alpha(staleness, strict=False))

    def recompute() -> torch.Tensor:
        return forward_pass(model, ids)

    interpolate()  # the forward pass is warm already
    times: dict[str, list[float]] = {"interpolate": [], "recompute": []}
    for _ in range(repeats):
        times["interpolate"].append(seconds(interpolate, device))
        times["recompute"].append(seconds(recompute, device))
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "tokens": target.numel(),
        "seconds": medians,
        "fastest_seconds": {name: min(values) for name, values in times.items()},
        "ratio": medians["recompute"] / medians["interpolate"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="A-3PO's proximal log-probs against a forward pass")
    parser.add_argument("--model", default="tiny", help="tiny, smollm2, or a model's directory")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=256, help="tokens per row")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    options = parser.parse_args()
    if min(options.rows, options.repeats, options.threads) < 1 or options.length < 2:
        parser.error("rows, repeats and threads must be at least 1, length at least 2")

    torch.set_num_threads(options.threads)
    model = load(options.model)
    device = torch.device(options.device)
    result = {
        "benchmark": "proximal",
        "model": options.model,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "rows": options.rows,
        "length": options.length,
        "repeats": options.repeats,
        "threads": options.threads,
        "device": options.device,
        "dtype": str(model.dtype).removeprefix("torch."),
        "torch": str(torch.__version__),
        **measure(model, options.rows, options.length, options.repeats, device),
    }
    line = json.dumps(result)
    print(line)
    if options.out:
        options.out.write_text(line + "\n")


if __name__ == "__main__":
    main()
