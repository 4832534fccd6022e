"""The overrides of one GPTModel: attention with a plan, positions per token, and what a row must be.

Shapes: T packed tokens, n query heads of this rank, d head width.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from metronome.contracts import AttentionBackend
from metronome.errors import ConfigurationError, EqualityViolated
from metronome.shared_prompt.interface import Signature
from metronome.shared_prompt.plan import SharedPromptPlan
from metronome.shared_prompt.select import tensor_need

FIELD = "metronome_shared_prompt"
"""The attribute of ``packed_seq_params`` that carries the plan, and the mark of our overrides."""

Took = Callable[[list[Signature], SharedPromptPlan], None]


class Chunk:
    """The overrides of one GPTModel, and what passes while its forward runs."""

    def __init__(self, model: Any, backend: AttentionBackend, took: Took) -> None:
        self._model, self._backend, self._took = model, backend, took
        self._attentions = [layer.self_attention for layer in model.decoder.layers]
        self._arguments = inspect.signature(model.forward)
        self._plan: SharedPromptPlan | None = None  # of the forward pass that runs now
        self._layers: dict[int, Signature] = {}  # those that it came through
        self._before: list[tuple[Any, Callable[..., Any] | None]] = []
        for number, attention in enumerate(self._attentions):
            self._override(attention.core_attention, self._attention(number, attention))
        self._rotary: Any = getattr(model, "rotary_pos_emb", None)
        self._rotary_checked = False
        if self._rotary is not None:
            self._override(self._rotary, self._positions(self._rotary.forward))
        self._hooks = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.register_forward_hook(self._end),
        ]

    def restore(self) -> None:
        """Undoes the constructor."""
        for hook in self._hooks:
            hook.remove()
        for module, own in self._before:
            if own is None:
                del module.forward
            else:
                module.forward = own

    def _override(self, module: Any, forward: Callable[..., Any]) -> None:
        self._before.append((module, vars(module).get("forward")))
        setattr(forward, FIELD, True)
        module.forward = forward

    def _begin(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before the model's forward: takes the plan; positions are the plan's, whatever the caller passed."""
        bound = self._arguments.bind_partial(*args, **kwargs)
        params = bound.arguments.get("packed_seq_params")
        self._plan, self._layers = getattr(params, FIELD, None), {}
        if self._plan is None:
            return None
        self._check_row(self._plan, params, bound.arguments)
        bound.arguments["position_ids"] = self._plan.position_ids[None]
        return bound.args, bound.kwargs

    def _check_row(self, plan: SharedPromptPlan, params: Any, arguments: dict[str, Any]) -> None:
        config: Any = self._model.config
        for name in ("attention_mask", "attention_bias", "labels", "inference_context", "inference_params"):
            if arguments.get(name) is not None:
                why = "labels are gathered by plan.label_rows" if name == "labels" else "the plan takes its place"
                raise _wrong_row(f"{name} can't go with a plan: {why}", type(arguments[name]).__name__, f"{name}: None")
        if plan.first_query:
            raise _wrong_row("a cached prompt can't be read by Megatron models", None, "cached_prompt: False")
        if params.qkv_format not in ("sbhd", "thd"):
            raise _wrong_row("a shared row is packed as sbhd or thd", params.qkv_format, "packed(plan)")
        if params.qkv_format == "thd" and config.apply_rope_fusion:
            raise _wrong_row(
                "the fused rotary kernel for thd counts positions within segments only",
                "apply_rope_fusion",
                "packed(plan, 'sbhd'), or apply_rope_fusion: false",
            )
        if (params.local_cp_size or 1) > 1:
            raise _wrong_row("context parallelism cuts the row", params.local_cp_size, "local_cp_size: None")
        size = config.tensor_model_parallel_size
        if config.sequence_parallel and plan.tokens % size:
            raise _wrong_row(
                f"sequence parallelism cuts the row among {size} ranks",
                f"{plan.tokens} tokens",
                f"SharedPromptPlan.build(pad_to={-(-plan.tokens // size) * size})",
            )
        ids = arguments.get("input_ids")
        if self._model.pre_process and ids is not None and tuple(ids.shape) != (1, plan.tokens):
            raise _wrong_row("a row must be [1,T] as long as its plan", tuple(ids.shape), f"{plan.tokens} token ids")

    def _end(self, module: Any, args: tuple[Any, ...], output: Any) -> None:
        """After the model's forward: every layer must have come through here."""
        plan, self._plan = self._plan, None
        if plan is None:
            return
        if len(self._layers) != len(self._attentions):
            raise ConfigurationError(
                "layers went around shared-prompt attention",
                found=f"{len(self._layers)} of {len(self._attentions)} came through",
                where=type(self._model).__name__,
                remedy="attach after all patches of core_attention, or attention: host",
            )
        self._took(list(self._layers.values()), plan)

    def _positions(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """The rotary module's forward: the table ``[T,1,1,d]`` by position while a plan passes."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            plan, rotary = self._plan, self._rotary
            if plan is None:
                return stock(*args, **kwargs)
            count = max(group.reach for group in plan.groups)  # integers: nothing is read back from the device
            count = max(count, 0 if plan.padding is None else plan.padding.length)
            table = rotary.get_emb(count)
            emb = table[0] if isinstance(table, tuple) else table  # yarn gives a factor too
            if not self._rotary_checked:
                _check_table(emb, stock(count), rotary)
                self._rotary_checked = True
            emb = emb.index_select(0, plan.position_ids)
            return (emb, *table[1:]) if isinstance(table, tuple) else emb

        return forward

    def _attention(self, number: int, attention: Any) -> Callable[..., Any]:
        """``core_attention.forward``: ``[T,1,n,d] -> [T,1,n d]`` (sbhd) or ``[T,n,d] -> [T,n d]`` (thd)."""
        stock, scale = attention.core_attention.forward, _scale(attention)

        def forward(
            query: Tensor, key: Tensor, value: Tensor, *args: Any, packed_seq_params: Any = None, **kwargs: Any
        ) -> Any:
            plan = getattr(packed_seq_params, FIELD, None)
            if plan is None:
                return stock(query, key, value, *args, packed_seq_params=packed_seq_params, **kwargs)
            flat = query.dim() == 3
            q, k, v = (query, key, value) if flat else (x.squeeze(1) for x in (query, key, value))
            signature = self._check_layer(q, k, v, scale, plan, kwargs)
            if self._plan is not None:  # else a layer is computed again in the backward pass
                self._layers[number] = signature
            with torch.autocast(q.device.type, enabled=False):
                out = self._backend.attend(q, k, v, plan, scale).flatten(1)
            return out if flat else out[:, None]

        return forward

    def _check_layer(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, plan: SharedPromptPlan, others: dict[str, Any]
    ) -> Signature:
        dropped = [name for name, value in others.items() if value is not None and name != "attn_mask_type"]
        if dropped:
            raise _wrong_row("a layer's attention has arguments that would be dropped", dropped, "attention: host")
        if q.dim() != 3 or len(q) != plan.tokens or len(k) != plan.tokens:
            raise _wrong_row(
                f"a layer's attention must see the whole row of {plan.tokens} tokens, batch of one",
                (tuple(q.shape), tuple(k.shape)),
                "one row a forward",
            )
        if q.device != plan.device:
            raise _wrong_row("the plan is on another device", str(plan.device), f"build it on {q.device}")
        backend = self._backend
        reason = backend.supports(tensor_need(q, k, v, window=False, sinks=False))
        if reason is not None:
            raise _wrong_row(
                f"attention backend {backend.name!r} can't serve this layer: {reason}", None, "backend: auto"
            )
        return Signature(q.shape[1], k.shape[1], q.shape[2], v.shape[2], q.dtype, scale, None, False)


def _scale(attention: Any) -> float:
    """The factor of the scores: what the core module holds, else what Megatron's configuration says."""
    scale = getattr(attention.core_attention, "softmax_scale", None)
    if not isinstance(scale, float):
        scale = attention.config.softmax_scale
    return float(attention.config.kv_channels**-0.5 if scale is None else scale)


def _check_table(emb: Tensor, stock: Any, rotary: Any) -> None:
    """``get_emb`` must be what the module's forward gives, which others may have patched."""
    told = stock[0] if isinstance(stock, tuple) else stock
    if not isinstance(told, Tensor) or told.shape != emb.shape or not torch.equal(told, emb):
        raise EqualityViolated(
            "the rotary table by position isn't the table that the model's own rotary forward gives",
            found=tuple(told.shape) if isinstance(told, Tensor) else type(told).__name__,
            where=type(rotary).__name__,
            remedy="attach to a model whose rotary embedding nobody patched, or attention: host",
        )


def _wrong_row(what: str, found: object, remedy: str) -> ConfigurationError:
    return ConfigurationError(what, found=found, where="shared row of a Megatron model", remedy=remedy)
