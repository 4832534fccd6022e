"""Rows of shared-prompt attention (arXiv 2511.18871, the schedule for large groups after arXiv 2606.01143)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from metronome.reproduce.rows import Row, Way, at_least, at_most, exactly, near, quoted
from metronome.shared_prompt import cost

TECHNIQUE = "Shared-prompt attention"
PAPER = "arXiv 2511.18871"
SHAPES = {  # (prompt, response, responses): tokens, attention; our own calculation
    (16384, 64, 8): (7.79, 7.59),
    (16384, 1024, 8): (5.67, 4.45),
    (1024, 1024, 8): (1.78, 1.28),
    (128, 1024, 8): (1.11, 1.01),
}
SIZES = {4: (3.95, 3.91), 16: (15.12, 14.33), 32: (28.56, 25.79)}  # of the first shape
MEASURED = (768, 32, 8)


def _shape(shape: tuple[int, int, int]) -> str:
    return ",".join(map(str, shape))


def eight_times() -> Mapping[str, float]:
    """The row of 8x: tokens, attention, and the paper's dense count of attention."""
    prompt, length, count = 16384, 64, 8
    dense = count * (prompt + length) ** 2 / (prompt**2 + count * length * (prompt + length))
    return {
        "tokens": cost.token_ratio(prompt, [length] * count),
        "attention, causal": cost.attention_ratio(prompt, [length] * count),
        "attention, the paper's dense count": dense,
    }


def tokens() -> Mapping[str, float]:
    """Ratio of tokens for four shapes."""
    return {_shape(one): cost.token_ratio(one[0], [one[1]] * one[2]) for one in SHAPES}


def attention() -> Mapping[str, float]:
    """Ratio of causal attention for four shapes."""
    return {_shape(one): cost.attention_ratio(one[0], [one[1]] * one[2]) for one in SHAPES}


def group_sizes() -> Mapping[str, float]:
    """How the 8x row grows with the group."""
    return {
        name: ratio(16384, [64] * count)
        for count in SIZES
        for name, ratio in (
            (f"G = {count}, tokens", cost.token_ratio),
            (f"G = {count}, attention", cost.attention_ratio),
        )
    }


def counted() -> Mapping[str, float]:
    """The formulas against the pairs that the reference mask allows and the tokens of the packed row."""
    from metronome.shared_prompt import plan, reference

    wrong = {"attention": 0.0, "tokens": 0.0}
    for prompt, lengths in ((1, [1]), (16, [4] * 8), (40, [7, 0, 21, 1]), (3, [30, 30, 30]), (64, [1] * 16)):
        row = plan.SharedPromptPlan.build([(prompt, lengths)])
        shared = int(reference.allowed(row).sum())
        rows = [plan.SharedPromptPlan.build([(prompt, [length])]) for length in lengths]
        separate = sum(int(reference.allowed(one).sum()) for one in rows)
        wrong["attention"] += abs(separate / shared - cost.attention_ratio(prompt, lengths)) > 1e-12
        wrong["tokens"] += abs(row.tokens_separate / row.tokens_shared - cost.token_ratio(prompt, lengths)) > 1e-12
    return {f"{name} ratios that differ": value for name, value in wrong.items()}


def attention_equality() -> Mapping[str, float]:
    """Attention alone."""
    from metronome.reproduce import tiny_model

    shared, dropped = tiny_model.attention_differences()
    return {"largest difference": shared, "with the mask dropped": dropped}


def model_equality() -> Mapping[str, float]:
    """A whole Hugging Face model."""
    from metronome.reproduce import tiny_model

    log_probs, gradients, packed = tiny_model.differences()
    return {"log-probs": log_probs, "gradients, relative": gradients, "log-probs of a plain packed row": packed}


def reuse() -> Mapping[str, float]:
    """A group larger than a micro-batch."""
    from metronome.reproduce import tiny_model

    difference, forward, backward = tiny_model.reuse_difference()
    return {
        "gradients, relative": difference,
        "forward passes of the prompt": forward,
        "backward passes of the prompt": backward,
    }


def measured() -> Mapping[str, float]:
    """Forward and backward of a small model with long prompts, shared against separate rows, in turns."""
    import torch

    from metronome.reproduce import tiny_model

    prompt_length, length, count = MEASURED
    shape = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2}
    model: Any = tiny_model.build(torch.float32, **shape)
    prompt, responses = tiny_model.group(prompt_length, [length] * count)

    def seconds(way: Callable[[], Any]) -> float:
        start = time.perf_counter()
        way().sum().backward()
        model.zero_grad()
        return time.perf_counter() - start

    def shared() -> Any:
        return tiny_model.shared_row(model, prompt, responses)

    def separate() -> Any:
        return tiny_model.separate(model, prompt, responses)

    seconds(shared)
    pairs = [(seconds(separate), seconds(shared)) for _ in range(3)]
    return {f"speed at {_shape(MEASURED)}": statistics.median(slow / fast for slow, fast in pairs)}


ROWS = (
    Row(
        "shared-8x",
        TECHNIQUE,
        "sharing a long prompt gains 8x",
        f"{PAPER}, its row of long prompts",
        Way.ARITHMETIC,
        (
            near("tokens", 8.0, 0.5, "x", paper=8.0),
            near("attention, causal", 8.0, 0.5, "x", paper=8.0),
            near("attention, the paper's dense count", 8.0, 0.5, "x", paper=8.0),
        ),
        "At 16,384 prompt tokens, 64 response tokens, 8 responses (lengths ours: the paper's aren't known to us). 8 is "
        "the limit for 8 responses. The paper counts attention as dense; causal attention skips half of it on both "
        "sides.",
        eight_times,
    ),
    Row(
        "shared-tokens",
        TECHNIQUE,
        "tokens (linear layers, activations) of separate rows over a shared row, by (prompt, response, responses)",
        f"ours, from the layout of {PAPER}",
        Way.ARITHMETIC,
        tuple(near(_shape(shape), ratio, 0.005, "x") for shape, (ratio, _) in SHAPES.items()),
        "Reasoning with short prompts gains little; agents and long documents gain most.",
        tokens,
    ),
    Row(
        "shared-attention-pairs",
        TECHNIQUE,
        "causal attention of separate rows over a shared row, by (prompt, response, responses)",
        f"ours, from the layout of {PAPER}",
        Way.ARITHMETIC,
        tuple(near(_shape(shape), ratio, 0.005, "x") for shape, (_, ratio) in SHAPES.items()),
        "Below the paper's dense ratio, since separate rows skip the upper triangle already.",
        attention,
    ),
    Row(
        "shared-group-size",
        TECHNIQUE,
        "the gain grows with the group, at (16384, 64)",
        "ours",
        Way.ARITHMETIC,
        tuple(
            near(name, value, 0.02, "x")
            for size, (ratio, pairs) in SIZES.items()
            for name, value in ((f"G = {size}, tokens", ratio), (f"G = {size}, attention", pairs))
        ),
        "What SAGC does with G changes what sharing saves.",
        group_sizes,
    ),
    Row(
        "shared-counted",
        TECHNIQUE,
        "the two formulas are what the reference mask allows and the packed row holds",
        "ours",
        Way.EQUALITY,
        (exactly("attention ratios that differ", 0.0), exactly("tokens ratios that differ", 0.0)),
        "Five groups, one with an empty response; counted pair by pair.",
        counted,
        needs=("torch",),
    ),
    Row(
        "shared-attention-fp64",
        TECHNIQUE,
        "attention and its gradients equal those of separate rows",
        f"{PAPER}, shared-prompt attention is exact",
        Way.EQUALITY,
        (at_most("largest difference", 1e-12, paper=0.0), at_least("with the mask dropped", 1e-3)),
        "Backends cascade and reference, grouped key/value heads, uneven lengths, an empty response. The second figure "
        "is the negative control.",
        attention_equality,
        needs=("torch",),
    ),
    Row(
        "shared-model",
        TECHNIQUE,
        "log-probs and every parameter gradient of a whole model equal those of separate rows",
        f"{PAPER}, shared-prompt attention is exact",
        Way.EQUALITY,
        (
            at_most("log-probs", 1e-12, paper=0.0),
            at_most("gradients, relative", 1e-6, paper=0.0),
            at_least("log-probs of a plain packed row", 1e-2),
        ),
        "A random Qwen2 in float64; its norms and rotary tables compute in float32, hence 1e-6. A pad id inside the "
        "prompt. The last figure is the negative control: responses see each other and positions don't restart.",
        model_equality,
        cheap=False,
        needs=("torch", "transformers"),
    ),
    Row(
        "shared-reuse",
        TECHNIQUE,
        "a group larger than a micro-batch: its prompt once forward, once backward, the same gradient",
        "ours, after arXiv 2606.01143",
        Way.EQUALITY,
        (
            at_most("gradients, relative", 1e-6, paper=0.0),
            exactly("forward passes of the prompt", 1.0),
            exactly("backward passes of the prompt", 1.0),
        ),
        "Three micro-batches against separate rows. The released code of arXiv 2511.18871 repeats the prompt's "
        "backward pass in each micro-batch.",
        reuse,
        cheap=False,
        needs=("torch", "transformers"),
    ),
    Row(
        "shared-measured",
        TECHNIQUE,
        "forward and backward of a small model, separate rows over a shared row",
        "ours",
        Way.MEASURED,
        (at_least(f"speed at {_shape(MEASURED)}", 1.5, "x"),),
        f"A random Qwen2 of two layers, float32, one thread; by tokens {cost.token_ratio(768, [32] * 8):.2f}x. "
        "Whole SmolLM2-135M: docs/results/README.md.",
        measured,
        cheap=False,
        needs=("torch", "transformers"),
    ),
    Row(
        "shared-4.395x",
        TECHNIQUE,
        "schedule-level reuse of a prompt: up to 4.395x, 59.1 % less memory",
        "arXiv 2606.01143, its results",
        Way.NOT_HERE,
        (quoted("speed", 4.395, "x"), quoted("memory saved", 0.591, "%")),
        "Needs its GPUs and models. The exactness of the schedule is shown (shared-reuse); time and memory of ours on "
        "a CPU stand in docs/results/README.md.",
    ),
)
