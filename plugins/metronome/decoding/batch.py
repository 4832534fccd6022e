"""Continuous batching: rows join and leave one decode batch at any step, over one key/value cache.

Shapes: B rows, H key heads, T tokens of the longest row, D head size, V vocabulary. Shorter rows are padded on the
left and masked; a row's positions count its own tokens, so its log-probs don't depend on its neighbours.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from metronome.decoding.sampling import Sampling, choose
from metronome.errors import ConfigurationError

_LAYERS = {"full_attention", "sliding_attention"}


@dataclass
class Row:
    """One request while it is decoded: its prompt, how it is sampled, and per token sampled so far what is known.

    ``versions[t]`` is the version of the weights that sampled token t; ``future`` is its caller's. A row that joins a
    batch with tokens of its own goes on behind them.
    """

    request_id: str
    prompt: list[int]
    sampling: Sampling
    generator: torch.Generator
    future: Any = None
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int | None] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether the last token ended the response or the limit is reached."""
        return len(self.tokens) >= self.sampling.max_tokens or (
            bool(self.tokens) and self.tokens[-1] in self.sampling.stop
        )


class DecodeBatch:
    """The rows in flight and their cache.

    Raises:
        ConfigurationError: the model keeps more than keys and values per token (linear attention, a state space).
    """

    def __init__(self, model: Any, processed: bool) -> None:
        others = set(getattr(model.config, "layer_types", None) or ()) - _LAYERS
        if others:
            raise ConfigurationError(
                "the CPU room can't batch a cache of these layers",
                found=sorted(others),
                where=f"config.layer_types of {model.config.model_type}",
                remedy="use a model with full or sliding attention only",
            )
        self._model, self._processed = model, processed
        accepted = inspect.signature(model.forward).parameters
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self.clear()

    def clear(self) -> None:
        """Drops every row and the cache."""
        self.rows: list[Row] = []
        # Without the model's config every layer keeps all keys; a sliding window is then the mask's business.
        self._cache = DynamicCache()
        self._mask = torch.zeros(0, 0, dtype=torch.long)

    @torch.inference_mode()
    def advance(self, joining: Sequence[Row], version: int | None) -> list[Row]:
        """One token for every row in flight and one for each that joins; returns, and drops, the finished."""
        if self.rows:
            self._sample(self.rows, self._decode(), version)
        alike: dict[tuple[int, ...], list[Row]] = defaultdict(list)
        for row in joining:
            alike[tuple(row.prompt + row.tokens)].append(row)
        for prompt, rows in alike.items():
            self._sample(rows, self._prefill(prompt, rows), version)
        finished = [row for row in self.rows if row.finished]
        self.drop(finished)
        return finished

    def drop(self, leaving: Sequence[Row]) -> None:
        """Takes rows out of the batch, and columns that only padded for them."""
        gone = {id(row) for row in leaving}
        stay = [place for place, row in enumerate(self.rows) if id(row) not in gone]
        if len(stay) == len(self.rows):
            return
        if not stay:
            return self.clear()
        places = torch.tensor(stay)
        self._cache.batch_select_indices(places)
        self._mask = self._mask[places]
        first = int(self._mask.any(0).nonzero()[0])
        self._mask = self._mask[:, first:]
        for layer in self._cache.layers:
            layer.keys, layer.values = layer.keys[:, :, first:], layer.values[:, :, first:]
        self.rows = [self.rows[place] for place in stay]

    def _decode(self) -> torch.Tensor:
        """Logits (B, V) after the last token of every row."""
        ids = torch.tensor([row.tokens[-1:] for row in self.rows])
        self._mask = torch.nn.functional.pad(self._mask, (0, 1), value=1)
        positions = self._mask.sum(1, keepdim=True) - 1
        return self._forward(ids, positions, self._mask, self._cache)

    def _prefill(self, prompt: tuple[int, ...], rows: list[Row]) -> torch.Tensor:
        """Logits (len(rows), V) after a prompt, read once for the rows that share it, which join the batch."""
        cache = DynamicCache()
        ids = torch.tensor([prompt])
        logits = self._forward(ids, torch.arange(len(prompt))[None], torch.ones_like(ids), cache)
        cache.batch_repeat_interleave(len(rows))
        self._merge(cache, len(prompt))
        self.rows += rows
        return logits.expand(len(rows), -1)

    def _merge(self, cache: DynamicCache, length: int) -> None:
        """Appends rows of ``length`` tokens to the cache; whichever is shorter is padded on the left."""
        joining = torch.ones(cache.layers[0].keys.shape[0], length, dtype=torch.long)
        if not self.rows:
            self._cache, self._mask = cache, joining
            return
        longest = max(length, self._mask.shape[1])

        def padded(tensor: torch.Tensor, axis: int) -> torch.Tensor:
            missing = longest - tensor.shape[axis]
            return torch.nn.functional.pad(tensor, (0, 0) * (tensor.ndim - 1 - axis) + (missing, 0))

        self._mask = torch.cat([padded(self._mask, 1), padded(joining, 1)])
        for ours, theirs in zip(self._cache.layers, cache.layers, strict=True):
            ours.keys = torch.cat([padded(ours.keys, 2), padded(theirs.keys, 2)])
            ours.values = torch.cat([padded(ours.values, 2), padded(theirs.values, 2)])

    def _forward(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, cache: DynamicCache
    ) -> torch.Tensor:
        logits: torch.Tensor = self._model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            **self._last_only,
        ).logits[:, -1]
        if not all(type(layer) is DynamicLayer for layer in cache.layers):
            raise ConfigurationError(
                "the CPU room can't batch this model's cache",
                found=sorted({type(layer).__name__ for layer in cache.layers}),
                where=type(self._model).__name__,
                remedy="use a model whose cache is keys and values per token",
            )
        return logits.float()

    def _sample(self, rows: Sequence[Row], logits: torch.Tensor, version: int | None) -> None:
        for row, scores in zip(rows, logits, strict=True):
            token, log_prob = choose(scores, row.sampling, row.generator, self._processed, len(row.tokens))
            row.tokens.append(token)
            row.log_probs.append(log_prob)
            row.versions.append(version)
