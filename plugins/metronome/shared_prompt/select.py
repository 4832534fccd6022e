"""Which of our backends computes a row: by what the model needs and by the row's shape."""

from __future__ import annotations

from torch import Tensor

from metronome.contracts import AttentionBackend, AttentionNeed
from metronome.errors import ConfigurationError
from metronome.shared_prompt.cascade import CascadeBackend
from metronome.shared_prompt.options import SharedPromptOptions
from metronome.shared_prompt.plan import SharedPromptPlan
from metronome.shared_prompt.reference import ReferenceBackend

_PAIRS_PER_CALL = 500  # query-key pairs of a dense mask that cost one kernel call, measured on one CPU core

_BACKENDS: dict[str, AttentionBackend] = {"reference": ReferenceBackend(), "cascade": CascadeBackend()}


def kernel_calls(plan: SharedPromptPlan) -> int:
    """Kernel calls of the cascade's forward: prompt, responses to prompt, and each response length."""
    return sum(1 + bool(group.buckets) + len(group.buckets) for group in plan.groups)


def choose(wanted: str, need: AttentionNeed, plan: SharedPromptPlan | None = None) -> tuple[AttentionBackend, str]:
    """The backend for ``need``, and a sentence why.

    Args:
        wanted: ``auto``, ``reference`` or ``cascade``.
        need: what the model's attention asks for.
        plan: the row, so that ``auto`` can take the dense mask where a row is too small for kernel calls to
            pay (T^2 below 500 query-key pairs a call); None: any row.

    Raises ConfigurationError if the wanted backend, or none at all, serves ``need``.
    """
    if wanted != "auto":
        backend = _BACKENDS[wanted]
        reason = backend.supports(need)
        if reason is not None:
            raise ConfigurationError(
                f"attention backend {wanted!r} can't serve this model: {reason}",
                where="metronome.shared_prompt.backend",
                remedy=_remedy(need),
            )
        return backend, f"{wanted}, as set"
    reason = _BACKENDS["cascade"].supports(need)
    if reason is None:
        if plan is not None and plan.tokens**2 < _PAIRS_PER_CALL * kernel_calls(plan):
            return _BACKENDS["reference"], (
                f"reference: {plan.tokens} tokens are too few for {kernel_calls(plan)} kernel calls to pay"
            )
        banded = ", banded arithmetic where a window is shorter than prompt and response" if need.window else ""
        return _BACKENDS["cascade"], f"cascade: flash kernel a part, joined by log-sum-exp{banded}"
    fallback = _BACKENDS["reference"].supports(need)
    if fallback is not None:
        raise ConfigurationError(
            f"no shared-prompt backend can serve this model: {fallback}",
            where="metronome.shared_prompt.backend",
            remedy=_remedy(need),
        )
    return _BACKENDS["reference"], f"reference: {reason}"


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
        """``q [T,Nq,D], k [T,Nkv,D], v [T,Nkv,Dv] -> [T,Nq,Dv]``; padding rows are finite, no more."""
        need = tensor_need(q, k, v, window is not None, sinks is not None)
        backend, _ = choose(self.options.backend, need, plan)
        return backend.attend(q, k, v, plan, scale, window=window, sinks=sinks)


def tensor_need(q: Tensor, k: Tensor, v: Tensor, window: bool, sinks: bool) -> AttentionNeed:
    """The need that ``q [T,Nq,D], k [T,Nkv,D], v [T,Nkv,Dv]`` show."""
    return AttentionNeed(
        device=q.device.type,
        dtype=str(q.dtype).removeprefix("torch."),
        head_dim=q.shape[-1],
        value_dim=v.shape[-1],
        heads=q.shape[-2],
        kv_heads=k.shape[-2],
        window=window,
        sinks=sinks,
    )
