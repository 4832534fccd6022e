"""Sliding-window attention of one group, part by part: a response reads only the prompt's last w - 1 tokens.

Plain arithmetic through autograd, for windows that are shorter than the sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from metronome.shared_prompt.plan import Bucket, Group
from metronome.shared_prompt.reference import masked_attention

_BLOCK = 256  # least query rows a block of the prompt; a larger window makes larger blocks


def windowed_group(
    q: Tensor, k: Tensor, v: Tensor, group: Group, scale: float, window: int, sinks: Tensor | None = None
) -> Tensor:
    """Attention of one group's tokens: ``q [L,Nq,D], k [L,Nkv,D], v [L,Nkv,Dv] -> [L,Nq,Dv]``.

    With a cached prompt, q holds the responses' rows only, and so does the output.

    Scores held at once: ``block x (block + w)`` for the prompt and ``B x n x (w + n)`` for B responses of
    length n, never L squared. The window counts tokens, the query itself included, over position ids.
    """
    prompt = group.prompt.length
    here = len(q) - len(k) + prompt  # queries of the prompt: all, or none
    block = max(window, _BLOCK)
    parts, places = [q.new_empty(0, q.shape[1], v.shape[2])], []
    for start in range(0, here, block):
        end, first = min(start + block, prompt), max(0, start - window + 1)
        mask = _band(start, end, first, end, window, q.device)
        keys = slice(first, end)
        parts.append(masked_attention(q[start:end], k[keys], v[keys], mask, scale, sinks))
    places.append(torch.arange(here))
    for bucket in group.buckets:
        parts.append(_bucket(q, k, v, prompt, here, bucket, scale, window, sinks))
        places.append(bucket.index - prompt + here)
    return torch.cat(parts)[torch.argsort(torch.cat(places))]


def _bucket(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prompt: int,
    here: int,
    bucket: Bucket,
    scale: float,
    window: int,
    sinks: Tensor | None,
) -> Tensor:
    members, length = len(bucket.members), bucket.length
    first = max(0, prompt - window + 1)
    mask = _band(prompt, prompt + length, first, prompt + length, window, q.device)

    def own(x: Tensor, before: int) -> Tensor:
        return x[bucket.index - prompt + before].reshape(members, length, *x.shape[1:])

    def behind_prompt(x: Tensor) -> Tensor:
        return torch.cat([x[first:prompt].expand(members, -1, -1, -1), own(x, prompt)], dim=1)

    return masked_attention(own(q, here), behind_prompt(k), behind_prompt(v), mask, scale, sinks).flatten(0, 1)


def _band(q_from: int, q_to: int, k_from: int, k_to: int, window: int, device: torch.device) -> Tensor:
    distance = torch.arange(q_from, q_to, device=device)[:, None] - torch.arange(k_from, k_to, device=device)
    return (distance >= 0) & (distance < window)
