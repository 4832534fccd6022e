"""A group larger than a micro-batch: one cached prompt against the whole group in one pass, and against separate rows.

    python benchmarks/reuse.py --shape 2048,8,256 --micro-batches 8 --repeats 3 --out result.json

Ways: ``whole`` (one shared row, logits in blocks as this package computes them), ``whole, plain logits`` (one
shared row, all response logits and their log-softmax at once, as most trainers do), ``reuse`` (the prompt once, its
responses in micro-batches), ``rows`` (each micro-batch holds its prompts again, as separate rows). Times are CPU
seconds of the process with one thread, medians, interleaved. Peak memory is VmHWM less the resident memory before
the step, each way in a fresh process. The model is a Llama of SmolLM2-135M's widths with random weights, cut to
``--layers``.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from metronome.shared_prompt.huggingface import attach
from metronome.shared_prompt.options import SharedPromptOptions
from metronome.shared_prompt.plan import SharedPromptPlan
from metronome.shared_prompt.select import SharedPromptAttention

WAYS = ("whole", "whole, plain logits", "reuse", "rows")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="2048,8,256", help="prompt,responses,response length")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--checkpointing", action="store_true", help="recompute layers in the backward pass")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--peak-of", choices=WAYS, help="only print the peak memory of one way, in bytes")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    step = Step(*(int(part) for part in arguments.shape.split(",")), arguments)
    if arguments.peak_of:
        print(peak(step, arguments.peak_of))
        return
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    gradients = {}
    for repeat in range(arguments.repeats):
        for way in WAYS:
            start = time.process_time()
            step.run(way)
            times[way].append(time.process_time() - start)
            if not repeat:
                gradients[way] = torch.cat([p.grad.flatten() for p in step.model.parameters()]).clone()
    peaks = {way: in_fresh_process(way) for way in WAYS}
    rows = []
    print(f"{'way':>20} {'seconds':>8} {'to whole':>9} {'peak MiB':>9} {'to whole':>9} {'to plain':>9} {'gradient':>9}")
    for way in WAYS:
        seconds = statistics.median(times[way])
        difference = (gradients[way] - gradients["whole"]).abs().max() / gradients["whole"].abs().max()
        row = {
            "way": way,
            "seconds": seconds,
            "seconds_to_whole": seconds / statistics.median(times["whole"]),
            "peak_bytes": peaks[way],
            "peak_to_whole": peaks[way] / peaks["whole"],
            "peak_to_plain_logits": peaks[way] / peaks["whole, plain logits"],
            "largest_gradient_difference": difference.item(),
        }
        rows.append(row)
        print(
            f"{way:>20} {seconds:>8.2f} {row['seconds_to_whole']:>9.2f} {peaks[way] / 2**20:>9.0f}"
            f" {row['peak_to_whole']:>9.2f} {row['peak_to_plain_logits']:>9.2f} {difference.item():>9.1e}"
        )
    if arguments.out:
        facts = {
            "shape": arguments.shape,
            "micro_batches": arguments.micro_batches,
            "layers": arguments.layers,
            "checkpointing": arguments.checkpointing,
            "repeats": arguments.repeats,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "processor": platform.processor() or platform.machine(),
            "clock": "process CPU seconds, one thread, median, interleaved",
            "peak": "VmHWM less resident memory before the step, fresh process each",
        }
        arguments.out.write_text(json.dumps({**facts, "rows": rows}, indent=2) + "\n")


class Step:
    """One optimiser step's gradient of a group, each way."""

    def __init__(self, prompt: int, count: int, length: int, arguments: Any) -> None:
        self.prompt, self.count, self.length = prompt, count, length
        self.per_batch = count // arguments.micro_batches
        self.model = model(arguments.layers)
        if arguments.checkpointing:
            self.model.activation_checkpointing_enable()
        draw = torch.Generator().manual_seed(0)
        self.ids = torch.randint(3, self.model.config.vocab_size, (prompt + count * length,), generator=draw)
        self.weights = torch.randn(count * length, generator=draw)

    def run(self, way: str) -> None:
        """Leaves the gradient in ``.grad``."""
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        if way == "rows":
            self._rows()
            return
        handle = attach(self.model, SharedPromptAttention(SharedPromptOptions(self_check=False)))
        ways: dict[str, Callable[[Any], None]] = {
            "whole": self._whole,
            "whole, plain logits": self._plain,
            "reuse": self._reuse,
        }
        ways[way](handle)
        handle.detach()

    def _whole(self, handle: Any) -> None:
        plan = SharedPromptPlan.build([(self.prompt, [self.length] * self.count)])
        found, _ = handle.log_probs(self.ids, plan)
        (found * self.weights).sum().backward()

    def _plain(self, handle: Any) -> None:
        plan = SharedPromptPlan.build([(self.prompt, [self.length] * self.count)])
        hidden = handle.hidden_states(self.ids, plan)
        logits = self.model.lm_head(hidden[plan.label_rows])
        found = torch.log_softmax(logits.float(), -1).gather(1, self.ids[plan.response_index, None])[:, 0]
        (found * self.weights).sum().backward()

    def _reuse(self, handle: Any) -> None:
        responses = self.ids[self.prompt :].split(self.length * self.per_batch)
        weights = self.weights.split(self.length * self.per_batch)
        with handle.cached_prompt(self.ids[: self.prompt]) as cached:
            for ids, weight in zip(responses, weights, strict=True):
                found, _ = cached.log_probs(ids, [self.length] * self.per_batch)
                (found * weight).sum().backward()

    def _rows(self) -> None:
        from metronome.shared_prompt.logits import head_of, response_log_probs

        head = head_of(self.model, self.model.config)
        plan = SharedPromptPlan.build([(self.prompt, [self.length])] * self.per_batch)
        responses = self.ids[self.prompt :].split(self.length * self.per_batch)
        for ids, weight in zip(responses, self.weights.split(self.length * self.per_batch), strict=True):
            batch = torch.cat([self.ids[: self.prompt].expand(self.per_batch, -1), ids.view(self.per_batch, -1)], dim=1)
            hidden = self.model.model(input_ids=batch, use_cache=False).last_hidden_state.flatten(0, 1)
            found, _ = response_log_probs(hidden, head, ids, plan, self.model.config.vocab_size)
            (found * weight).sum().backward()


def model(layers: int) -> Any:
    """A Llama of SmolLM2-135M's widths, random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).train()


def peak(step: Step, way: str) -> int:
    """Bytes by which the resident memory rose at most during one step; gradients are there before it."""
    small = Step(64, 2, 16, argparse.Namespace(micro_batches=2, layers=1, checkpointing=False))
    small.run(way)  # lazy initialisation isn't the step's
    del small
    for parameter in step.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    Path("/proc/self/clear_refs").write_text("5")
    before = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    step.run(way)
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 - before


def in_fresh_process(way: str) -> int:
    """``peak`` in a process of its own, with this process's arguments."""
    found = subprocess.run(
        [sys.executable, __file__, *sys.argv[1:], "--peak-of", way], check=True, capture_output=True, text=True
    )
    return int(found.stdout)


if __name__ == "__main__":
    main()
