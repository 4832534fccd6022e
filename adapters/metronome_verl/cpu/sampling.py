"""What a request may ask of the sampler, in verl's words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from metronome.decoding.sampling import Sampling
from metronome.errors import ConfigurationError, nearest

_KNOWN = (
    "temperature",
    "top_p",
    "top_k",
    "repetition_penalty",
    "logprobs",
    "max_tokens",
    "max_new_tokens",
    "stop_token_ids",
    "ignore_eos",
    "seed",
)
LOG_PROBS_MODES = ("processed_logprobs", "raw_logprobs")


def parse(parameters: Mapping[str, Any], *, max_tokens: int, stop: frozenset[int], ignore_eos: bool) -> Sampling:
    """A request's ``Sampling`` from verl's dictionary; raises ConfigurationError for what isn't honoured.

    Args:
        parameters: verl's sampling parameters.
        max_tokens: the default.
        stop: the model's end tokens, unless ``ignore_eos`` (the default of the parameter) drops them.
        ignore_eos: the rollout's setting.
    """
    where = "a request's sampling parameters"
    for name, value in parameters.items():
        if name not in _KNOWN:
            raise ConfigurationError(
                "metronome_hf doesn't know this sampling parameter",
                found={name: value},
                where=where,
                remedy=nearest(name, _KNOWN),
            )
    if (penalty := parameters.get("repetition_penalty", 1.0)) != 1.0:
        raise ConfigurationError(
            "metronome_hf has no repetition penalty", found=penalty, where=where, remedy="repetition_penalty=1.0"
        )
    limit = parameters.get("max_tokens", parameters.get("max_new_tokens"))
    ends = frozenset() if parameters.get("ignore_eos", ignore_eos) else stop
    return Sampling(
        temperature=float(parameters.get("temperature", 1.0)),
        top_k=int(parameters.get("top_k", -1)),
        top_p=float(parameters.get("top_p", 1.0)),
        max_tokens=max_tokens if limit is None else int(limit),
        stop=ends | frozenset(parameters.get("stop_token_ids") or ()),
        log_probs=bool(parameters.get("logprobs", False)),
        seed=parameters.get("seed"),
    )
