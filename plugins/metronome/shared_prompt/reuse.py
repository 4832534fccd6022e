"""A prompt computed once for any number of response micro-batches: for groups larger than a micro-batch.

    with handle.cached_prompt(prompt_ids) as prompt:
        for ids, lengths in micro_batches:
            log_probs, _ = prompt.log_probs(ids, lengths)
            loss(log_probs).backward()
    # leaving the block has run the prompt's backward pass, once

The prompt's forward pass runs once. Each response micro-batch reads every layer's keys and values and the final
hidden state of the last prompt row, which predicts all first tokens. Their gradients are summed, in float32 or
wider, and enter the prompt's one backward pass where they belong: at the last hidden state, and at each layer's
keys and values. Exact. Held at a time: the prompt's activations (with gradient checkpointing, its layers'
inputs), its keys and values, and one micro-batch. The schedule is ours, after arXiv 2606.01143.

Lp prompt tokens, S response tokens of a micro-batch, N key/value heads, D and V head widths, d hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from metronome.errors import ConfigurationError
from metronome.shared_prompt.plan import SharedPromptPlan

Exchange = Callable[[torch.nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]]
"""What a layer's keys ``[M,N,D]`` and values ``[M,N,V]`` pass through on their way to the backend."""


class Summed:
    """A tensor of the prompt, without its graph, and the sum of the gradients that reached it."""

    def __init__(self, value: Tensor) -> None:
        self.value = value.detach()
        self._sum: Tensor | None = None

    def add(self, gradient: Tensor) -> None:
        """Adds in float32 if the tensor is narrower."""
        wide = gradient.to(torch.float32) if gradient.dtype in (torch.float16, torch.bfloat16) else gradient
        self._sum = wide.clone() if self._sum is None else self._sum.add_(wide)

    def onto(self, gradient: Tensor) -> Tensor:
        """``gradient`` and the sum, in the gradient's dtype."""
        return gradient if self._sum is None else (gradient + self._sum).to(gradient.dtype)


class PromptStates:
    """What a prompt's forward pass leaves to its responses, layer by layer.

    Attributes:
        layers: keys and values, by the identity of the attention module.
        last: the final hidden state of the last prompt row ``[1,d]``; set after the pass.
    """

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Summed, Summed]] = {}
        self.last: Summed | None = None

    def record(self, module: torch.nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The prompt's pass: notes keys and values, and lets their summed gradients in on the way back.

        Gradient checkpointing comes through here again in the backward pass and finds the layer noted. Raises
        ConfigurationError for a module that serves as several layers.
        """
        if self.last is None:
            if id(module) in self.layers:
                raise ConfigurationError(
                    "one attention module serves as several layers, so that its prompt's keys can't be told apart",
                    where=type(module).__name__,
                    remedy="micro-batches that hold whole groups",
                )
            self.layers[id(module)] = Summed(key), Summed(value)
        noted = self.layers[id(module)]
        let_in: Callable[..., tuple[Tensor, Tensor]] = _LetIn.apply
        return let_in(key, value, *noted)

    def read(self, module: torch.nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """A response's pass: the prompt's keys and values before its own, ``[S,..] -> [Lp + S,..]``."""
        behind: Callable[..., Tensor] = _Behind.apply
        noted_key, noted_value = self.layers[id(module)]
        return behind(key, noted_key), behind(value, noted_value)


class CachedPrompt:
    """One group's prompt in a model, for the length of a ``with`` block; from ``SharedPromptModel.cached_prompt``.

    Attributes:
        tokens: Lp.
    """

    def __init__(self, handle: Any, prompt_ids: Tensor) -> None:
        self._handle, self._ids = handle, prompt_ids
        self.tokens = len(prompt_ids)
        self._states = PromptStates()
        self._root: Tensor | None = None
        self._waiting: set[int] = set()  # micro-batches whose backward pass hasn't come yet
        self._started = 0  # micro-batches with a gradient
        self._closed = False

    def __enter__(self) -> CachedPrompt:
        """Runs the prompt's forward pass, with a graph if gradients are on."""
        plan = SharedPromptPlan.build([(self.tokens, [0])], device=self._ids.device)
        hidden = self._handle.hidden_through(self._ids, plan, self._states.record)
        self._root = hidden[-1:]
        self._states.last = Summed(self._root)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Runs the prompt's backward pass, unless the block failed or had no gradient.

        Raises ConfigurationError if a micro-batch's backward pass is missing: its part of the prompt's gradient
        would be lost.
        """
        root, states = self._root, self._states
        self._root, self._states, self._closed = None, PromptStates(), True
        if kind is not None or root is None or states.last is None:
            return
        if self._waiting:
            raise ConfigurationError(
                "micro-batches that read a cached prompt had no backward pass inside its block",
                found=f"{len(self._waiting)} of {self._started}",
                where="cached_prompt",
                remedy="call backward() on every loss before the block ends, or compute without gradient",
            )
        if self._started:
            self._handle.check_attached()  # gradient checkpointing runs the layers again
            torch.autograd.backward([root], [states.last.onto(torch.zeros_like(root))])

    def log_probs(
        self, ids: Tensor, lengths: Sequence[int], temperature: float = 1.0, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Log-prob of every token of some responses, and the entropies if asked, ``[S] -> [S], [S]``.

        Args:
            ids: int64 ``[S]``, the responses' tokens one after the other.
            lengths: of each response, in tokens; their sum is S.
            temperature: divides the logits.
            entropy: whether entropies (nats) are computed.

        Raises as ``SharedPromptModel.log_probs`` does, and ConfigurationError outside of the block.
        """
        if self._root is None or self._states.last is None:
            raise ConfigurationError(
                "a cached prompt is read outside of its block",
                where="cached_prompt",
                remedy="with handle.cached_prompt(ids) as prompt: ... prompt.log_probs(...)",
            )
        plan = SharedPromptPlan.build([(self.tokens, lengths)], device=self._ids.device, cached_prompt=True)
        if plan.response_tokens == len(ids) == 0:
            empty = self._states.last.value.new_zeros(
                0, dtype=torch.promote_types(self._states.last.value.dtype, torch.float32)
            ).requires_grad_(torch.is_grad_enabled())
            return empty, empty if entropy else None
        hidden = self._handle.hidden_through(ids, plan, self._states.read)
        if hidden.requires_grad:
            if not self._root.requires_grad:
                raise ConfigurationError(
                    "micro-batches with a gradient read a cached prompt that was computed without one",
                    where="cached_prompt",
                    remedy="enter the block with gradients on, or read it under torch.no_grad()",
                )
            self._started += 1
            self._waiting.add(self._started)
        behind_last: Callable[..., Tensor] = _BehindLast.apply
        rows = behind_last(hidden, self._states.last, self, self._started)
        self._handle.check_cached(rows, self._ids, ids, plan)
        found: tuple[Tensor, Tensor | None] = self._handle.log_probs_of(rows, ids, plan, temperature, entropy)
        return found

    def _arrived(self, number: int) -> None:
        if self._closed:
            raise ConfigurationError(
                "a micro-batch's backward pass came after that of its cached prompt, and would be lost",
                where="cached_prompt",
                remedy="call backward() inside the block",
            )
        self._waiting.discard(number)


class _LetIn(torch.autograd.Function):
    """The identity on keys and values; backward adds the gradients that the responses left."""

    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, noted_key: Summed, noted_value: Summed) -> tuple[Tensor, Tensor]:
        ctx.noted = noted_key, noted_value
        return key.view_as(key), value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        noted_key, noted_value = ctx.noted
        return noted_key.onto(dk), noted_value.onto(dv), None, None


class _Behind(torch.autograd.Function):
    """``x [S,..] -> [Lp + S,..]`` behind the prompt's; backward leaves the prompt's part with it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, noted: Summed) -> Tensor:
        ctx.noted = noted
        return torch.cat([noted.value, x])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        prompt = len(ctx.noted.value)
        ctx.noted.add(grad[:prompt])
        return grad[prompt:], None


class _BehindLast(torch.autograd.Function):
    """Hidden states ``[S,d] -> [1 + S,d]`` behind the prompt's last; backward tells that it has come."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, last: Summed, prompt: CachedPrompt, number: int) -> Tensor:
        ctx.last, ctx.prompt, ctx.number = last, prompt, number
        return torch.cat([last.value, hidden])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.prompt._arrived(ctx.number)
        ctx.last.add(grad[:1])
        return grad[1:], None, None, None
