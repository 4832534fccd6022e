"""What shared prompts can't serve in verl's engine: settings refused at the start, batches left to verl's own path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from metronome.errors import ConfigurationError

_WHOLE_LOGITS = "reads the logits of every row"
_FLAGS = {
    "distillation_use_topk": f"top-k distillation {_WHOLE_LOGITS}",
    "distillation_only": f"distillation {_WHOLE_LOGITS}",
    "calculate_sum_pi_squared": f"calculate_sum_pi_squared {_WHOLE_LOGITS}",
    "enable_routing_replay": "routing replay follows separate rows",
}


def refuse_settings(model: Any, engine: Any) -> None:
    """Refuses what would leave every batch of a run to verl's own path.

    Args:
        model: verl's HFModelConfig.
        engine: verl's FSDPEngineConfig.

    Raises ConfigurationError for what ``refuse_flags`` refuses, and for models whose positions have several
    dimensions: verl gives those to rows without an image too.
    """
    refuse_flags(model, engine)
    if hasattr(model.hf_config, "vision_config") and "mrope_section" in _rotary(model.hf_config):
        raise ConfigurationError(
            "positions of several dimensions (multi-modal rotary) can't restart behind a shared prompt",
            found=model.hf_config.model_type,
            where="actor_rollout_ref.model.path",
            remedy="a model of text alone, or attention: host",
        )


def refuse_flags(model: Any, engine: Any) -> None:
    """Raises ConfigurationError for Ulysses sequence parallelism and for fused kernels, by the flags alone."""
    ranks = engine.ulysses_sequence_parallel_size
    if ranks > 1:
        raise ConfigurationError(
            "shared prompts can't be cut over the ranks of Ulysses sequence parallelism",
            found=ranks,
            where="actor_rollout_ref.actor.ulysses_sequence_parallel_size",
            remedy="ulysses_sequence_parallel_size=1, or attention: host",
        )
    if model.use_fused_kernels:
        raise ConfigurationError(
            "fused kernels compute log-probs of separate rows inside the model",
            found=True,
            where="actor_rollout_ref.model.use_fused_kernels",
            remedy="use_fused_kernels=False, or attention: host",
        )


def _rotary(config: Any) -> Mapping[str, Any]:
    text = config.get_text_config(decoder=True)
    return getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}


def why_separate(data: TensorDict) -> str | None:
    """Why a batch of verl's must be computed in separate rows, by verl's own path; None if it needn't."""
    for flag, why in _FLAGS.items():
        if tu.get_non_tensor_data(data=data, key=flag, default=False):
            return why
    if "prompts" not in data or "responses" not in data:
        return "rows aren't told apart into prompts and responses"
    ids, prompts, responses = data["input_ids"], data["prompts"], data["responses"]
    if not (ids.is_nested and prompts.is_nested and responses.is_nested):
        return "rows are padded"
    lengths = ids.offsets().diff()
    if not torch.equal(lengths, prompts.offsets().diff() + responses.offsets().diff()):
        return "rows are longer than prompt and response"
    multi_modal = data.get("multi_modal_inputs", None)
    if multi_modal is not None and any(getattr(one, "data", one) for one in multi_modal):
        return "multi-modal inputs"
    positions = data["position_ids"]
    if positions.dim() != 2:
        return "positions of several dimensions (multi-modal rotary)"
    plain = torch.arange(len(positions.values()), device=lengths.device)
    plain = plain - torch.repeat_interleave(ids.offsets()[:-1], lengths)
    if not torch.equal(positions.values().to(plain.device), plain):
        return "positions that don't count from 0"
    return None
