"""Shared-prompt rows for a built GPTModel of Megatron-core, whoever built it.

The plan travels on ``packed_seq_params``, which Megatron hands to every layer of every pipeline stage and through
recomputation unchanged. Each SelfAttention's ``core_attention.forward`` is overridden on the instance, so that
parameters, state-dict keys and patches of others stay. GPTModel gives rotary embeddings a length only and ignores
``position_ids`` (Megatron-LM issue 453): they are given positions per token while a row with a plan passes.

Shapes: T packed tokens (a multiple of the tensor-parallel size with sequence parallelism), n query heads and g
key/value heads of this rank, d head width, N response tokens, V vocabulary. Not run on a GPU or NPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from metronome.contracts import AttentionBackend
from metronome.errors import ConfigurationError
from metronome.shared_prompt.interface import Signature
from metronome.shared_prompt.logits import response_log_probs
from metronome.shared_prompt.megatron_chunk import FIELD, Chunk
from metronome.shared_prompt.megatron_refusals import check_model, check_version
from metronome.shared_prompt.options import SharedPromptOptions
from metronome.shared_prompt.plan import SharedPromptPlan
from metronome.shared_prompt.selfcheck import check_attention

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams


def packed(plan: SharedPromptPlan, qkv_format: Literal["sbhd", "thd"] = "sbhd") -> PackedSeqParams:
    """The ``packed_seq_params`` of a row, with its plan on it; ``sbhd`` (batch of one) serves fused rotary kernels too.

    Raises ConfigurationError for another format.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    if qkv_format not in ("sbhd", "thd"):
        raise ConfigurationError(
            "a shared row is packed as sbhd or thd", found=qkv_format, where="packed(qkv_format)", remedy="sbhd"
        )
    segments = [segment for group in plan.groups for segment in (group.prompt, *group.responses) if segment.length]
    if plan.padding is not None:
        segments.append(plan.padding)
    ends = plan.once(
        ("megatron", "ends"),
        lambda: torch.tensor([0, *(segment.end for segment in segments)], dtype=torch.int32).to(plan.device),
    )
    longest = max(segment.length for segment in segments)
    params = PackedSeqParams(
        qkv_format=qkv_format, cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    setattr(params, FIELD, plan)
    return params


def attach_megatron(
    model: Any, backend: AttentionBackend, options: SharedPromptOptions | None = None
) -> MegatronSharedPrompt:
    """Sends rows that carry a plan through ``backend``; rows without one go through the model's own attention.

    Args:
        model: a built GPTModel, one inside wrappers (``.module``: Float16Module, DDP), or a list of pipeline
            chunks. After the patches of others (MindSpeed's ``repatch``), before any copy of the model is needed.
        backend: what computes attention; its ``options``, if they are SharedPromptOptions, are the default of the
            next argument.
        options: whether the backend is checked at the first use of each kind of layer.

    Raises ConfigurationError, with the reason, for releases and models that shared rows can't serve
    (``megatron_refusals.py``) and for a backend that doesn't share prompts.
    """
    if not backend.shares_prompt:
        raise ConfigurationError(
            f"attention backend {backend.name!r} doesn't share prompts",
            where="metronome.attention",
            remedy="attention: shared_prompt",
        )
    check_version()
    models = [_unwrapped(one) for one in (model if isinstance(model, (list, tuple)) else [model])]
    for one in models:
        check_model(one)
    own = getattr(backend, "options", None)  # a third party's backend may mean something else by this name
    if options is None and isinstance(own, SharedPromptOptions):
        options = own
    return MegatronSharedPrompt(models, backend, options or SharedPromptOptions())


class MegatronSharedPrompt:
    """Chunks of a model that read shared rows; ``detach`` gives them back what they had.

    Attributes:
        backend: what computes attention.
        calls: attention calls of forward passes with a plan so far, recomputation left out (proof of life).
    """

    def __init__(self, models: list[Any], backend: AttentionBackend, options: SharedPromptOptions) -> None:
        self.backend = backend
        self.calls = 0
        self._self_check = options.self_check
        self._checked: set[Signature] = set()
        self._head = next((one for one in models if one.post_process), None)
        self._chunks = [Chunk(one, backend, self._took) for one in models]

    def detach(self) -> None:
        """Takes every override and hook away; rows with a plan must not follow."""
        for chunk in self._chunks:
            chunk.restore()
        self._chunks = []

    def response_log_probs(
        self, logits: Tensor, input_ids: Tensor, plan: SharedPromptPlan, temperature: float = 1.0
    ) -> Tensor:
        """``log_softmax(logits / temperature)`` of every response token in packed order, ``[1,T,V] -> [N]``.

        Labels are gathered (``plan.label_rows``), never shifted. Logits that are split over the vocabulary go
        through Megatron's own vocab-parallel cross entropy and give the same values on every tensor-parallel rank.

        Args:
            logits: what the last pipeline stage returns without labels, ``[1,T,V]`` or ``[1,T,V / tp]``.
            input_ids: ``[1,T]``.
            plan: the row's layout.
            temperature: divides the logits.

        Returns nats with gradient, float32 (float64 for whole float64 logits). Raises ConfigurationError where
        this rank has no head, or for another shape.
        """
        if self._head is None:
            raise ConfigurationError(
                "this pipeline stage has no head and no logits",
                where="response_log_probs",
                remedy="call it on the last stage",
            )
        vocabulary, size = self._head.vocab_size, self._head.config.tensor_model_parallel_size
        width = logits.shape[-1]
        if tuple(logits.shape[:2]) != (1, plan.tokens) or width not in (vocabulary, vocabulary // size):
            raise ConfigurationError(
                "logits of a shared row must be [1,T,V], or [1,T,V / tp] as a vocab-parallel head gives them",
                found=tuple(logits.shape),
                where="response_log_probs",
                remedy=f"T = {plan.tokens}, V = {vocabulary}, tp = {size}",
            )
        tokens = input_ids.reshape(-1)[plan.response_index]
        if width == vocabulary:
            return response_log_probs(logits[0], _scores, tokens, plan, vocabulary, temperature)[0]
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        rows = logits[0].index_select(0, plan.label_rows).float()  # a copy: the call below writes into it
        loss: Tensor = vocab_parallel_cross_entropy(rows if temperature == 1.0 else rows / temperature, tokens)
        return -loss

    def _took(self, layers: list[Signature], plan: SharedPromptPlan) -> None:
        """Counts one pass through a chunk and checks kinds of layers that are new.

        Here and not inside the layer: what a checkpointed layer computes is computed again in the backward pass,
        and must be the same.
        """
        self.calls += len(layers)
        for layer in dict.fromkeys(layers):
            if self._self_check and layer not in self._checked:
                check_attention(self.backend, plan, layer, plan.device)
            self._checked.add(layer)


def _unwrapped(model: Any) -> Any:
    while hasattr(model, "module"):
        model = model.module
    return model


def _scores(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
