"""PyPI's prefix-grouper 0.0.1.post1 (arXiv 2506.05433), wired to torch's scaled_dot_product_attention for CPU.

The package hands the adapter a padding mask ``[b,keys]`` and leaves causality to it; it ships adapters for
flash-attention only. Two are given here, both with the kernel's native grouped heads: ``plain`` builds the
4-D mask at every call, as its README's signature suggests, and ``lean`` knows that nothing is padded: it lets
the kernel do the prompt's causality and keeps the responses' mask.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

NAME = "prefix_grouper_attention"  # what the package registers with transformers
LEAN = "prefix_grouper_lean_sdpa"


def grouper(prompt: int, count: int, length: int) -> Any:
    """The package's object for one group of ``count`` responses of one length."""
    from prefix_grouper import PrefixGrouper

    return PrefixGrouper([[prompt] + [length] * count], padding_mode="right")


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *_: Any, **__: Any) -> Tensor:
    """``[b,H,S,D] -> [b,S,H,D]``, the mask made of the padding mask ``[b,M]`` at every call."""
    seen = mask[:, None, None, :] & _corner(q.shape[2], k.shape[2])
    return scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(1, 2)


def lean(q: Tensor, k: Tensor, v: Tensor, *_: Any, scaling: float | None = None, **__: Any) -> Tensor:
    """``[b,H,S,D] -> [b,S,H,D]`` without padding."""
    if q.shape[2] == k.shape[2]:
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
    else:
        mask = _kept(q.shape[2], k.shape[2])
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2)


def step(model: Any, ids: Tensor, prompt: int, count: int, length: int, weights: Tensor, logits_first: bool) -> Tensor:
    """Forward, weighted log-probs ``[count * length]`` and backward of one group, the data flow of its README.

    Args:
        model: a causal language model of transformers.
        ids: int64 ``[prompt + count * length]``.
        weights: ``[count * length]``.
        logits_first: logits of the whole row, then ``split_output`` (README); else hidden states are split and
            the head runs on response rows only, which its interface allows.
    """
    from prefix_grouper import PrefixGrouper

    _register()
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    responses = ids[prompt:].view(count, length)
    prompt_mask, mask = torch.ones(1, prompt, dtype=torch.bool), torch.ones_like(responses, dtype=torch.bool)
    group = PrefixGrouper.from_ungrouped_masks(prompt_mask, mask, count, padding_mode="right")
    own = torch.arange(prompt, prompt + length)
    arguments = {
        "input_ids": group.concat_input(ids[None, :prompt], prompt_mask, responses, mask),
        "position_ids": torch.cat([torch.arange(prompt), own.repeat(count)])[None],
        "use_cache": False,
        "prefix_grouper": group,
        "prefix_grouper_attn_func": LEAN,
    }
    if logits_first:
        rows = group.split_output(model(**arguments).logits, include_prefix_last=1)[2][:, :-1]
    else:
        hidden = model.get_decoder()(**arguments).last_hidden_state
        rows = model.lm_head(group.split_output(hidden, include_prefix_last=1)[2][:, :-1])
    targets = group.convert_padding(responses, mask, padding_mode="right")
    found = (rows.gather(-1, targets[..., None])[..., 0] - rows.logsumexp(-1)).flatten()
    (found * weights).sum().backward()
    model.set_attn_implementation(before)
    return found.detach()


@cache
def _register() -> None:
    from prefix_grouper.utils.register_transformers import register_attention
    from transformers import AttentionInterface, AttentionMaskInterface

    def adapter(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *rest: Any, **named: Any) -> Any:
        return lean(q, k, v, scaling=named.get("scaling")).contiguous(), None

    register_attention()
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)  # its attention ignores the mask: make none
    AttentionInterface.register(LEAN, adapter)


def _corner(queries: int, keys: int) -> Tensor:
    """Causal, aligned at the lower right."""
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)[None, None]


_kept = cache(_corner)
