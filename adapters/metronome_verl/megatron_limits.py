"""What Megatron's parallel settings rule out in periodic mode; asked before anything starts, without Megatron."""

from __future__ import annotations

from typing import Any

from metronome.errors import ConfigurationError

_UNRUN = "gradients of parts weren't run with it"
_ALLOWED: dict[str, tuple[tuple[Any, ...], str]] = {
    "param_offload": ((False,), "verl empties Megatron's gradient buffers whenever it loads the weights again"),
    "context_parallel_size": ((1,), _UNRUN),
    "dynamic_context_parallel": ((False,), "it divides gradients by each part's own number of tokens"),
    "virtual_pipeline_model_parallel_size": ((None, 1), _UNRUN),
    "use_megatron_fsdp": ((False,), "its gradients aren't in Megatron's own buffers"),
}


def check_settings(megatron: Any) -> None:
    """Raises ConfigurationError, with the line that mends it, for settings under which parts of a batch don't add up.

    Args:
        megatron: verl's ``actor_rollout_ref.actor.megatron``.
    """
    for key, (allowed, why) in _ALLOWED.items():
        found = megatron.get(key, allowed[0])
        if found not in allowed:
            mended = "null" if allowed[0] is None else allowed[0]
            where = f"actor_rollout_ref.actor.megatron.{key}"
            raise ConfigurationError(
                f"with this setting parts of a batch don't add up in Megatron's gradient buffers: {why}",
                found=found,
                where=where,
                remedy=f"{where}={mended}, or metronome.rollout_source=synchronous",
            )
