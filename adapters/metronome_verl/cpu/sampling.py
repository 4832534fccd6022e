"""What a request may ask of the sampler, and the choice of one token with its log-probability."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

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


@dataclass(frozen=True)
class Sampling:
    """How one request is sampled.

    Attributes:
        temperature: 0 takes the most likely token.
        top_k: how many tokens stay; 0 or less: all.
        top_p: the probability mass that stays, in (0, 1].
        max_tokens: tokens at most.
        stop: tokens that end the response; they stay in it.
        log_probs: whether log-probs are returned.
        seed: a seed of the request's own, or None.
    """

    temperature: float
    top_k: int
    top_p: float
    max_tokens: int
    stop: frozenset[int]
    log_probs: bool
    seed: int | None = None


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
    sampling = Sampling(
        temperature=float(parameters.get("temperature", 1.0)),
        top_k=int(parameters.get("top_k", -1)),
        top_p=float(parameters.get("top_p", 1.0)),
        max_tokens=max_tokens if limit is None else int(limit),
        stop=ends | frozenset(parameters.get("stop_token_ids") or ()),
        log_probs=bool(parameters.get("logprobs", False)),
        seed=parameters.get("seed"),
    )
    if sampling.temperature < 0:
        raise ConfigurationError("a negative temperature", found=sampling.temperature, where=where, remedy="0 or more")
    if not 0 < sampling.top_p <= 1:
        raise ConfigurationError(
            "top_p isn't a probability", found=sampling.top_p, where=where, remedy="above 0, at most 1"
        )
    return sampling


def choose(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator, processed: bool) -> tuple[int, float]:
    """One token and its log-probability, from ``logits`` of shape (vocabulary,), fp32.

    log p = log softmax(logits / temperature) over the tokens that top-k, then top-p, leave when ``processed``
    (verl's logprobs_mode=processed_logprobs); log softmax(logits) otherwise. At temperature 0 both are the latter.
    """
    if sampling.temperature == 0:
        token = int(logits.argmax())
        return token, float(torch.log_softmax(logits, -1)[token])
    log_p = torch.log_softmax(_kept(logits / sampling.temperature, sampling), -1)
    token = int(torch.multinomial(log_p.exp(), 1, generator=generator))
    return token, float((log_p if processed else torch.log_softmax(logits, -1))[token])


def _kept(scores: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    if 0 < sampling.top_k < scores.numel():
        lowest = scores.topk(sampling.top_k).values[-1]
        scores = scores.masked_fill(scores < lowest, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = scores.sort(descending=True)
        mass = ordered.softmax(-1)
        # The token that crosses the mass stays: only what lies wholly behind it goes.
        dropped = mass.cumsum(-1) - mass >= sampling.top_p
        scores = scores.masked_fill(torch.zeros_like(dropped).scatter(0, order, dropped), -torch.inf)
    return scores
