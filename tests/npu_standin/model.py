"""A tiny random Llama whose shared row, through a backend, must equal separate rows: log-probs and gradients."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from metronome.shared_prompt.huggingface import attach
from metronome.shared_prompt.plan import SharedPromptPlan

_SHAPE = {
    "vocab_size": 89,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_PROMPT, _LENGTHS, _PADDED = 17, (6, 0, 9, 1), 37


def check(backend) -> None:
    """float64: log-probs within 1e-12, every parameter's gradient within 1e-6 of its largest value.

    The models' norms and rotary tables compute in float32 inside, so gradients can't be held closer.
    """
    torch.manual_seed(4)
    config = AutoConfig.for_model("llama", **_SHAPE)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double().train()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    tokens = torch.randint(3, _SHAPE["vocab_size"], (_PROMPT + sum(_LENGTHS),))
    prompt, *responses = tokens.split((_PROMPT, *_LENGTHS))
    parts = []
    for response in responses:
        logits = model(input_ids=torch.cat([prompt, response])[None], use_cache=False).logits[0]
        rows = torch.log_softmax(logits[_PROMPT - 1 : _PROMPT - 1 + len(response)], -1)
        parts.append(rows.gather(1, response[:, None])[:, 0])
    wanted = torch.cat(parts)
    plan = SharedPromptPlan.build([(_PROMPT, _LENGTHS)], pad_to=_PADDED)
    row = torch.cat([tokens, torch.zeros(_PADDED - len(tokens), dtype=torch.int64)])
    found, _ = attach(model, backend).log_probs(row, plan)
    assert (found - wanted).abs().max() < 1e-12
    weights = torch.randn(len(found), dtype=torch.float64)
    ours, theirs = (torch.autograd.grad(x, list(model.parameters()), weights) for x in (found, wanted))
    for one, other in zip(ours, theirs, strict=True):
        assert (one - other).abs().max() <= 1e-6 * other.abs().max()
