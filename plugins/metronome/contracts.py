"""What plug-ins and adapters share: the protocols of the four hooks and the small records they exchange.

Nothing here imports torch; tensors appear in annotations only. Shapes: T packed tokens, Nq query heads,
Nkv key/value heads, D head width, Dv value width. Lengths are tokens, times are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from metronome.shared_prompt.plan import SharedPromptPlan

HookName = Literal["rollout_source", "policy_loss", "attention", "group_controller"]


@dataclass(frozen=True)
class Offer:
    """One name that a plug-in offers at one hook, as ``metronome plugins`` lists it."""

    hook: HookName
    name: str
    summary: str
    options: Mapping[str, Any] = field(default_factory=dict)


# --- rollout source -------------------------------------------------------------------------------


class Verdict(Enum):
    """What happens to a finished group: it is trained, or dropped and its prompt dispatched again."""

    TRAIN = "train"
    DROP = "drop"


@dataclass(frozen=True)
class Flow:
    """The counts, in prompt groups, from which a rollout source decides.

    Attributes:
        version: the version being trained in this period.
        batch: groups that one period trains.
        running: dispatched and not finished.
        queued: finished and waiting.
        trained: handed to the trainer and kept in this period.
    """

    version: int
    batch: int
    running: int = 0
    queued: int = 0
    trained: int = 0


@dataclass(frozen=True)
class RunFacts:
    """What a host's run does, as far as a rollout source's promise depends on it.

    The conditions are (a)-(h) of docs/techniques/periodic.md. Adapters fill it from the host's own
    configuration; ``RolloutSource.check`` refuses what breaks it.

    Attributes:
        optimiser_steps: optimiser steps per period.
        normaliser: loss normaliser, one of ``StreamingNormalizer.MODES`` or the host's own name.
        normaliser_streams: whether sums are accumulated un-normalised and rescaled once.
        advantage_scope: ``group`` or ``batch`` (whitened over the batch).
        ratio_is_one: whether log_probs equal the anchor's by construction (one visit per sample, on policy).
        dropout: the largest dropout probability active in training.
        router_losses: whether order-dependent auxiliary terms (MoE balance losses) are added.
        accumulation_dtype: dtype in which gradients are accumulated.
        seeds_per_prompt: whether sampling seeds follow the prompt's index rather than its arrival.
        drops_by_arrival: whether anything is cut, dropped or replaced because of *when* it arrives.
        in_flight: what happens to running groups at a publication: ``finish``, ``abort`` or ``resume``.
    """

    optimiser_steps: int = 1
    normaliser: str = "token-mean"
    normaliser_streams: bool = True
    advantage_scope: Literal["group", "batch"] = "group"
    ratio_is_one: bool = True
    dropout: float = 0.0
    router_losses: bool = False
    accumulation_dtype: str = "float32"
    seeds_per_prompt: bool = True
    drops_by_arrival: bool = False
    in_flight: Literal["finish", "abort", "resume"] = "finish"


@runtime_checkable
class RolloutSource(Protocol):
    """Decides when prompts go out and which finished groups may be trained; holds no data."""

    name: str
    max_staleness: int
    spans_versions: bool  # whether a group may still be generated while weights are published

    def capacity(self, flow: Flow) -> int:
        """Prompt groups that may be dispatched now (>= 0)."""

    def release(self, flow: Flow) -> int:
        """Finished groups that may be handed to the trainer now (>= 0, <= flow.queued)."""

    def verdict(self, versions: Sequence[int], training_version: int) -> Verdict:
        """TRAIN or DROP a group whose tokens were sampled at ``versions``; raises VersionMismatch."""

    def period_complete(self, flow: Flow) -> bool:
        """Whether the period's last group has been trained."""

    def check(self, facts: RunFacts) -> None:
        """Raises ConfigurationError if ``facts`` break this source's promise, with what mends it."""

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores ``state_dict``."""


# --- loss -----------------------------------------------------------------------------------------


@dataclass
class LossBatch:
    """Packed response tokens of one micro-batch, every tensor ``[T]``.

    Attributes:
        log_probs: log pi_theta, with gradient.
        behavior_log_probs: log-probs that the rollout engine sampled with.
        old_log_probs: the trainer's log-probs at the sample's version, or None.
        advantages: advantage of each token.
        mask: bool; True where the token is trained (False: tool tokens, padding).
        staleness: int64; version trained minus version sampled; -1 unknown.
        cu_seqlens: int64 ``[rows + 1]``; row boundaries, starting at 0 and ending at T.
        proximal_log_probs: log pi_prox where it has been computed or kept, or None.
        step_fraction: j/k in the j-th of k mini-batches of one optimiser period; added to ``staleness``.
    """

    log_probs: torch.Tensor
    behavior_log_probs: torch.Tensor
    old_log_probs: torch.Tensor | None
    advantages: torch.Tensor
    mask: torch.Tensor
    staleness: torch.Tensor
    cu_seqlens: torch.Tensor
    proximal_log_probs: torch.Tensor | None = None
    step_fraction: float = 0.0


@dataclass
class TokenLoss:
    """Un-normalised loss per token and metrics that add over any split of the batch.

    Attributes:
        loss: ``[T]``, float32 (float64 for float64 inputs), zero where the mask is False.
        metrics: name -> (sum, count); the mean over any number of batches is sum(sums) / sum(counts).
        maxima: name -> largest value; the maximum over any number of batches is the largest of them.
        proximal_log_probs: detached ``[T]`` to keep for a later visit of the same samples, or None.
    """

    loss: torch.Tensor
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    proximal_log_probs: torch.Tensor | None = None


@runtime_checkable
class PolicyLoss(Protocol):
    """Per-token policy loss; the adapter normalises and adds KL and entropy terms.

    The loss of a token is zero, with zero gradient, where its advantage is zero: hosts leave out groups whose
    advantages are all zero.
    """

    name: str
    needs_proximal_forward: bool  # an extra forward pass must fill proximal_log_probs
    keeps_proximal: bool  # TokenLoss.proximal_log_probs must be handed back on later visits

    def __call__(self, batch: LossBatch) -> TokenLoss:
        """The un-normalised loss of each token."""


# --- attention ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionNeed:
    """What a model's attention layers ask of a backend."""

    device: str  # "cpu", "cuda", "npu"
    dtype: str  # "float32", "bfloat16", ...
    head_dim: int
    value_dim: int
    heads: int
    kv_heads: int
    window: bool = False
    sinks: bool = False
    softcap: bool = False
    dropout: float = 0.0
    cached_prompt: bool = False  # rows whose prompt is keys and values of an earlier pass


@runtime_checkable
class AttentionBackend(Protocol):
    """Attention over rows in which the prompt of each group stands once."""

    name: str
    shares_prompt: bool  # False: the host's own attention, rows unchanged

    def supports(self, need: AttentionNeed) -> str | None:
        """None if ``need`` can be served, else the reason why not."""

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: SharedPromptPlan,
        scale: float,
        *,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``q [Q,Nq,D], k [T,Nkv,D], v [T,Nkv,Dv] -> [Q,Nq,Dv]``; GQA is never expanded by the caller.

        Q is T, except with a cached prompt (``plan.first_query > 0``): then the prompt's rows are keys only. A
        window counts tokens of a separate row, the query included. What padding rows give is finite, no more.
        """


# --- group controller -----------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupStats:
    """One *generated* group (kept or filtered).

    Attributes:
        size: the G that generated it.
        lengths: response lengths in tokens, one per rollout.
        truncated: per rollout, whether it hit the length cap.
        rewards: per rollout.
        start, end: seconds on one clock, dispatch and arrival of the last rollout.
    """

    size: int
    lengths: Sequence[int]
    truncated: Sequence[bool]
    rewards: Sequence[float]
    start: float
    end: float


@dataclass(frozen=True)
class StepStats:
    """All groups generated for one optimiser step, and the trainer's idle fraction if measured (0..1)."""

    step: int
    groups: Sequence[GroupStats]
    bubble: float | None = None


@runtime_checkable
class GroupController(Protocol):
    """Chooses the group size G between optimiser steps; decided on one rank and broadcast."""

    name: str

    def size(self) -> int:
        """G for the next step (>= 2)."""

    def largest(self) -> int:
        """The largest G it may ever choose."""

    def prompts(self, rollout_budget: int, multiple: int = 1) -> int:
        """Prompt groups for the next step, rounded down to ``multiple`` and at least ``multiple``."""

    def observe(self, stats: StepStats) -> Mapping[str, float]:
        """Takes one step's outcome, decides the next G, returns metrics."""

    def explain(self) -> str:
        """One sentence: why G is what it is."""

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state, the random state included."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores ``state_dict``; the next decisions are those of the saved controller."""
