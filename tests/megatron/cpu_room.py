"""A room on a CPU for Megatron-core: what it asks of a GPU is answered in its place, and tiny GPTModels are built.

The answers are of the tests only: rotary tables stay on the CPU, the random state of a GPU isn't forked (there is no
dropout), and recomputation goes through torch's own checkpoint, reentrant as Megatron's is.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from metronome.shared_prompt.megatron import MegatronSharedPrompt, attach_megatron, packed
from metronome.shared_prompt.options import SharedPromptOptions
from metronome.shared_prompt.plan import SharedPromptPlan
from metronome.shared_prompt.reference import ReferenceBackend

VOCABULARY = 96
GROUPS: list[tuple[int, list[int]]] = [(13, [5, 7, 1]), (6, [9, 0]), (20, [3, 3, 3, 11])]
PADDED = 92  # 86 tokens and padding; even, as two ranks with sequence parallelism need it
TOLERANCE = 3e-6  # float32: largest difference of log-probs (nats) and of gradients (up to 4)
FAR = 1e-3  # what a wrong layout changes at the least
UNCHECKED = SharedPromptOptions(self_check=False)
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective"},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
recomputed = [0]
"""How often a checkpoint was made."""


def furnish(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the answers in place."""
    from megatron.core import tensor_parallel
    from megatron.core.transformer.moe import moe_utils

    def torch_checkpoint(function: Any, distribute: bool, *arguments: Any) -> Any:
        recomputed[0] += 1
        return checkpoint(function, *arguments, use_reentrant=True)

    tracker = SimpleNamespace(fork=lambda *args, **kwargs: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(tensor_parallel, "get_cuda_rng_tracker", lambda *args, **kwargs: tracker)
    monkeypatch.setattr(tensor_parallel, "checkpoint", torch_checkpoint)
    monkeypatch.setattr(moe_utils, "te_general_gemm", None, raising=False)  # 0.16.1 reads it without defining it
    monkeypatch.setattr(torch._dynamo.config, "disable", True)  # the output gate's arithmetic needs no compiler


class PlainNorm(torch.nn.Module):
    """RMSNorm for sequence parallelism, which Megatron's wrapper around torch's refuses."""

    def __init__(self, config: Any = None, hidden_size: int = 0, eps: float = 1e-5, **others: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.eps)


def settings(**changes: Any) -> Any:
    """The configuration of a tiny model: grouped heads 4/2, q and k normalised, gated feed-forward."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    values: dict[str, Any] = {
        "num_layers": 3,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 16,
        "ffn_hidden_size": 96,
        "use_cpu_initialization": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "qk_layernorm": True,
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
    }
    extras = {name: changes.pop(name) for name in list(changes) if name.startswith("yarn_")}
    config = TransformerConfig(**values | changes)
    for name, value in extras.items():
        setattr(config, name, value)
    return config


def build(
    positions: str = "rope", parallel_output: bool = True, stages: dict[str, bool] | None = None, **changes: Any
) -> Any:
    """A GPTModel with the layers that Megatron-core brings itself, seeded."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    rotary = {name: changes.pop(name) for name in ("rotary_percent",) if name in changes}
    config = settings(**changes)
    torch.manual_seed(7)
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, normalization="RMSNorm", qk_layernorm=config.qk_layernorm
    )
    if config.sequence_parallel:
        from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

        parts = spec.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = PlainNorm
        parts.self_attention.submodules.q_layernorm = parts.self_attention.submodules.k_layernorm = PlainNorm
        spec = TransformerBlockSubmodules(layer_specs=[spec] * config.num_layers, layer_norm=PlainNorm)
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=VOCABULARY,
        max_sequence_length=64,
        position_embedding_type=positions,
        parallel_output=parallel_output,
        share_embeddings_and_output_weights=False,
        **(stages or {}),
        **rotary,
    )


class OneWrongKey(ReferenceBackend):
    """The reference, except that one token's key and value are its neighbour's."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: SharedPromptPlan, scale: float, **others: Any) -> Tensor:
        rows = torch.arange(plan.tokens)
        rows[4] = 5
        return super().attend(q, k[rows], v[rows], plan, scale, **others)


def row() -> tuple[Tensor, SharedPromptPlan, Tensor]:
    """Token ids ``[1,T]``, the plan, and a weight for each response token's log-prob ``[N]``."""
    plan = SharedPromptPlan.build(GROUPS, pad_to=PADDED)
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (1, plan.tokens), generator=draw)
    return ids, plan, torch.rand(plan.response_tokens, generator=draw)


def separately(model: Any, ids: Tensor, plan: SharedPromptPlan) -> Tensor:
    """Log-probs ``[N]`` of every [prompt; response] run alone through the model's own attention."""
    values = []
    for group in plan.groups:
        prompt = ids[0, group.prompt.start : group.prompt.end]
        for response in group.responses:
            if not response.length:
                continue
            labels = ids[0, response.start : response.end]
            tokens = torch.cat([prompt, labels])
            hidden = torch.ones(1, 1, len(tokens), len(tokens), dtype=torch.bool).triu(1)
            logits = model(tokens[None], torch.arange(len(tokens))[None], hidden)[0, len(prompt) - 1 : -1]
            values.append(logits.log_softmax(-1).gather(1, labels[:, None])[:, 0])
    return torch.cat(values)


def shared(model: Any, handle: MegatronSharedPrompt, ids: Tensor, plan: SharedPromptPlan, form: str = "sbhd") -> Tensor:
    """Log-probs ``[N]`` of the shared row."""
    logits = model(
        input_ids=ids,
        position_ids=None,
        attention_mask=None,
        packed_seq_params=packed(plan, form),
    )
    return handle.response_log_probs(logits, ids, plan)


def gradients(model: Any, log_probs: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Gradients of the weighted sum of log-probs, by parameter; the model's are emptied."""
    model.zero_grad(set_to_none=True)
    (log_probs * weights).sum().backward()
    found = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def furthest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference of any gradient."""
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in other)


def compared(model: Any, backend: Any, form: str = "sbhd") -> tuple[float, float]:
    """Largest differences of log-probs and gradients between the shared row and separate rows."""
    ids, plan, weights = row()
    wanted = separately(model, ids, plan)
    wanted_gradients = gradients(model, wanted, weights)
    handle = attach_megatron(model, backend)
    found = shared(model, handle, ids, plan, form)
    found_gradients = gradients(model, found, weights)
    handle.detach()
    return (found - wanted).abs().max().item(), furthest(found_gradients, wanted_gradients)
