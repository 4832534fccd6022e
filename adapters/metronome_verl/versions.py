"""Which version of the weights sampled which tokens: recorded by the client, read per token by the loss.

verl keeps two numbers of a trajectory, the versions of its first and of its last generated segment. A response that
was interrupted and resumed has tokens of several versions; ``SpanRecordingClient`` keeps ``[version, tokens]`` of each
segment in ``extra_fields["version_spans"]``, which verl carries with the sample into the worker.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient

from metronome.errors import VersionMismatch

SPANS = "version_spans"
"""Key in a sample's ``extra_fields``: ``[[version, tokens], ...]`` in the order generated; 0 tokens begin a turn."""

UNKNOWN = -1
"""Version of a token that no server has stamped, and of one that wasn't generated."""


class _Spans(list[list[int]]):
    """``[version, tokens]`` of consecutive segments; a class of its own so that it can be referred to weakly."""

    def add(self, version: int, tokens: int) -> None:
        """Appends a segment, or lengthens the last one if it has the same version."""
        if not tokens:
            return
        if self and self[-1][0] == version and self[-1][1]:
            self[-1][1] += tokens
        else:
            self.append([version, tokens])

    def turn(self, later: Sequence[Sequence[int]]) -> None:
        """Appends the segments of a later turn, behind a mark of 0 tokens."""
        if later:
            self.append([later[0][0], 0])
            for version, tokens in later:
                self.add(version, tokens)


_call: ContextVar[_Spans | None] = ContextVar("metronome_verl_spans", default=None)

_turns: dict[str, list[weakref.ref[_Spans]]] = {}
"""Request -> spans of its finished calls, for as long as some row's ``extra_fields`` hold them."""


class _Segments(LLMServerClient):
    """One request to one server, noted for the call that it belongs to."""

    async def generate(self, request_id: str, **request: Any) -> Any:
        """verl's, unchanged."""
        output = await super().generate(request_id, **request)
        spans = _call.get()
        if spans is not None:
            version = output.extra_fields.get("global_steps")
            spans.add(UNKNOWN if version is None else int(version), len(output.token_ids))
        return output


class SpanRecordingClient(FullyAsyncLLMServerClient, _Segments):
    """verl's resuming client, which also records the version of every segment.

    A segment is what one server generated without an interruption, so one version sampled all of it (servers abort
    at a publication). verl's resume loop calls ``super().generate`` for each; by the order of the bases that is
    ``_Segments``.

    A row of several turns has the ``extra_fields`` of its first turn (verl's tool agent keeps no others), so a turn
    is also appended to the spans of the turns with the same ``request_id`` that had ended when it began. A rollout
    that gives several rows gives each row the ``extra_fields`` of that row's first turn.
    """

    async def generate(self, request_id: str, **request: Any) -> Any:
        """verl's ``generate``; ``extra_fields["version_spans"]`` of the output has ``[version, tokens]``.

        ``min_global_steps`` and ``max_global_steps`` are those of generated tokens; verl's also count a segment that
        was aborted before its first token.
        """
        spans = _Spans()
        earlier = [one for one in (ref() for ref in _turns.get(request_id, ())) if one is not None]
        outer = _call.set(spans)
        try:
            output = await super().generate(request_id, **request)
        finally:
            _call.reset(outer)
        output.extra_fields[SPANS] = spans
        if spans and all(version != UNKNOWN for version, _ in spans):
            output.extra_fields["min_global_steps"] = min(version for version, _ in spans)
            output.extra_fields["max_global_steps"] = max(version for version, _ in spans)
        for one in earlier:
            one.turn(spans)
        _turns.setdefault(request_id, []).append(weakref.ref(spans, lambda ref: _forget(request_id, ref)))
        return output


def _forget(request_id: str, ref: weakref.ref[_Spans]) -> None:
    kept = [one for one in _turns.get(request_id, ()) if one is not ref]
    if kept:
        _turns[request_id] = kept
    else:
        _turns.pop(request_id, None)


def token_versions(
    extra_fields: Mapping[str, Any], response_length: int, response_mask: Sequence[int] | torch.Tensor
) -> list[int]:
    """The version that sampled each token of a response; -1 for tokens that weren't generated or aren't known.

    The spans cover the generated tokens (mask 1) in order, what was cut off behind the response's end included; tool
    tokens (mask 0) have none. Tokens that the agent took off a turn's end (verl does for some chat templates) are
    told by the mask: a stretch of ones that tool tokens follow ends a turn. Without spans the trajectory's version
    counts, if it has only one.

    Args:
        extra_fields: verl's, with ``version_spans`` or ``min_global_steps`` and ``max_global_steps``.
        response_length: tokens of the response.
        response_mask: ``[response_length]``, 1 where the model generated the token (verl's ``loss_mask``: a
            rejection may have cleared ``response_mask`` since).

    Raises VersionMismatch if the mask's length differs or spans cover fewer tokens than were generated.
    """
    generated = torch.as_tensor(response_mask).bool()
    if generated.shape != (response_length,):
        raise VersionMismatch(
            "a response's mask must have one entry per token",
            found=f"{list(generated.shape)} for {response_length} tokens",
            where="token_versions, response_mask",
            remedy="pass the mask of this response",
        )
    versions = torch.full((response_length,), UNKNOWN, dtype=torch.long)
    spans = extra_fields.get(SPANS)
    if spans is None:
        oldest, newest = extra_fields.get("min_global_steps"), extra_fields.get("max_global_steps")
        if oldest is not None and oldest == newest:
            versions[generated] = int(oldest)
        return versions.tolist()
    sampled = _along(_turns_of(spans), _stretches(generated.tolist()))
    if sampled is None:
        raise VersionMismatch(
            "the recorded segments cover fewer tokens than were generated",
            found=f"{[list(span) for span in spans]} for {int(generated.sum())} tokens",
            where=f"extra_fields.{SPANS}",
            remedy="generate every turn of a row through the client, with one request_id, and give the row the"
            " extra_fields of its first turn",
        )
    versions[generated] = torch.tensor(sampled, dtype=torch.long)
    return versions.tolist()


def _turns_of(spans: Sequence[Sequence[int]]) -> list[list[int]]:
    """The version of each token, turn by turn."""
    turns: list[list[int]] = [[]]
    for version, tokens in spans:
        if not tokens:
            turns.append([])
        turns[-1] += [version] * tokens
    return turns


def _stretches(generated: Sequence[bool]) -> list[int]:
    """Lengths of the stretches of generated tokens, in order."""
    lengths, inside = [], False
    for one in generated:
        if one and not inside:
            lengths.append(0)
        if one:
            lengths[-1] += 1
        inside = one
    return lengths


def _along(turns: list[list[int]], stretches: list[int]) -> list[int] | None:
    """The versions along the stretches; None if there are too few. A stretch may hold several turns, never half one.

    One turn is laid along all stretches: its record doesn't say where they end.
    """
    if len(turns) == 1:
        count = sum(stretches)
        return turns[0][:count] if len(turns[0]) >= count else None
    found: list[int] = []
    left = iter(turns)
    for length in stretches:
        here: list[int] = []
        while len(here) < length:
            turn = next(left, None)
            if turn is None:
                return None
            here += turn
        found += here[:length]
    return found
