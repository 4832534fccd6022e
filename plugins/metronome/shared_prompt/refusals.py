"""Which Hugging Face models can't be served by shared-prompt rows, and why."""

from __future__ import annotations

from typing import Any

import torch

_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
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
_DROPOUT_KEYS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")


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
        or _dropout(model, config)
        or _adapters(model)
        or _routing(base)
    )


def _architecture(base: Any, config: Any) -> tuple[str, str] | None:
    if getattr(base.config, "is_encoder_decoder", False):
        return "an encoder-decoder reads its prompt in the encoder, not in the row", "attention: host"
    if base.get_output_embeddings() is None:
        return "the model has no language-model head", "load it with AutoModelForCausalLM"
    if getattr(config, "output_router_logits", False):
        return (
            "router losses would count a shared prompt token once instead of K times",
            "output_router_logits: false",
        )
    return None


def _state(config: Any) -> tuple[str, str] | None:
    kinds = set(getattr(config, "layer_types", None) or ()) - _ATTENTION_LAYERS
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
    return None


def _dropout(model: torch.nn.Module, config: Any) -> tuple[str, str] | None:
    for key in _DROPOUT_KEYS:
        value = getattr(config, key, None)
        if value:
            return (
                f"attention dropout draws one mask for the prompt instead of K ({key} is {value})",
                f"{key}: 0",
            )
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout) and module.p > 0:
            return (
                f"dropout draws one mask for the prompt instead of K ({name} has p = {module.p})",
                "set every dropout to 0 (lora_dropout and *_pdrop included)",
            )
    return None


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
