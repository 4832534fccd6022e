"""A tiny random Qwen2 of transformers, whole: shared rows, separate rows and reuse in float64.

Imported only by rows that need torch and transformers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from metronome.shared_prompt import cascade, huggingface, options, plan

VOCABULARY, PROMPT, LENGTHS = 97, 30, (9, 5, 0, 14, 1, 9)
UNCHECKED = options.SharedPromptOptions(self_check=False)


def build(dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """The same random model each time; grouped key/value heads."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = Qwen2ForCausalLM._from_config(Qwen2Config(**{**shape, **changes}), attn_implementation="sdpa")
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.08)
    return model.to(dtype).train()


def group(prompt: int = PROMPT, lengths: Sequence[int] = LENGTHS) -> tuple[Tensor, list[Tensor]]:
    """A prompt, one of whose tokens equals the pad id, and responses; one of them is empty."""
    draw = torch.Generator().manual_seed(0)
    tokens = [torch.randint(3, VOCABULARY, (length,), generator=draw) for length in (prompt, *lengths)]
    tokens[0][7] = 0
    return tokens[0], tokens[1:]


def separate(model: Any, prompt: Tensor, responses: Sequence[Tensor]) -> Tensor:
    """Log-probs of each response from a row of its own, by the model's unchanged forward pass."""
    found = []
    for response in responses:
        logits = model(input_ids=torch.cat([prompt, response])[None], use_cache=False).logits[0]
        rows = torch.log_softmax(logits, -1)[len(prompt) - 1 : len(prompt) - 1 + len(response)]
        found.append(rows.gather(1, response[:, None])[:, 0])
    return torch.cat(found)


def weights(count: int) -> Tensor:
    """A weight for each log-prob, so that gradients can't cancel."""
    return torch.randn(count, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def gradients(model: Any, log_probs: Tensor) -> dict[str, Tensor]:
    """Every parameter's gradient of the weighted sum."""
    model.zero_grad()
    torch.autograd.backward((log_probs * weights(len(log_probs))).sum())
    return collected(model)


def collected(model: Any) -> dict[str, Tensor]:
    """Every parameter's gradient."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def relative(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest difference of a parameter's gradient, relative to its largest element; infinite if one lacks."""
    if found.keys() != wanted.keys():
        return float("inf")
    return max(float((found[n] - wanted[n]).abs().max() / wanted[n].abs().max().clamp_min(1e-12)) for n in wanted)


def shared_row(model: Any, prompt: Tensor, responses: Sequence[Tensor]) -> Tensor:
    """Log-probs of the group from one row that holds the prompt once."""
    handle = huggingface.attach(model, cascade.CascadeBackend(), UNCHECKED)
    row = plan.SharedPromptPlan.build([(len(prompt), [len(one) for one in responses])])
    try:
        return handle.log_probs(torch.cat([prompt, *responses]), row)[0]
    finally:
        handle.detach()


def differences() -> tuple[float, float, float]:
    """Largest differences of log-probs and of gradients, and of log-probs if positions go on (control)."""
    model = build()
    prompt, responses = group()
    wanted = separate(model, prompt, responses)
    wanted_gradients = gradients(model, wanted)
    found = shared_row(model, prompt, responses)
    whole = model(input_ids=torch.cat([prompt, *responses])[None], use_cache=False).logits[0].log_softmax(-1)
    packed = whole[PROMPT - 1 : -1].gather(1, torch.cat(responses)[:, None])[:, 0]  # one causal row, nothing masked
    return (
        float((found - wanted).detach().abs().max()),
        relative(gradients(model, found), wanted_gradients),
        float((packed - wanted).detach().abs().max()),
    )


def reuse_difference() -> tuple[float, int, int]:
    """The gradient with the prompt run once for three micro-batches against the group's, and the prompt's passes."""
    model = build()
    prompt, responses = group()
    wanted = gradients(model, separate(model, prompt, responses))
    handle = huggingface.attach(model, cascade.CascadeBackend(), UNCHECKED)
    passes = {"forward": 0, "backward": 0}
    layer = model.model.layers[0]

    def forward(_module: Any, inputs: Any, _output: Any) -> None:
        passes["forward"] += inputs[0].shape[1] == PROMPT

    def backward(_module: Any, _inputs: Any, outputs: Any) -> None:
        passes["backward"] += outputs[0].shape[1] == PROMPT

    layer.register_forward_hook(forward)
    layer.register_full_backward_hook(backward)
    model.zero_grad()
    factors, place = weights(sum(LENGTHS)), 0
    with handle.cached_prompt(prompt) as cached:
        for first in (0, 2, 4):
            part = responses[first : first + 2]
            ids = torch.cat(part)
            log_probs, _ = cached.log_probs(ids, [len(one) for one in part])
            torch.autograd.backward((log_probs * factors[place : place + len(ids)]).sum())
            place += len(ids)
    handle.detach()
    return relative(collected(model), wanted), passes["forward"], passes["backward"]


def attention_differences() -> tuple[float, float]:
    """Attention alone, outputs and gradients: shared against separate rows, and with the mask dropped (control)."""
    from metronome.shared_prompt import reference

    draw = torch.Generator().manual_seed(0)
    row = plan.SharedPromptPlan.build([(PROMPT, LENGTHS)])
    q, k, v = (
        torch.randn(row.tokens, heads, 8, generator=draw, dtype=torch.float64).requires_grad_() for heads in (4, 2, 2)
    )
    weight = torch.randn(row.tokens, 4, 8, generator=draw, dtype=torch.float64)
    scale = 8**-0.5

    def results(out: Tensor) -> list[Tensor]:
        return [out.detach(), *torch.autograd.grad((out * weight).sum(), [q, k, v])]

    def alone(rows: Tensor) -> Tensor:
        causal = torch.ones(len(rows), len(rows), dtype=torch.bool).tril()
        return reference.masked_attention(q[rows], k[rows], v[rows], causal, scale)

    prompt = torch.arange(PROMPT)
    parts, start = [alone(prompt)], PROMPT
    for length in LENGTHS:
        parts.append(alone(torch.cat([prompt, torch.arange(start, start + length)]))[PROMPT:])
        start += length
    wanted = results(torch.cat(parts))

    def largest(found: list[Tensor]) -> float:
        return max(float((one - other).abs().max()) for one, other in zip(found, wanted, strict=True))

    backends = (cascade.CascadeBackend(), reference.ReferenceBackend())
    shared = max(largest(results(one.attend(q, k, v, row, scale))) for one in backends)
    return shared, largest(results(alone(torch.arange(row.tokens))))
