"""Which Hugging Face models can't be served by shared-prompt rows, and why.

What a configuration or a class shows is refused here, before anything runs; what only a forward pass shows (a
layer that went round the interface, attention that isn't causal, a window that stayed in the mask) is refused
by ``interface.py`` and ``huggingface.py`` in the first one. docs/techniques/families.md lists what was tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

_KNOWN_LAYERS = {"full_attention", "sliding_attention", "mlp", "moe"}  # the last two don't look at other tokens
_RECURRENT_KEYS = (
    "mamba_d_state",
    "mamba_d_conv",
    "ssm_state_size",
    "state_size",
    "conv_kernel",
    "lru_width",
    "linear_conv_kernel_dim",
    "layers_block_type",
    "block_types",
    "hybrid_override_pattern",
    "rescale_every",
)
_UNUSED_DROPOUT = ("classif", "summary", "qa_")  # heads that a causal language model doesn't have
_ROW_ROTARY = ("dynamic", "longrope")  # frequencies follow the largest position in the row
_BY_TYPE = {
    "phimoe": (
        "its router samples experts in training (sparse mixer), one draw for a shared prompt token instead of K",
        "attention: host",
    ),
}
"""Model types whose configuration doesn't show what is wrong."""


def refusal(model: torch.nn.Module, base: Any, config: Any) -> tuple[str, str] | None:
    """Why ``model`` can't be served and what mends it, or None.

    Args:
        model: the model as the user holds it, adapters of peft included.
        base: the Hugging Face causal language model inside.
        config: its text configuration.
    """
    return (
        _architecture(base, config)
        or _state(config)
        or _scores(config)
        or _positions(config)
        or _routers(base, config)
        or _dropout(base, config)
        or _adapters(model)
        or _routing(base)
        or _head(base, config)
    )


def _architecture(base: Any, config: Any) -> tuple[str, str] | None:
    if getattr(base.config, "is_encoder_decoder", False):
        return "an encoder-decoder reads its prompt in the encoder, not in the row", "attention: host"
    if base.get_output_embeddings() is None:
        return "the model has no language-model head", "load it with AutoModelForCausalLM"
    return None


def _state(config: Any) -> tuple[str, str] | None:
    kinds = set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYERS
    if kinds:
        return (
            f"layers of type {', '.join(sorted(kinds))} carry state or masks across the row that a response"
            " would inherit from its siblings",
            "attention: host",
        )
    keys = [key for key in _RECURRENT_KEYS if getattr(config, key, None)]
    if keys:
        return (
            f"recurrent or state-space layers ({keys[0]} is set) carry state from one response into the next",
            "attention: host",
        )
    if getattr(config, "attention_chunk_size", None):
        return "chunked attention isn't part of attend()", "attention: host"
    return None


def _scores(config: Any) -> tuple[str, str] | None:
    cap = getattr(config, "attn_logit_softcapping", None)
    if cap:
        return (
            f"attention logit softcapping ({cap}) isn't part of attend() and would be dropped",
            "attention: host (attn_logit_softcapping: null only if the model was trained without it)",
        )
    if getattr(config, "alibi", False):
        return "ALiBi biases follow packed positions", "attention: host"
    if getattr(config, "keep_window_size", None):
        return "its layers compute a mask of their own from the values, which attend() can't be told", "attention: host"
    return None


def _positions(config: Any) -> tuple[str, str] | None:
    rotary = getattr(config, "rope_parameters", None) or {}
    for one in (rotary, *(value for value in rotary.values() if isinstance(value, Mapping))):
        kind = one.get("rope_type")
        if kind in _ROW_ROTARY:
            return (
                f"{kind} rotary frequencies follow the longest sequence in the row, for its shorter siblings too",
                "attention: host (or a rope_type that doesn't look at the row: yarn, llama3, linear)",
            )
    return None


def _routers(base: Any, config: Any) -> tuple[str, str] | None:
    if any(getattr(one, "output_router_logits", False) for one in (base.config, config)):
        return (
            "router losses would count a shared prompt token once instead of K times",
            "output_router_logits: false",
        )
    for key, value in _positive(config, "jitter"):
        return (
            f"router noise is drawn once for a shared prompt token instead of K times ({key} is {value})",
            f"{key}: 0",
        )
    return _BY_TYPE.get(config.model_type)


def _dropout(base: Any, config: Any) -> tuple[str, str] | None:
    for key, value in _positive(config, "drop"):
        if not any(word in key for word in _UNUSED_DROPOUT):
            return f"dropout draws one mask for the prompt instead of K ({key} is {value})", f"{key}: 0"
    for name, module in base.get_decoder().named_modules():  # not the vision tower of a wrapper
        found = {"p": module.p} if isinstance(module, torch.nn.Dropout) else vars(module)
        for key, value in found.items():
            if (key == "p" or "drop" in key) and _above_zero(value):
                place = name or type(module).__name__
                return (
                    f"dropout draws one mask for the prompt instead of K ({place} has {key} = {value})",
                    "load it with every dropout at 0 (lora_dropout and *_pdrop included)",
                )
    return None


def _positive(config: Any, part: str) -> Iterator[tuple[str, float]]:
    """Settings above 0 whose name contains ``part``, those of nested configurations (DBRX) included."""
    settings = config.to_dict()
    for one in (settings, *(value for value in settings.values() if isinstance(value, dict))):
        for key, value in one.items():
            if part in str(key) and _above_zero(value):
                yield key, value


def _above_zero(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def _adapters(model: torch.nn.Module) -> tuple[str, str] | None:
    for name, adapter in (getattr(model, "peft_config", None) or {}).items():
        if getattr(adapter, "is_prompt_learning", False):
            return (
                f"adapter {name!r} puts virtual tokens before the row and shifts its positions",
                "use LoRA, or attention: host",
            )
    return None


def _routing(base: Any) -> tuple[str, str] | None:
    can_set = getattr(base, "_can_set_attn_implementation", None)
    if can_set is None or not can_set():
        return (
            f"{type(base).__name__} doesn't route its attention through transformers' AttentionInterface",
            "attention: host",
        )
    return None


def _head(base: Any, config: Any) -> tuple[str, str] | None:
    """Hidden states become logits by the output layer and the factors of ``logits.head_of``, nothing else."""
    output, decoder = base.get_output_embeddings(), base.get_decoder()
    if decoder is base or decoder is output:
        return "its get_decoder() doesn't give the part that ends in hidden states", "attention: host"
    known = {id(parameter) for part in (base.base_model, output) for parameter in part.parameters()}
    others = [name for name, parameter in base.named_parameters() if id(parameter) not in known]
    if base.base_model is not base and others:
        return f"its head is more than one output layer ({others[0]})", "attention: host"
    multiplies = ("logits_scaling",) if config.model_type == "hyperclovax" else ()  # it divides in Granite
    for key in ("output_multiplier", *multiplies):
        value = getattr(config, key, None)
        if value is not None and value != 1:
            return f"its logits carry a factor of their own ({key} is {value})", "attention: host"
    return None
