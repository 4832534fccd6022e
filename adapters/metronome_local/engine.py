"""Generation with continuous batching: sequences enter and leave a fixed number of slots one by one.

A prompt's keys and values are computed once and copied into every slot that continues it. The randomness of a
sequence belongs to the sequence, never to its slot or its neighbours: the same seed gives the same uniform
numbers whatever else is running (rounding may still differ with the composition of the batch).

Shapes: S active slots, C longest context so far, H key/value heads, D head width, V vocabulary.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from metronome.errors import ConfigurationError
from metronome_local.rollouts import Sampled

_GROWTH = 64  # slots grow by this many positions at a time


@dataclass
class Continuation:
    """One continuation in the making; ``key`` is the group's job and the member."""

    key: tuple[int, int]
    context: tuple[int, ...]
    max_tokens: int
    rng: random.Random
    greedy: bool = False
    ignore_eos: bool = False
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class _SlotCache:
    """Keys and values ``[slots, H, C, D]`` per layer; active sequences are the first S slots, so views suffice."""

    is_compileable = False

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.positions = torch.zeros(slots, dtype=torch.long)  # of the last token whose keys are stored
        self.active = 0
        self.longest = 0

    def update(self, k: torch.Tensor, v: torch.Tensor, layer: int, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """One decoding step of one layer: stores ``k, v [S,H,1,D]``, returns the views to attend to."""
        places = self.positions[: self.active]
        rows = torch.arange(self.active, device=places.device)
        self.keys[layer][rows, :, places] = k[:, :, 0]
        self.values[layer][rows, :, places] = v[:, :, 0]
        seen = slice(0, self.longest)
        return self.keys[layer][: self.active, :, seen], self.values[layer][: self.active, :, seen]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Unused by decoding: positions are passed explicitly."""
        return 0

    def write(self, slot: int, layers: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copies a prefilled context's ``[1,H,L,D]`` keys and values into ``slot``."""
        length = layers[0][0].shape[2]
        self._reserve(length + 1, layers)
        for layer, (k, v) in enumerate(layers):
            self.keys[layer][slot, :, :length] = k[0]
            self.values[layer][slot, :, :length] = v[0]
        self.positions[slot] = length - 1

    def move(self, source: int, target: int) -> None:
        """Moves a sequence to another slot."""
        length = int(self.positions[source]) + 1
        for store in (*self.keys, *self.values):
            store[target, :, :length] = store[source, :, :length]
        self.positions[target] = self.positions[source]

    def grow(self) -> None:
        """Makes room for the longest context."""
        if self.keys and self.longest > self.keys[0].shape[2]:
            self.keys = [_longer(store, self.longest) for store in self.keys]
            self.values = [_longer(store, self.longest) for store in self.values]

    def _reserve(self, length: int, layers: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        if not self.keys:
            for k, v in layers:
                self.keys.append(k.new_zeros(self.slots, k.shape[1], length + _GROWTH, k.shape[3]))
                self.values.append(v.new_zeros(self.slots, v.shape[1], length + _GROWTH, v.shape[3]))
            self.positions = self.positions.to(layers[0][0].device)
        self.longest = max(self.longest, length)
        self.grow()


def _longer(store: torch.Tensor, length: int) -> torch.Tensor:
    slots, heads, old, width = store.shape
    grown = store.new_zeros(slots, heads, length + _GROWTH, width)
    grown[:, :, :old] = store
    return grown


class Engine:
    """Continuous batching of one model on one device."""

    def __init__(self, model: Any, slots: int, eos_ids: Iterable[int], temperature: float, version: int = 0) -> None:
        self.model, self.eos, self.temperature, self.version = model, set(eos_ids), temperature, version
        self.device = next(model.parameters()).device
        self._cache = _SlotCache(slots)
        self._waiting: deque[Continuation] = deque()
        self._wanted: Counter[tuple[int, ...]] = Counter()
        self._prefilled: dict[tuple[int, ...], tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]] = {}
        self._running: list[Continuation] = []
        self._window, self._layer_types = _windows(model)
        self.sampled = 0  # tokens, for the progress line

    @property
    def running(self) -> int:
        """Sequences in slots."""
        return len(self._running)

    @property
    def queued(self) -> int:
        """Sequences waiting for a slot."""
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._running or self._waiting)

    def submit(self, sequence: Continuation) -> None:
        """Queues a sequence; it enters a slot in one of the next steps."""
        self._waiting.append(sequence)
        self._wanted[sequence.context] += 1

    @torch.no_grad()
    def step(self) -> list[tuple[tuple[int, int], Sampled]]:
        """Fills free slots, decodes one token for every running sequence, returns what has finished."""
        finished = self._admit()
        if self._running:
            self._take(self._decode(), finished)
        return finished

    def abort(self, keys: set[tuple[int, int]]) -> None:
        """Forgets the sequences called ``keys``, running or waiting."""
        for slot in reversed(range(len(self._running))):
            if self._running[slot].key in keys:
                self._release(slot)
        kept = [sequence for sequence in self._waiting if sequence.key not in keys]
        self._waiting = deque(kept)
        self._wanted = Counter(sequence.context for sequence in kept)
        self._prefilled = {ids: kept for ids, kept in self._prefilled.items() if self._wanted[ids]}

    @torch.no_grad()
    def renew(self, version: int) -> None:
        """Takes over new weights: recomputes every running sequence's keys and values, forgets kept prompts.

        What was already sampled keeps its version; what follows is stamped with the new one.
        """
        self.version = version
        self._prefilled.clear()
        for slot, sequence in enumerate(self._running):
            layers, _ = self._prefill((*sequence.context, *sequence.ids[:-1]))
            self._cache.write(slot, layers)

    def _admit(self) -> list[tuple[tuple[int, int], Sampled]]:
        finished: list[tuple[tuple[int, int], Sampled]] = []
        while self._waiting and len(self._running) < self._cache.slots:
            sequence = self._waiting.popleft()
            ids = sequence.context
            if ids not in self._prefilled:
                self._prefilled[ids] = self._prefill(ids)
            layers, logits = self._prefilled[ids]
            self._wanted[ids] -= 1
            if not self._wanted[ids]:
                del self._wanted[ids], self._prefilled[ids]
            self._cache.write(len(self._running), layers)
            self._running.append(sequence)
            self._take(logits, finished, first=len(self._running) - 1)
        return finished

    def _prefill(self, ids: tuple[int, ...]) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
        from transformers import DynamicCache

        # Without a config every layer keeps every position; the model's own masks apply sliding windows.
        output = self.model(
            input_ids=torch.tensor([ids], device=self.device),
            cache=DynamicCache(),
            use_cache=True,
            logits_to_keep=1,
        )
        return [(layer.keys, layer.values) for layer in output.cache.layers], output.logits[:, -1].float()

    def _decode(self) -> torch.Tensor:
        cache = self._cache
        cache.active = len(self._running)
        cache.positions[: cache.active] += 1
        positions = cache.positions[: cache.active]
        cache.longest = int(positions.max()) + 1
        cache.grow()
        last = torch.tensor([[sequence.ids[-1]] for sequence in self._running], device=self.device)
        return (
            self.model(
                input_ids=last,
                attention_mask=self._mask(positions),
                position_ids=positions[:, None],
                cache=cache,
                use_cache=True,
            )
            .logits[:, -1]
            .float()
        )

    def _mask(self, positions: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        places = torch.arange(self._cache.longest, device=positions.device)
        full = (places <= positions[:, None])[:, None, None]  # [S,1,1,C], True: attend
        if self._window is None:
            return self._masked(full)
        sliding = full & (places > positions[:, None] - self._window)[:, None, None]
        if len(self._layer_types) > 1:
            return {"full_attention": self._masked(full), "sliding_attention": self._masked(sliding)}
        return self._masked(sliding)

    def _masked(self, attended: torch.Tensor) -> torch.Tensor:
        """As the model's attention reads it: eager attention adds its mask to the scores."""
        if self.model.config._attn_implementation != "eager":
            return attended
        scores = torch.zeros(attended.shape, dtype=self.model.dtype, device=attended.device)
        return scores.masked_fill(~attended, torch.finfo(scores.dtype).min)

    def _take(self, logits: torch.Tensor, finished: list[tuple[tuple[int, int], Sampled]], first: int = 0) -> None:
        """Samples one token for the running sequences from ``first`` on; ``logits [S - first, V]``."""
        scaled = (logits / self.temperature).log_softmax(-1)
        greedy = [sequence.greedy for sequence in self._running[first:]]
        uniform = torch.tensor([[sequence.rng.random()] for sequence in self._running[first:]])
        cumulated = scaled.exp().cumsum(-1)
        drawn = torch.searchsorted(cumulated, uniform.to(cumulated) * cumulated[:, -1:])
        drawn = drawn.clamp(max=scaled.shape[-1] - 1)
        if any(greedy):
            drawn = torch.where(torch.tensor(greedy, device=drawn.device)[:, None], scaled.argmax(-1, True), drawn)
        log_probs = scaled.gather(1, drawn)[:, 0].tolist()
        tokens = drawn[:, 0].tolist()
        self.sampled += len(tokens)
        for slot in reversed(range(first, len(self._running))):
            sequence = self._running[slot]
            token = tokens[slot - first]
            sequence.ids.append(token)
            sequence.log_probs.append(log_probs[slot - first])
            sequence.versions.append(self.version)
            ended = token in self.eos and not sequence.ignore_eos
            if ended or len(sequence.ids) >= sequence.max_tokens:
                truncated = not ended and not sequence.ignore_eos
                sampled = Sampled(sequence.ids, sequence.log_probs, sequence.versions, truncated)
                finished.append((sequence.key, sampled))
                self._release(slot)

    def _release(self, slot: int) -> None:
        last = len(self._running) - 1
        if slot != last:
            self._cache.move(last, slot)
            self._running[slot] = self._running[last]
        self._running.pop()


def _windows(model: Any) -> tuple[int | None, set[str]]:
    """The sliding window and the kinds of layers; raises ConfigurationError for layers without keys and values."""
    config = model.config.get_text_config()
    types = set(getattr(config, "layer_types", None) or ())
    foreign = types - {"full_attention", "sliding_attention"}
    routes = getattr(model, "_can_set_attn_implementation", None)
    if routes is None or not routes():  # ALiBi and home-made masks are computed from padded positions
        foreign.add("an attention of its own")
    if foreign or getattr(config, "is_encoder_decoder", False):
        raise ConfigurationError(
            "the rollout engine serves decoders whose every layer is full or sliding attention",
            found=sorted(foreign) or "encoder-decoder",
            where="model.name",
            remedy="another model",
        )
    window = getattr(config, "sliding_window", None)
    if types == {"full_attention"}:
        window = None
    return window, types
