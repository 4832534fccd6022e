"""Which Megatron-core versions and models can't be served by shared-prompt rows, and why."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from metronome.errors import ConfigurationError

TESTED = ("0.16", "0.19")
"""Megatron-core releases (major.minor) that the test suite runs on."""

Refusal = tuple[str, str]

_POSITIONS = ("rope", "yarn", "learned_absolute", "none")
_BALANCED = {"none", "aux_loss", "seq_aux_loss", "global_aux_loss"}  # without a coefficient they change nothing
_HOST = "attention: host"


def check_version() -> None:
    """Raises ConfigurationError where megatron-core is missing or its release isn't a tested one."""
    try:
        import megatron.core as core
    except ImportError as error:
        raise ConfigurationError(
            "megatron-core can't be imported",
            found=str(error),
            where="metronome.attention",
            remedy="pip install 'metronome-rl[megatron]'",
        ) from error
    release = ".".join(core.__version__.split(".")[:2])
    if release not in TESTED:
        raise ConfigurationError(
            "shared prompts haven't been tested with this megatron-core",
            found=core.__version__,
            where="metronome.attention",
            remedy=f"megatron-core {' or '.join(f'{one}.x' for one in TESTED)}",
        )


def check_model(model: Any) -> None:
    """Raises ConfigurationError, with the reason, if rows of ``model``, one pipeline chunk, can't be shared."""
    refused = refusal(model)
    if refused is not None:
        reason, remedy = refused
        raise ConfigurationError(
            f"{type(model).__name__} can't read shared prompts: {reason}", where="metronome.attention", remedy=remedy
        )


def refusal(model: Any) -> Refusal | None:
    """Why ``model`` can't be served and what mends it, or None."""
    from megatron.core.models.gpt import GPTModel

    if not isinstance(model, GPTModel):
        return "only a GPTModel of megatron-core, or wrappers around it, are known", _HOST
    config: Any = model.config
    checks: Iterable[Callable[[], Refusal | None]] = (
        lambda: _parallel(config),
        lambda: _dropout(config),
        lambda: _scores(config),
        lambda: _extras(model, config),
        lambda: _experts(config),
        lambda: _execution(config),
        lambda: _layers(model, config),
        lambda: _capabilities(model),
    )
    return next((refused for check in checks if (refused := check()) is not None), None)


def _parallel(config: Any) -> Refusal | None:
    if config.context_parallel_size > 1 or getattr(config, "hybrid_context_parallel", False):
        return (
            f"context parallelism (context_parallel_size {config.context_parallel_size}) cuts every segment into"
            " pieces before attention sees the row",
            "context_parallel_size: 1",
        )
    return None


def _dropout(config: Any) -> Refusal | None:
    for key in ("attention_dropout", "hidden_dropout"):
        value = getattr(config, key)
        if value:
            return f"dropout draws one mask for the prompt instead of K ({key} is {value})", f"{key}: 0"
    return None


def _scores(config: Any) -> Refusal | None:
    if config.window_size is not None:
        return f"the sliding window {config.window_size} isn't handed to the backend and would be dropped", _HOST
    if config.softmax_type != "vanilla":
        return f"softmax_type {config.softmax_type} isn't handed to the backend and would be dropped", _HOST
    if config.apply_query_key_layer_scaling:
        return (
            "apply_query_key_layer_scaling splits the score factor between two modules",
            "apply_query_key_layer_scaling: false",
        )
    if getattr(config, "batch_invariant_mode", False):
        return (
            "batch_invariant_mode asks for one order of sums whatever shares a call, which backends don't promise",
            "batch_invariant_mode: false",
        )
    for key in ("qk_clip", "log_max_attention_logit"):
        if getattr(config, key, False):
            return f"{key} reads the largest score, which shared-prompt backends don't give back", f"{key}: false"
    return None


def _extras(model: Any, config: Any) -> Refusal | None:
    if config.multi_latent_attention:
        return "multi-latent attention (MLA) keeps its positions inside its own attention", _HOST
    if getattr(config, "mtp_num_layers", None) or getattr(model, "mtp_process", False):
        return (
            "multi-token prediction (MTP) shifts labels along the row, across the borders of responses",
            "mtp_num_layers: null",
        )
    if model.position_embedding_type not in _POSITIONS:
        return f"position_embedding_type {model.position_embedding_type} isn't given positions per token", _HOST
    for key in ("experimental_attention_variant", "linear_attention_freq", "is_hybrid_model"):
        if getattr(config, key, None):
            return f"{key} ({getattr(config, key)}): state or an index runs from one response into the next", _HOST
    for key in ("fp8", "fp4", "quant_recipe", "use_kitchen"):
        if getattr(config, key, None):
            return (
                f"{key} scales depend on which tokens share a tensor, so log-probs of shared and separate rows differ",
                f"{key}: {'false' if key == 'use_kitchen' else 'null'}",
            )
    return None


def _experts(config: Any) -> Refusal | None:
    """Losses, limits and noise of routers see the prompt once, where K separate rows would show it K times."""
    if not config.num_moe_experts:
        return None
    once = "a shared prompt token would count once instead of K times"
    for key in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
        value = getattr(config, key)
        if any(value) if isinstance(value, (list, tuple)) else value:
            return f"router losses ({key} is {value}): {once}", f"{key}: 0"
    for key in ("moe_expert_capacity_factor", "moe_expert_rank_capacity_factor"):
        value = getattr(config, key, None)
        if value is not None:
            return f"expert capacity ({key} is {value}): {once}, and other tokens would be dropped", f"{key}: null"
    if getattr(config, "moe_token_dropping", False):
        return (
            f"token dropping (moe_token_dropping): {once}, and other tokens would be dropped",
            "moe_token_dropping: false",
        )
    if config.moe_router_enable_expert_bias and config.moe_router_bias_update_rate:
        return f"the experts' bias is updated from counts of tokens: {once}", "moe_router_bias_update_rate: 0"
    kinds = config.moe_router_load_balancing_type
    unknown = set([kinds] if isinstance(kinds, str) else kinds) - _BALANCED
    if unknown:
        return (
            f"routing by {', '.join(sorted(unknown))} looks at all tokens of the row: {once}",
            "moe_router_load_balancing_type: none",
        )
    for key in ("moe_input_jitter_eps", "moe_router_force_load_balancing", "moe_router_force_biased"):
        if getattr(config, key, None):
            return f"{key} draws one noise for the prompt instead of K", f"{key}: null"
    return None


def _execution(config: Any) -> Refusal | None:
    """Ways to run a model in which packed_seq_params don't reach the layers, or our hooks aren't called."""
    graphs = getattr(config, "cuda_graph_impl", "none") not in (None, "none")
    if graphs or getattr(config, "enable_cuda_graph", False) or getattr(config, "external_cuda_graph", False):
        return "a CUDA graph replays one layout for all rows", "cuda_graph_impl: none"
    for key, why in (
        ("overlap_moe_expert_parallel_comm", "its schedule doesn't call the model's forward"),
        ("fused_single_qkv_rope", "megatron-core runs it without packed_seq_params only"),
    ):
        if getattr(config, key, False):
            return f"{key}: {why}", f"{key}: false"
    offloaded = getattr(config, "fine_grained_activation_offloading", False)
    if offloaded and "core_attn" in (config.offload_modules or ()):
        return "offloading core_attn frees queries and keys that backends keep", "offload_modules without core_attn"
    return None


def _layers(model: Any, config: Any) -> Refusal | None:
    from megatron.core.transformer.attention import CrossAttention, SelfAttention
    from megatron.core.transformer.enums import AttnMaskType

    causal = {AttnMaskType.causal, AttnMaskType.padding_causal}
    for layer in model.decoder.layers:
        attention = getattr(layer, "self_attention", None)
        if not isinstance(attention, SelfAttention):
            found = type(layer if attention is None else attention).__name__
            return f"a layer has {found} instead of SelfAttention, and may carry state between responses", _HOST
        if attention.attn_mask_type not in causal:
            return f"attention that isn't causal ({attention.attn_mask_type.name}) would see across responses", _HOST
        if getattr(attention.core_attention.forward, "metronome_shared_prompt", False):
            return "it is attached already", "detach() first"
    if any(isinstance(module, CrossAttention) for module in model.modules()):
        return "cross attention isn't part of a shared row", _HOST
    return None


def _capabilities(model: Any) -> Refusal | None:
    """Whether what we override has the arguments that we rely on, patches of others included."""
    wanted: list[tuple[str, Any, str]] = [("GPTModel.forward", model.forward, "packed_seq_params")]
    wanted.append(("GPTModel.forward", model.forward, "position_ids"))
    for layer in model.decoder.layers:
        core = layer.self_attention.core_attention
        wanted.append((f"{type(core).__name__}.forward", core.forward, "packed_seq_params"))
    for name, function, argument in wanted:
        parameters = inspect.signature(function).parameters
        if argument not in parameters and not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
            return f"{name} takes no {argument}, so the layout can't reach it", _HOST
    rotary = getattr(model, "rotary_pos_emb", None)
    if rotary is not None and not hasattr(rotary, "get_emb"):
        return f"{type(rotary).__name__} has no get_emb(), from which positions per token are taken", _HOST
    return None
