"""Log-probs of response tokens under the trained policy: with shared prompts, or row by row as the host does it.

Both return the tokens of every row's response in the order of groups and rows. N response tokens, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from metronome.contracts import AttentionBackend
from metronome_local.rollouts import Row

_CHUNK = 512  # response tokens whose logits stand in memory at a time


Compute = Callable[..., tuple[torch.Tensor, Any]]
"""``(groups, entropy=False) -> log-probs, entropies``."""


class LogProbs(Protocol):
    """Log-probs ``[N]`` and, if asked for, entropies ``[N]`` of the response tokens of ``groups``."""

    shares_prompt: bool
    computed_tokens: int  # tokens that went through the model so far
    separate_tokens: int  # tokens that separate rows would have had

    @property
    def attention_calls(self) -> int:
        """Calls of the attention hook so far, one a layer."""

    def explain(self) -> str:
        """What computed attention in the last pass, and why."""

    def __call__(self, groups: Sequence[Sequence[Row]], entropy: bool = False) -> tuple[torch.Tensor, Any]:
        """One forward pass with gradient."""

    def backend(self, backend: AttentionBackend) -> Any:
        """A context in which another backend computes, for audits."""

    def tokens(self, group: Sequence[Row]) -> int:
        """Tokens that a group adds to a micro-batch, counted after sharing."""

    def reusing(self, group: Sequence[Row]) -> AbstractContextManager[Compute]:
        """A context that gives ``__call__`` for parts of one group, which is larger than a micro-batch.

        What the rows share runs forward once, and backward once when the block ends, if they can share it.
        """


def log_probs_of(model: Any, backend: AttentionBackend, temperature: float, dtype: str) -> LogProbs:
    """The way that ``backend`` asks for."""
    if backend.shares_prompt:
        return SharedPromptLogProbs(model, backend, temperature, dtype)
    return SeparateLogProbs(model, temperature, dtype)


class SharedPromptLogProbs:
    """A group's longest common prefix is computed once for all its rows."""

    shares_prompt = True

    def __init__(self, model: Any, backend: AttentionBackend, temperature: float, dtype: str) -> None:
        from metronome.shared_prompt.huggingface import attach

        self._handle = attach(model, backend)
        self._temperature, self._dtype = temperature, dtype
        self._device = next(model.parameters()).device
        self.computed_tokens = self.separate_tokens = 0

    @property
    def attention_calls(self) -> int:
        """Calls of the backend, one a layer."""
        return self._handle.calls

    def explain(self) -> str:
        """What the backend picked for the last pass's layers, and why."""
        return self._handle.explain()

    @contextlib.contextmanager
    def backend(self, backend: AttentionBackend) -> Iterator[None]:
        """Another backend for the time of an audit."""
        usual, self._handle.backend = self._handle.backend, backend
        try:
            yield
        finally:
            self._handle.backend = usual

    def tokens(self, group: Sequence[Row]) -> int:
        """Prefix once, remainders of every row."""
        return sum(len(packed.tokens) for packed in _packed(group))

    def __call__(self, groups: Sequence[Sequence[Row]], entropy: bool = False) -> tuple[torch.Tensor, Any]:
        """One forward pass over one packed row."""
        from metronome.shared_prompt.plan import SharedPromptPlan

        packed = [part for group in groups for part in _packed(group)]
        plan = SharedPromptPlan.build([(part.prompt_len, part.response_lens) for part in packed], device=self._device)
        ids = torch.tensor([token for part in packed for token in part.tokens], device=self._device)
        self.computed_tokens += len(ids)
        self.separate_tokens += sum(len(row.ids) for group in groups for row in group)
        with _autocast(self._device, self._dtype):
            log_probs, entropies = self._handle.log_probs(ids, plan, temperature=self._temperature, entropy=entropy)
        index = self._responses((n for p in packed for n in p.response_lens), _rows(groups))
        return log_probs[index], None if entropies is None else entropies[index]

    @contextlib.contextmanager
    def reusing(self, group: Sequence[Row]) -> Iterator[Compute]:
        """The group's longest common prefix is one cached prompt; rows that share no token go as in ``__call__``."""
        packed = _packed(group)
        if len(packed) > 1:
            yield self
            return
        prefix = packed[0].prompt_len
        prompt = torch.tensor(packed[0].tokens[:prefix], device=self._device)
        self.computed_tokens += prefix
        with contextlib.ExitStack() as stack:
            with _autocast(self._device, self._dtype):
                cached = stack.enter_context(self._handle.cached_prompt(prompt))

            def compute(groups: Sequence[Sequence[Row]], entropy: bool = False) -> tuple[torch.Tensor, Any]:
                rows = list(_rows(groups))
                lengths = [len(row.ids) - prefix for row in rows]
                if self.tokens(rows) < sum(lengths):  # these rows share more than all rows of the group do
                    return self(groups, entropy)
                ids = torch.tensor([token for row in rows for token in row.ids[prefix:]], device=self._device)
                self.computed_tokens += len(ids)
                self.separate_tokens += sum(len(row.ids) for row in rows)
                with _autocast(self._device, self._dtype):
                    log_probs, entropies = cached.log_probs(ids, lengths, self._temperature, entropy)
                index = self._responses(lengths, rows)
                return log_probs[index], None if entropies is None else entropies[index]

            yield compute

    def _responses(self, lengths: Iterable[int], rows: Iterable[Row]) -> torch.Tensor:
        """Places of response tokens among what stands behind the prompt.

        A row's own prompt part, where prompts of a group differ, is context: only its response counts.
        """
        kept, start = [], 0
        for length, row in zip(lengths, rows, strict=True):
            kept.append(torch.arange(start + length - len(row.response), start + length))
            start += length
        return torch.cat(kept).to(self._device)


class SeparateLogProbs:
    """The host's own attention: every row whole, padded on the right."""

    shares_prompt = False
    attention_calls = 0

    def __init__(self, model: Any, temperature: float, dtype: str) -> None:
        from metronome.shared_prompt.logits import head_of

        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._decoder, self._head = (
            base.get_decoder(),
            head_of(base, base.config.get_text_config(decoder=True)),
        )
        self._temperature, self._dtype = temperature, dtype
        self._device = next(model.parameters()).device
        self.computed_tokens = self.separate_tokens = 0

    def explain(self) -> str:
        """The host's own attention."""
        return "host: rows unchanged, transformers' sdpa"

    @contextlib.contextmanager
    def backend(self, backend: AttentionBackend) -> Iterator[None]:
        """There is one way only; an audit recomputes in index order with it."""
        yield

    def tokens(self, group: Sequence[Row]) -> int:
        """Every row whole."""
        return sum(len(row.ids) for row in group)

    @contextlib.contextmanager
    def reusing(self, group: Sequence[Row]) -> Iterator[Compute]:
        """Nothing is shared: rows go as in ``__call__``."""
        yield self

    def __call__(self, groups: Sequence[Sequence[Row]], entropy: bool = False) -> tuple[torch.Tensor, Any]:
        """One forward pass over a padded batch; logits for response tokens only."""
        rows = list(_rows(groups))
        longest = max(len(row.ids) for row in rows)
        ids = torch.zeros(len(rows), longest, dtype=torch.long)
        attended = torch.zeros(len(rows), longest, dtype=torch.long)
        for place, row in enumerate(rows):
            ids[place, : len(row.ids)] = torch.tensor(row.ids)
            attended[place, : len(row.ids)] = 1
        self.computed_tokens += ids.numel()
        self.separate_tokens += int(attended.sum())
        ids, attended = ids.to(self._device), attended.to(self._device)
        with _autocast(self._device, self._dtype):
            output = self._decoder(input_ids=ids, attention_mask=attended, use_cache=False)
            hidden = output.last_hidden_state
            where = torch.cat(
                [
                    torch.arange(len(row.prompt) - 1, len(row.ids) - 1) + place * longest
                    for place, row in enumerate(rows)
                ]
            ).to(self._device)
            wanted = torch.tensor([token for row in rows for token in row.response], device=self._device)
            picked = hidden.reshape(-1, hidden.shape[-1])[where]
            return self._gathered(picked, wanted, entropy)

    def _gathered(self, hidden: torch.Tensor, wanted: torch.Tensor, entropy: bool) -> tuple[torch.Tensor, Any]:
        log_probs, entropies = [], []
        for part, tokens in zip(hidden.split(_CHUNK), wanted.split(_CHUNK), strict=True):
            logits = self._head(part) / self._temperature
            total = logits.logsumexp(-1)
            log_probs.append(logits.gather(1, tokens[:, None])[:, 0] - total)
            if entropy:
                entropies.append(total - (logits.softmax(-1) * logits).sum(-1))
        return torch.cat(log_probs), torch.cat(entropies) if entropy else None


def _packed(group: Sequence[Row]) -> list[Any]:
    """One shared row, or one row each where the rows share no first token."""
    from metronome.shared_prompt.layout import share_rows

    ids = [row.ids for row in group]
    untrained = [len(row.prompt) for row in group]
    if len({row[0] for row in ids}) == 1:
        return [share_rows(ids, untrained)]
    return [share_rows([one], [first]) for one, first in zip(ids, untrained, strict=True)]


def _rows(groups: Sequence[Sequence[Row]]) -> Iterator[Row]:
    for group in groups:
        yield from group


def _autocast(device: torch.device, dtype: str) -> Any:
    if dtype == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, dtype))
