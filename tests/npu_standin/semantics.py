"""What the operators compute, in plain arithmetic, layout TND: by the documentation, for tests alone.

Rows that no sequence covers are NaN here (uninitialised memory on a card). Statistics are ``[T,Nq,8]``, each value
eight times; their memory runs sequence by sequence, heads first (``NTD``), unless ``softmax_layout="TND"`` makes
rows follow the tokens. Dropout, position biases, sinks and other layouts aren't modelled: they are refused.

Shape suffixes: T query rows of the call, S query rows and M keys of one sequence, H query heads, N key/value
heads, G query heads a key/value head, D head width, V value width.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from npu_standin.masks import check_mask, require, sequences, visible
from torch import Tensor

_COPIES, _UNLIMITED = 8, 2147483647
_DOCUMENTED = {
    "forward": (torch.float16, torch.bfloat16, torch.float32),
    "backward": (torch.float16, torch.bfloat16),
}
_NOT_MODELLED = ("pse", "padding_mask", "sink", "dropout_mask")
_FIXED = {"keep_prob": 1.0, "inner_precise": 0}


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    *,
    scale: float = 1.0,
    softmax_layout: str = "",
    strict_dtypes: bool = True,
    **arguments: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    """``npu_fusion_attention``."""
    parts = _parts("forward", query, key, value, head_num, input_layout, softmax_layout, strict_dtypes, arguments)
    exact = _exact(query)
    out = query.new_full((*query.shape[:2], value.shape[-1]), torch.nan)
    peak_TH, total_TH = (query.new_full(query.shape[:2], torch.nan, dtype=exact) for _ in range(2))
    for rows, keys, seen in parts:
        scores = _scores(query[rows], key[keys], scale, seen)
        peak = scores.amax(-1, keepdim=True)
        weights = torch.exp(scores - peak)
        total = weights.sum(-1, keepdim=True)
        values = value[keys].to(exact)
        part = torch.einsum("ngsm,mnv->sngv", weights / total, values)
        out[rows] = part.reshape(-1, *out.shape[1:]).to(out.dtype)
        for target, statistic in ((peak_TH, peak), (total_TH, total)):
            target[rows] = statistic[..., 0].permute(2, 0, 1).flatten(1)
    ends = arguments["actual_seq_qlen"]
    peak, total = (_store(one, ends, softmax_layout) for one in (peak_TH, total_TH))
    return out, peak, total, query.new_empty(0), 0, 0, 0


def backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    softmax_max: Tensor | None = None,
    softmax_sum: Tensor | None = None,
    attention_in: Tensor | None = None,
    scale_value: float = 1.0,
    softmax_layout: str = "",
    strict_dtypes: bool = True,
    **arguments: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``npu_fusion_attention_grad``: ``P = exp(scale q k - max) / sum``, ``dS = P (dy v - dy out)``."""
    parts = _parts("backward", query, key, value, head_num, input_layout, softmax_layout, strict_dtypes, arguments)
    exact = _exact(query)
    require(softmax_max is not None and softmax_sum is not None, "the gradient needs softmax_max and softmax_sum")
    require(attention_in is not None, "the gradient needs attention_in, the forward's output")
    shape = (*query.shape[:2], value.shape[-1])
    require(dy.shape == attention_in.shape == shape, f"dy and attention_in are {shape}")
    require(dy.dtype == attention_in.dtype == query.dtype, "dy and attention_in have query's dtype")
    ends = arguments["actual_seq_qlen"]
    peak_TH, total_TH = (_load(one, query, ends, softmax_layout) for one in (softmax_max, softmax_sum))
    dq, dk, dv = (torch.full_like(x, torch.nan) for x in (query, key, value))
    for rows, keys, seen in parts:
        heads = key.shape[1]
        scores = _scores(query[rows], key[keys], scale_value, seen)
        weights = torch.exp(scores - _fold(peak_TH[rows, :, None], heads)) / _fold(total_TH[rows, :, None], heads)
        q_NGSD, g_NGSV = (_fold(x[rows].to(exact), heads) for x in (query, dy))
        o_NGSV = _fold(attention_in[rows].to(exact), heads)
        k_MND, v_MNV = key[keys].to(exact), value[keys].to(exact)
        slope = torch.einsum("ngsv,mnv->ngsm", g_NGSV, v_MNV) - (g_NGSV * o_NGSV).sum(-1, keepdim=True)
        slope = weights * slope * scale_value
        dq[rows] = torch.einsum("ngsm,mnd->sngd", slope, k_MND).reshape(query[rows].shape).to(dq.dtype)
        dk[keys] = torch.einsum("ngsm,ngsd->mnd", slope, q_NGSD).to(dk.dtype)
        dv[keys] = torch.einsum("ngsm,ngsv->mnv", weights, g_NGSV).to(dv.dtype)
    return dq, dk, dv, query.new_empty(0), query.new_empty(0)


def update(
    prev_attn_out: Tensor,
    prev_softmax_max: Tensor,
    prev_softmax_sum: Tensor,
    cur_attn_out: Tensor,
    cur_softmax_max: Tensor,
    cur_softmax_sum: Tensor,
    *,
    actual_seq_qlen: Tensor | None = None,
    input_layout: str = "SBH",
    input_softmax_layout: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """``npu_ring_attention_update`` of two parts of the same rows; statistics by token only."""
    require((input_layout, input_softmax_layout) == ("TND", "TND"), "only TND with statistics by token is modelled")
    require(prev_attn_out.shape == cur_attn_out.shape, "both parts have the same rows")
    peak = torch.maximum(prev_softmax_max, cur_softmax_max)
    before = prev_softmax_sum * torch.exp(prev_softmax_max - peak)
    now = cur_softmax_sum * torch.exp(cur_softmax_max - peak)
    total = before + now
    out = prev_attn_out * (before / total)[..., :1] + cur_attn_out * (now / total)[..., :1]
    return out.to(prev_attn_out.dtype), peak, total


def _parts(
    direction: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    softmax_layout: str,
    strict_dtypes: bool,
    arguments: dict[str, Any],
) -> Iterator[tuple[slice, slice, Tensor]]:
    """After all checks: rows, keys and ``[S,M]`` visibility of each sequence that has queries."""
    require(input_layout == "TND", f"layout {input_layout} isn't modelled")
    require(softmax_layout in ("", "TND"), "softmax_layout is 'TND' or left out")
    for name in _NOT_MODELLED:
        require(arguments.get(name) is None, f"{name} isn't modelled")
    for name, fixed in _FIXED.items():
        require(arguments.get(name, fixed) == fixed, f"{name} other than {fixed} isn't modelled")
    _check_heads(query, key, value, head_num)
    if strict_dtypes:
        require(query.dtype in _DOCUMENTED[direction], f"the {direction} call isn't documented for {query.dtype}")
    ends: Sequence[Sequence[int] | None] = [arguments.get(f"actual_seq_{name}") for name in ("qlen", "kvlen")]
    require(None not in ends, "TND needs actual_seq_qlen and actual_seq_kvlen")
    require(len(ends[0]) == len(ends[1]), "as many sequences of keys as of queries")
    queries, keys = sequences(ends[0], len(query)), sequences(ends[1], len(key))
    mode, mask, prefix = (arguments.get(name) for name in ("sparse_mode", "atten_mask", "prefix"))
    check_mask(mask, mode or 0, prefix, len(queries))
    before, after = (arguments.get(name, _UNLIMITED) for name in ("pre_tockens", "next_tockens"))

    def each() -> Iterator[tuple[slice, slice, Tensor]]:
        for number, (rows, columns) in enumerate(zip(queries, keys, strict=True)):
            count, width = rows.stop - rows.start, columns.stop - columns.start
            if count:
                first = None if prefix is None else prefix[number]
                yield rows, columns, visible(count, width, mode or 0, mask, before, after, first, query.device)

    return each()


def _check_heads(query: Tensor, key: Tensor, value: Tensor, head_num: int) -> None:
    require(query.dtype == key.dtype == value.dtype, "query, key and value have one dtype")
    require(query.dim() == key.dim() == value.dim() == 3, "TND tensors have three dimensions")
    require(key.shape[:2] == value.shape[:2], "key and value have the same rows and heads")
    require(head_num == query.shape[1], "head_num is the number of query heads")
    require(query.shape[1] % key.shape[1] == 0 and query.shape[1] <= 256, "query heads: a multiple, at most 256")
    width, other = query.shape[2], value.shape[2]
    require(width == key.shape[2] and 1 <= other <= width <= 768, "head widths: Dq = Dk >= Dv, 1 to 768")


def _exact(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _fold(x: Tensor, kv_heads: int) -> Tensor:
    """``[S,H,D] -> [N,G,S,D]``; query head h belongs to key/value head ``h // G``."""
    return x.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)


def _scores(q: Tensor, k: Tensor, scale: float, seen: Tensor) -> Tensor:
    exact = _exact(q)
    scores_NGSM = torch.einsum("ngsd,mnd->ngsm", _fold(q.to(exact), k.shape[1]), k.to(exact)) * scale
    return scores_NGSM.masked_fill(~seen, -torch.inf)


def _store(statistic: Tensor, ends: Sequence[int], layout: str) -> Tensor:
    """``[T,H]`` by token -> ``[T,H,8]`` in the memory order of ``layout``."""
    ordered = statistic if layout == "TND" else _reorder(statistic, ends, back=False)
    return ordered[..., None].expand(*statistic.shape, _COPIES).contiguous()


def _load(statistic: Tensor, query: Tensor, ends: Sequence[int], layout: str) -> Tensor:
    """``[T,H,8]`` in the memory order of ``layout`` -> ``[T,H]`` by token."""
    require(statistic.shape == (*query.shape[:2], _COPIES), f"statistics are [T, N, {_COPIES}]")
    require(statistic.dtype == _exact(query), "statistics are float32")
    first = statistic[..., 0]
    same = (statistic == first[..., None]).all(-1) | first.isnan()
    require(bool(same.all()), "each statistic stands eight times")
    return first if layout == "TND" else _reorder(first, ends, back=True)


def _reorder(statistic: Tensor, ends: Sequence[int], back: bool) -> Tensor:
    """Between ``[S,H]`` and ``[H,S]`` memory within each sequence; the shape stays ``[T,H]``."""
    result = torch.full_like(statistic, torch.nan)
    for rows in sequences(ends, len(statistic)):
        part = statistic[rows]
        turned = part.reshape(part.shape[::-1]) if back else part
        result[rows] = turned.T.reshape(part.shape)
    return result
