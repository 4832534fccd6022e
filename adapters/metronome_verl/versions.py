"""Which version of the weights sampled which tokens: recorded by the client, read per token by the loss.

verl keeps two numbers of a trajectory, the versions of its first and of its last generated segment. A response that
was interrupted and resumed has tokens of several versions; ``SpanRecordingClient`` keeps ``[version, tokens]`` of each
segment in ``extra_fields["version_spans"]``, which verl carries with the sample into the worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any
from weakref import WeakValueDictionary

import torch
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient

from metronome.errors import VersionMismatch

SPANS = "version_spans"
"""Key in a sample's ``extra_fields``: ``[[version, tokens], ...]`` in the order generated."""

UNKNOWN = -1
"""Version of a token that no server has stamped, and of one that wasn't generated."""


class _Spans(list[list[int]]):
    """``[version, tokens]`` of consecutive segments; a class of its own so that it can be referred to weakly."""

    def add(self, version: int, tokens: int) -> None:
        """Appends a segment, or lengthens the last one if it has the same version."""
        if not tokens:
            return
        if self and self[-1][0] == version:
            self[-1][1] += tokens
        else:
            self.append([version, tokens])


_call: ContextVar[_Spans | None] = ContextVar("metronome_verl_spans", default=None)

_first_turn: WeakValueDictionary[str, _Spans] = WeakValueDictionary()
"""Request -> spans of its first call, for as long as the trajectory's ``extra_fields`` hold them."""


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
    ``_Segments``. In a trajectory of several turns verl's tool agent keeps the ``extra_fields`` of the first turn
    only, so later turns with the same ``request_id`` are appended to the first one's spans as well.
    """

    async def generate(self, request_id: str, **request: Any) -> Any:
        """verl's ``generate``; ``extra_fields["version_spans"]`` of the output has ``[version, tokens]``."""
        spans = _Spans()
        outer = _call.set(spans)
        try:
            output = await super().generate(request_id, **request)
        finally:
            _call.reset(outer)
        output.extra_fields[SPANS] = spans
        first = _first_turn.setdefault(request_id, spans)
        if first is not spans:
            for version, tokens in spans:
                first.add(version, tokens)
        return output


def token_versions(
    extra_fields: Mapping[str, Any], response_length: int, response_mask: Sequence[int] | torch.Tensor
) -> list[int]:
    """The version that sampled each token of a response; -1 for tokens that weren't generated or aren't known.

    The spans cover the generated tokens (mask 1) in order, what was cut off behind the response's end included; tool
    tokens (mask 0) have none. Without spans the trajectory's version counts, if it has only one.

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
    sampled = torch.tensor([version for version, _ in spans], dtype=torch.long).repeat_interleave(
        torch.tensor([tokens for _, tokens in spans], dtype=torch.long)
    )
    count = int(generated.sum())
    if len(sampled) < count:
        raise VersionMismatch(
            "the recorded segments cover fewer tokens than were generated",
            found=f"{spans} for {count} tokens",
            where=f"extra_fields.{SPANS}",
            remedy="generate every turn of a trajectory through the client, with one request_id",
        )
    versions[generated] = sampled[:count]
    return versions.tolist()
