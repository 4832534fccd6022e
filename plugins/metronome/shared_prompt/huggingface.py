"""Shared-prompt rows for any Hugging Face decoder that uses transformers' attention interface."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from metronome.contracts import AttentionBackend
from metronome.errors import ConfigurationError
from metronome.shared_prompt.interface import NAME, SharedPromptCall, Signature, placeholder_mask, register
from metronome.shared_prompt.logits import head_of, response_log_probs
from metronome.shared_prompt.options import SharedPromptOptions
from metronome.shared_prompt.plan import SharedPromptPlan
from metronome.shared_prompt.refusals import refusal
from metronome.shared_prompt.reuse import CachedPrompt, Exchange
from metronome.shared_prompt.selfcheck import check_attention, check_log_probs

_CHECKED_TOKENS = 512  # response tokens of one row whose logits the self-check holds at once


def attach(
    model: torch.nn.Module, backend: AttentionBackend, options: SharedPromptOptions | None = None
) -> SharedPromptModel:
    """Sets ``model``'s attention to ``backend`` for shared rows; rows without a layout still go through sdpa.

    Args:
        model: a causal language model of transformers, or peft's wrapper around one.
        backend: what computes attention; its ``options``, if they are SharedPromptOptions, are the default of
            the next argument.
        options: whether and how closely the first use is checked.

    Raises ConfigurationError, with the reason, for models that shared rows can't serve (``refusals.py``) and
    for a backend that doesn't share prompts.
    """
    if not isinstance(backend, AttentionBackend):
        raise ConfigurationError(
            "an attention backend is an object, not a name",
            found=backend,
            where="attach(model, backend)",
            remedy="SharedPromptAttention(SharedPromptOptions(backend=NAME)) of metronome.shared_prompt.select",
        )
    if not backend.shares_prompt:
        raise ConfigurationError(
            f"attention backend {backend.name!r} doesn't share prompts",
            where="metronome.attention",
            remedy="attention: shared_prompt",
        )
    unwrap = getattr(model, "get_base_model", None)
    base: Any = model if unwrap is None else unwrap()
    config = base.config.get_text_config(decoder=True)
    refused = refusal(model, base, config)
    if refused is not None:
        raise _refused(base, *refused)
    own = getattr(backend, "options", None)  # a third party's backend may mean something else by this name
    if options is None and isinstance(own, SharedPromptOptions):
        options = own
    return SharedPromptModel(base, config, backend, options)


class SharedPromptModel:
    """A model that reads shared rows; ``detach`` gives it its old attention back.

    Attributes:
        backend: what computes attention.
        calls: attention calls made through shared rows so far (proof of life).
    """

    def __init__(self, base: Any, config: Any, backend: AttentionBackend, options: SharedPromptOptions | None) -> None:
        self.backend = backend
        self.calls = 0
        self._base, self._config = base, config
        self._decoder = base.get_decoder()
        self._head = head_of(base, config)
        self._options = options or SharedPromptOptions()
        self._before = base.config._attn_implementation
        if self._before == NAME:  # another handle's; rows without a layout go through sdpa there
            self._before = "sdpa"
        self._checked = self._checked_cached = False
        self._layers: list[Signature] = []  # of the last pass, as the plan
        self._plan: SharedPromptPlan | None = None
        self._attached = False
        register()
        self._set(NAME)

    def hidden_states(self, input_ids: Tensor, plan: SharedPromptPlan) -> Tensor:
        """The decoder's last hidden states, ``[T] -> [T,d]``.

        Raises ConfigurationError if the row doesn't fit its plan or if a layer went around the interface,
        and, in the first call, EqualityViolated if the self-check fails.
        """
        self._first_use(input_ids, plan)
        return self._forward(input_ids, plan)[0]

    def cached_prompt(self, prompt_ids: Tensor) -> CachedPrompt:
        """One prompt ``[Lp]`` for any number of response micro-batches, as a context (``reuse.py``).

        Raises ConfigurationError for anything but one tensor of at least one token.
        """
        if not isinstance(prompt_ids, Tensor) or prompt_ids.dim() != 1 or not len(prompt_ids):
            raise ConfigurationError(
                "a cached prompt is one tensor [Lp] of at least one token id",
                found=tuple(prompt_ids.shape) if isinstance(prompt_ids, Tensor) else type(prompt_ids).__name__,
                where="cached_prompt(prompt_ids)",
                remedy="torch.tensor([...]) of one prompt's ids",
            )
        return CachedPrompt(self, prompt_ids)

    def hidden_through(self, input_ids: Tensor, plan: SharedPromptPlan, exchange: Exchange) -> Tensor:
        """``[Q] -> [Q,d]``, every layer's keys and values going through ``exchange``; for ``reuse.py``."""
        return self._forward(input_ids, plan, exchange)[0]

    def log_probs(
        self, input_ids: Tensor, plan: SharedPromptPlan, temperature: float = 1.0, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Log-prob of every response token in packed order, and the entropies if asked, ``[T] -> [N], [N]``.

        ``log_softmax(logits / temperature)`` in nats, float32 (float64 for float64 models), both with
        gradient. The head runs once for each distinct row. Raises as ``hidden_states`` does.
        """
        hidden = self.hidden_states(input_ids, plan)
        return self.log_probs_of(hidden, input_ids, plan, temperature, entropy)

    def explain(self) -> str:
        """Which backend serves the last pass's layers and why, a sentence a kind of layer."""
        tell = getattr(self.backend, "explain", None)
        if tell is None or self._plan is None:
            return self.backend.name
        kinds, cached = dict.fromkeys(self._layers), bool(self._plan.first_query)
        return "; ".join(dict.fromkeys(tell(kind.need(self._plan.device.type, cached), self._plan) for kind in kinds))

    def detach(self) -> None:
        """Gives the model its attention implementation back; call it after the last backward pass.

        Gradient checkpointing runs layers again in the backward pass, and they would no longer see the layout.
        """
        if self._attached:
            self._set(self._before)

    def check_attached(self) -> None:
        """Raises ConfigurationError once the model has its old attention back."""
        if not self._attached or self._base.config._attn_implementation != NAME:
            raise ConfigurationError(
                "the model was detached from shared prompts, by this handle or another of the same model",
                where=type(self._base).__name__,
                remedy="attach it again",
            )

    def log_probs_of(
        self, hidden: Tensor, input_ids: Tensor, plan: SharedPromptPlan, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """``log_probs`` from hidden states that ``plan.label_rows`` point into."""
        tokens, vocabulary = input_ids[plan.response_index], self._config.vocab_size
        return response_log_probs(hidden, self._head, tokens, plan, vocabulary, temperature, entropy)

    def _forward(
        self, input_ids: Tensor, plan: SharedPromptPlan, exchange: Exchange | None = None
    ) -> tuple[Tensor, list[Signature]]:
        self.check_attached()
        if input_ids.shape != (plan.queries,):
            raise ConfigurationError(
                "a row must be one tensor [T] as long as its plan",
                found=tuple(input_ids.shape),
                where="shared_prompt row",
                remedy=f"one row of {plan.queries} token ids, or lengths that add up to the ids that are passed",
            )
        if input_ids.device != plan.device:
            raise ConfigurationError(
                "the row's token ids and its plan are on two devices",
                found=f"{input_ids.device} and {plan.device}",
                where="shared_prompt row",
                remedy="SharedPromptPlan.build(..., device=input_ids.device)",
            )
        call = SharedPromptCall(plan, self.backend, exchange)
        output = self._decoder(
            input_ids=input_ids[None],
            position_ids=plan.position_ids[None],
            attention_mask=placeholder_mask(plan.queries, input_ids.device),
            use_cache=False,
            return_dict=True,
            **{NAME: call},
        )
        self._layers = layers = list(call.layers)  # a checkpointed layer comes again in the backward pass
        self._plan = plan
        self._check_layers(layers)
        self.calls += len(layers)
        hidden: Tensor = output.last_hidden_state[0]
        return hidden, layers

    def _check_layers(self, layers: list[Signature]) -> None:
        expected = self._config.num_hidden_layers
        if len(layers) != expected:
            raise _refused(
                self._base,
                f"{len(layers)} of {expected} layers went through the attention interface with their layout",
                "attention: host",
            )
        kinds = getattr(self._config, "layer_types", None)
        if kinds is not None:
            sliding = kinds.count("sliding_attention")
            told = sum(layer.window is not None for layer in layers)
            if told < sliding:
                raise _refused(
                    self._base,
                    f"{told} of {sliding} sliding-window layers say how long their window is",
                    "attention: host",
                )

    def _first_use(self, input_ids: Tensor, plan: SharedPromptPlan) -> None:
        if self._checked or not self._options.self_check:
            return
        number = next((n for n, group in enumerate(plan.groups) if group.buckets), None)
        if number is None:
            return  # nothing to compare yet
        group, alone = plan.groups[number], plan.alone(number)
        ids = input_ids[group.prompt.start : group.end]
        with torch.no_grad():
            hidden, layers = self._forward(ids, alone)
            for layer in dict.fromkeys(layers):
                check_attention(self.backend, plan, layer, input_ids.device)
            shared = self.log_probs_of(hidden, ids, alone, 1.0, False)[0]
            with self._separately():
                rows, picked = self._separate_rows(ids, alone)
        check_log_probs(shared[picked], rows, layers[0].dtype, self._options.self_check_tolerance)
        self._checked = True

    def check_cached(self, hidden: Tensor, prompt_ids: Tensor, ids: Tensor, plan: SharedPromptPlan) -> None:
        """The self-check of the first micro-batch that reads a cached prompt, as ``_first_use`` is of whole rows.

        Args:
            hidden: ``[1 + S,d]``, what ``plan.label_rows`` point into.
            prompt_ids, ids: the prompt's tokens and the responses'.
            plan: of the responses.
        """
        if self._checked_cached or not self._options.self_check:
            return
        with torch.no_grad():
            for layer in dict.fromkeys(self._layers):
                check_attention(self.backend, plan, layer, ids.device)
            shared = self.log_probs_of(hidden.detach(), ids, plan, 1.0, False)[0]
            group = plan.groups[0]
            whole = SharedPromptPlan.build([(group.prompt.length, [one.length for one in group.responses])])
            with self._separately():
                rows, picked = self._separate_rows(torch.cat([prompt_ids, ids]), whole)
        check_log_probs(shared[picked], rows, self._layers[0].dtype, self._options.self_check_tolerance)
        self._checked_cached = True

    def _separate_rows(self, ids: Tensor, plan: SharedPromptPlan) -> tuple[Tensor, Tensor]:
        """Log-probs of the one group's responses through the unchanged model, and which tokens they are."""
        group = plan.groups[0]
        prompt = group.prompt.length
        values, picked = [], []
        some = "logits_to_keep" in inspect.signature(self._base.forward).parameters
        for response in group.responses:
            if not response.length:
                continue
            row = torch.cat([ids[:prompt], ids[response.start : response.end]])
            chosen = torch.arange(response.length, device=ids.device)
            if response.length > _CHECKED_TOKENS:
                chosen = torch.cat([chosen[: _CHECKED_TOKENS // 2], chosen[-(_CHECKED_TOKENS // 2) :]])
            places = prompt - 1 + chosen
            if some:
                logits = self._base(input_ids=row[None], use_cache=False, logits_to_keep=places).logits[0]
            else:
                logits = self._base(input_ids=row[None], use_cache=False).logits[0, places]
            log_probs = torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), dim=-1)
            values.append(log_probs.gather(1, row[prompt + chosen, None])[:, 0])
            picked.append(response.start - prompt + chosen)
        return torch.cat(values), torch.cat(picked)

    @contextmanager
    def _separately(self) -> Iterator[None]:
        self._set(self._before)
        try:
            yield
        finally:
            self._set(NAME)

    def _set(self, implementation: str) -> None:
        self._base.set_attn_implementation(implementation)
        self._attached = self._base.config._attn_implementation == NAME
        if implementation == NAME and not self._attached:
            raise _refused(self._base, "it doesn't take a registered attention implementation", "attention: host")


def _refused(base: Any, reason: str, remedy: str) -> ConfigurationError:
    return ConfigurationError(
        f"{type(base).__name__} can't read shared prompts: {reason}",
        where="metronome.attention",
        remedy=remedy,
    )
