"""How a request is sampled, and the choice of one token with its log-probability."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from metronome.errors import ConfigurationError


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
        min_tokens: tokens before which none of ``stop`` is sampled.

    Raises ConfigurationError for a negative temperature, and a ``top_p`` that isn't a probability.
    """

    temperature: float
    top_k: int
    top_p: float
    max_tokens: int
    stop: frozenset[int]
    log_probs: bool = True
    seed: int | None = None
    min_tokens: int = 0

    def __post_init__(self) -> None:
        where = "a request's sampling parameters"
        if self.temperature < 0:
            raise ConfigurationError("a negative temperature", found=self.temperature, where=where, remedy="0 or more")
        if not 0 < self.top_p <= 1:
            raise ConfigurationError(
                "top_p isn't a probability", found=self.top_p, where=where, remedy="above 0, at most 1"
            )


def choose(
    logits: torch.Tensor, sampling: Sampling, generator: torch.Generator, processed: bool, drawn: int = 0
) -> tuple[int, float]:
    """One token and its log-probability, from ``logits`` of shape (vocabulary,), fp32.

    log p = log softmax(logits / temperature) over the tokens that top-k, then top-p, leave when ``processed``
    (what vLLM calls processed_logprobs); log softmax(logits) otherwise. At temperature 0 both are the latter. Before
    ``min_tokens`` the logits of ``stop`` are -inf in all of them.

    Args:
        drawn: tokens of the response so far.
    """
    if drawn < sampling.min_tokens and sampling.stop:
        logits = logits.index_fill(0, torch.tensor(sorted(sampling.stop)), -torch.inf)
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
