"""What a run recorded, in one form for every host: steps, rollouts and spans of time.

Readers make it (``metronome.observe.readers``); ``metronome advise`` and ``metronome report`` read nothing else. What a
host didn't record is None, never a guess, and ``notes`` says so in words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Rollout:
    """One response.

    Attributes:
        step: the step that trained it, from 0.
        prompt: its group: equal within a step for the responses of one prompt.
        response_tokens: sampled tokens.
        prompt_tokens: tokens of its prompt.
        start, end: seconds from the run's start between which it was generated.
        worker: the engine that generated it.
        reward: of the response.
        version: of the weights that sampled its first token.
        trained_version: of the weights in training when it was trained.
    """

    step: int
    prompt: str
    response_tokens: int
    prompt_tokens: int | None = None
    start: float | None = None
    end: float | None = None
    worker: str | None = None
    reward: float | None = None
    version: int | None = None
    trained_version: int | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time of one lane, ``start`` to ``end`` seconds from the run's start.

    Attributes:
        lane: ``trainer`` or the name of a worker.
        kind: generate, train, proximal, old_log_probs, reference, step, publish, reshard, evaluate, save or other.
        step: to which it belongs.
    """

    lane: str
    kind: str
    start: float
    end: float
    step: int


@dataclass(frozen=True, slots=True)
class Step:
    """One optimiser step or period. Seconds are parts of ``seconds`` unless they overlap in the run itself.

    Attributes:
        number: from 0, whatever the host's own numbers are; the reader's notes say which is which.
        seconds: from the end of the step before to its own.
        generation: seconds from the first dispatch to the last arrival.
        waiting: seconds in which the trainer had nothing to train.
        training: seconds of forward and backward passes of the update, without ``proximal``.
        proximal: seconds of the forward pass for a proximal policy (or old log-probs that only it needs).
        old_log_probs, reference: seconds of those forward passes.
        optimizer: seconds of clip and optimiser step.
        publication: seconds of publishing the weights.
        group_size: G.
        prompts: groups trained.
        prompt_tokens, response_tokens: mean over rollouts; ``response_tokens_max`` the longest response.
        fed_tokens: tokens that the passes of all groups computed, padding included.
        reward: mean over generated rollouts.
        metrics: the host's own, under its own names.
        fingerprint: of the weights that the step published, as the host wrote it; equal weights, equal text.
    """

    number: int
    seconds: float
    generation: float | None = None
    waiting: float | None = None
    training: float | None = None
    proximal: float | None = None
    old_log_probs: float | None = None
    reference: float | None = None
    optimizer: float | None = None
    publication: float | None = None
    group_size: int | None = None
    prompts: int | None = None
    prompt_tokens: float | None = None
    response_tokens: float | None = None
    response_tokens_max: float | None = None
    fed_tokens: int | None = None
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    fingerprint: str | None = None


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run.

    Attributes:
        name: the folder's or file's name.
        host: local, verl, openrlhf, areal or csv.
        source: synchronous, colocated, periodic or bounded, as far as it is known.
        steps: in their order.
        rollouts: in the order of their steps.
        spans: in the order of their starts; empty where nothing has clock times.
        settings: what is known of the run's configuration: ``staleness`` (the bound), ``workers``, ``slots``,
            ``trainer_ranks``, ``prompts`` (groups a step), ``max_tokens``, ``loss``, ``attention``,
            ``group_controller``, and the host's own keys (``recipe``: the local host's whole recipe).
        notes: a sentence for each thing that this host didn't record and that a reader of the results must know.
        laid: whether the host recorded no clock times and ``spans`` are each step's parts laid end to end, step after
            step, each step ``seconds`` long.
    """

    name: str
    host: str
    source: str | None
    steps: tuple[Step, ...]
    rollouts: tuple[Rollout, ...] = ()
    spans: tuple[Span, ...] = ()
    settings: Mapping[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    laid: bool = False
