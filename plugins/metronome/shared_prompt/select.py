"""Which of our backends computes a row: by device, dtype, what the model needs, what is installed, and the row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module

from torch import Tensor

from metronome.contracts import AttentionBackend, AttentionNeed
from metronome.errors import ConfigurationError
from metronome.shared_prompt.options import SharedPromptOptions
from metronome.shared_prompt.plan import SharedPromptPlan

_PAIRS_PER_CALL = 500  # query-key pairs of a dense mask that cost one kernel call, measured on one CPU core

_PLACES = {
    "reference": ("reference", "ReferenceBackend"),
    "cascade": ("cascade", "CascadeBackend"),
    "varlen": ("varlen", "VarlenBackend"),
    "flex": ("flex", "FlexBackend"),
    "npu": ("npu", "NpuBackend"),
    "npu_cascade": ("npu_cascade", "NpuCascadeBackend"),
}
_PREFERENCE: dict[str, Sequence[str]] = {
    "cpu": ("cascade", "reference"),
    "cuda": ("varlen", "flex", "reference"),
    "npu": ("npu", "reference"),
}
"""What ``auto`` tries, in order. ``npu_cascade`` keeps no copies of keys but asks more of the driver: by name."""

_WHY = {
    "cascade": "flash kernel a part, joined by log-sum-exp",
    "varlen": "one flash-attention call over sequences that share gathered keys",
    "flex": "FlexAttention with a block mask",
    "npu": "one fused TND call over sequences that share gathered keys",
    "reference": "a dense mask in plain arithmetic, memory grows with the square of the row",
}

Find = Callable[[str], AttentionBackend]


@cache
def backend_named(name: str) -> AttentionBackend:
    """Our backend of that name; its module is imported at the first call."""
    module, attribute = _PLACES[name]
    backend: AttentionBackend = getattr(import_module(f"metronome.shared_prompt.{module}"), attribute)()
    return backend


def kernel_calls(plan: SharedPromptPlan) -> int:
    """Kernel calls of the cascade's forward: prompt, responses to prompt, and each response length."""
    prompts = 0 if plan.first_query else len(plan.groups)
    return prompts + sum(bool(group.buckets) + len(group.buckets) for group in plan.groups)


def choose(
    wanted: str, need: AttentionNeed, plan: SharedPromptPlan | None = None, find: Find = backend_named
) -> tuple[AttentionBackend, str]:
    """The backend for ``need``, and a sentence why.

    Args:
        wanted: ``auto`` or a backend's name.
        need: what the model's attention asks for.
        plan: the row, so that ``auto`` can take the dense mask where a row on CPU is too small for kernel calls
            to pay (Q T below 500 query-key pairs a call); None: any row.
        find: gives the backend of a name.

    Raises ConfigurationError if the wanted backend, or none at all, serves ``need``.
    """
    if wanted != "auto":
        backend = find(wanted)
        reason = backend.supports(need)
        if reason is not None:
            raise ConfigurationError(
                f"attention backend {wanted!r} can't serve this model: {reason}",
                where="metronome.shared_prompt.backend",
                remedy=_remedy(need) if need.dropout or need.softcap else "backend: auto",
            )
        return backend, f"{wanted}, as set"
    passed_over: list[str] = []
    for name in _PREFERENCE.get(need.device, ("reference",)):
        backend = find(name)
        reason = backend.supports(need)
        if reason is None:
            break
        passed_over.append(f"{name}: {reason}")
    else:
        raise ConfigurationError(
            f"no shared-prompt backend can serve this model: {reason}",
            found="; ".join(passed_over),
            where="metronome.shared_prompt.backend",
            remedy=_remedy(need),
        )
    if name == "cascade" and plan is not None and plan.queries * plan.tokens < _PAIRS_PER_CALL * kernel_calls(plan):
        small = find("reference")
        if small.supports(need) is None:
            return small, (f"reference: {plan.queries} tokens are too few for {kernel_calls(plan)} kernel calls to pay")
    banded = name == "cascade" and need.window
    why = _WHY[name] + (", banded arithmetic where a window is shorter than prompt and response" if banded else "")
    return backend, "; not ".join([f"{name}: {why}", *passed_over])


def _remedy(need: AttentionNeed) -> str:
    if need.dropout:
        return "set the model's attention dropout to 0, or attention: host"
    if need.softcap:
        return "attention: host"
    return "backend: auto, or attention: host"


class SharedPromptAttention:
    """What the plug-in hands out: our backends behind one object, chosen anew for every row's shape."""

    name = "shared_prompt"
    shares_prompt = True

    def __init__(self, options: SharedPromptOptions | None = None) -> None:
        self.options = options or SharedPromptOptions()

    def supports(self, need: AttentionNeed) -> str | None:
        """None, or why no backend (or not the one that is set) can serve ``need``."""
        try:
            choose(self.options.backend, need)
        except ConfigurationError as error:
            return error.what
        return None

    def explain(self, need: AttentionNeed, plan: SharedPromptPlan | None = None) -> str:
        """One sentence: which backend serves ``need`` and why."""
        return choose(self.options.backend, need, plan)[1]

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: SharedPromptPlan,
        scale: float,
        *,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """``q [Q,Nq,D], k [T,Nkv,D], v [T,Nkv,Dv] -> [Q,Nq,Dv]``; padding rows are finite, no more."""
        need = tensor_need(q, k, v, window is not None, sinks is not None, bool(plan.first_query))
        backend, _ = choose(self.options.backend, need, plan)
        return backend.attend(q, k, v, plan, scale, window=window, sinks=sinks)


def tensor_need(
    q: Tensor, k: Tensor, v: Tensor, window: bool, sinks: bool, cached_prompt: bool = False
) -> AttentionNeed:
    """The need that ``q [Q,Nq,D], k [T,Nkv,D], v [T,Nkv,Dv]`` show."""
    return AttentionNeed(
        device=q.device.type,
        dtype=str(q.dtype).removeprefix("torch."),
        head_dim=q.shape[-1],
        value_dim=v.shape[-1],
        heads=q.shape[-2],
        kv_heads=k.shape[-2],
        window=window,
        sinks=sinks,
        cached_prompt=cached_prompt,
    )
