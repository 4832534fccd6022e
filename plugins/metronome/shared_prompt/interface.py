"""What is registered with transformers' attention and mask interfaces as ``metronome_shared_prompt``.

The layout travels as a keyword of the model's forward. A context variable would end before gradient
checkpointing recomputes a layer in the backward pass, and reentrant checkpointing would then be silently
wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from metronome.contracts import AttentionBackend, AttentionNeed
from metronome.errors import ConfigurationError
from metronome.shared_prompt.plan import SharedPromptPlan
from metronome.shared_prompt.reference import masked_attention
from metronome.shared_prompt.reuse import Exchange

NAME = "metronome_shared_prompt"
"""The attention implementation's name, and the keyword that carries a ``SharedPromptCall``."""


_UNDERSTOOD = {"position_ids", "cache_position"}  # tensors that the plan stands for


@dataclass(frozen=True)
class Signature:
    """What one attention layer asks for: heads, widths, dtype name, score factor, window in tokens, sinks."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    scale: float
    window: int | None
    sinks: bool

    def need(self, device: str, cached_prompt: bool = False) -> AttentionNeed:
        """What the layer asks of a backend."""
        return AttentionNeed(
            device,
            str(self.dtype).removeprefix("torch."),
            self.head_dim,
            self.value_dim,
            self.heads,
            self.kv_heads,
            self.window is not None,
            self.sinks,
            cached_prompt=cached_prompt,
        )


@dataclass
class SharedPromptCall:
    """One forward pass: its layout, its backend, and the layers that came through here.

    ``exchange`` stands between a layer's keys and values and the backend where a prompt is cached.
    """

    plan: SharedPromptPlan
    backend: AttentionBackend
    exchange: Exchange | None = None
    layers: list[Signature] = field(default_factory=list)


def register() -> None:
    """Registers both functions with transformers; harmless when repeated."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def placeholder_mask(tokens: int, device: torch.device) -> Tensor:
    """A ``[1,1,T,T]`` view of one element: transformers takes a 4-D mask as it is and builds none."""
    return torch.ones(1, dtype=torch.bool, device=device).as_strided((1, 1, tokens, tokens), (0, 0, 0, 0))


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    metronome_shared_prompt: SharedPromptCall | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """``query [1,Nq,T,D], key [1,Nkv,T,D], value [1,Nkv,T,Dv] -> [1,T,Nq,Dv]``; without a layout, plain sdpa.

    Raises ConfigurationError for what ``attend`` can't be told: dropout, softcapping, biases, a cache, a mask
    that isn't causal, or a need that the backend doesn't serve.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = metronome_shared_prompt
    if call is None:
        return _ordinary(module, query, key, value, attention_mask, scale, dropout, s_aux, others), None
    _check_layer(module, query, key, attention_mask, dropout, others, call.plan)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    kind = q.device.type
    if torch.is_autocast_enabled(kind):  # as sdpa does: rotary tables may have left q and k wider than v
        q, k, v = (x.to(torch.get_autocast_dtype(kind)) for x in (q, k, v))
    if call.exchange is not None:
        k, v = call.exchange(module, k, v)
    layer = Signature(q.shape[1], k.shape[1], q.shape[2], v.shape[2], q.dtype, scale, sliding_window, s_aux is not None)
    reason = call.backend.supports(layer.need(kind, bool(call.plan.first_query)))
    if reason is not None:
        raise _refused(f"attention backend {call.backend.name!r} can't serve this layer: {reason}", module)
    call.layers.append(layer)
    with torch.autocast(kind, enabled=False):
        out = call.backend.attend(q, k, v, call.plan, scale, window=sliding_window, sinks=s_aux)
    return out[None].contiguous(), None


def _ordinary(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    dropout: float,
    sinks: Tensor | None,
    others: dict[str, Any],
) -> Tensor:
    if sinks is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        out: Tensor = sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scale, **others)[
            0
        ]
        return out
    if mask is None:  # sdpa's convention: causal from the upper left, except for a single query
        ones = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
        mask = (ones.tril() if query.shape[2] > 1 else ones)[None, None]
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return masked_attention(q, k, v, mask[:, :, None], scale, sinks)


def _check_layer(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    dropout: float,
    others: dict[str, Any],
    plan: SharedPromptPlan,
) -> None:
    if mask is not None and mask.stride()[-2:] != (0, 0):  # ours is a view of one element
        raise _refused("it makes a mask of its own, which would be dropped", module)
    unknown = [name for name, value in others.items() if isinstance(value, Tensor) and name not in _UNDERSTOOD]
    if unknown:
        raise _refused(f"it hands {', '.join(unknown)} to attention, which would be dropped", module)
    if dropout:
        raise _refused(f"attention dropout {dropout} is active", module)
    if others.get("softcap") is not None:
        raise _refused("attention logit softcapping isn't part of attend()", module)
    if others.get("position_bias") is not None:
        raise _refused("position biases follow packed positions", module)
    causal = others.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise _refused("attention that isn't causal would see across responses", module)
    if query.shape[0] != 1 or query.shape[2] != plan.queries or key.shape[2] != plan.queries:
        raise _refused(
            f"a row of {plan.queries} tokens met queries {tuple(query.shape)} and keys {tuple(key.shape)}",
            module,
        )


def _refused(reason: str, module: torch.nn.Module) -> ConfigurationError:
    return ConfigurationError(
        f"shared prompts can't go through this layer: {reason}",
        where=type(module).__name__,
        remedy="attention: host",
    )
