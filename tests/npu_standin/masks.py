"""Which keys a query row sees, and where sequences lie: the documentation's tables as code, TND layout only.

Row i of n queries, key j of m; ``off = m - n``.

    mode 0  mask == 0, and -pre <= j - i <= next (from the upper left); mask and band must agree
    mode 1  mask == 0
    mode 2  j <= i                         upper left       compressed mask [2048, 2048]
    mode 3  j <= i + off                   lower right      compressed mask [2048, 2048]
    mode 4  -pre <= j - (i + off) <= next  lower right      compressed mask [2048, 2048]
    mode 6  mode 3, or j < prefix          lower right      compressed mask [3072, 2048]
    mask None: every key, whatever the mode; refused here with a mode, which would be ignored in silence
"""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

_EDGE, _RECTANGLE = 2048, 1024
_SEQUENCES, _ROWS = 1024, 2**20


class ContractError(ValueError):
    """A call that the documentation forbids, or that this stand-in doesn't model."""


def require(truth: bool, message: str) -> None:
    if not truth:
        raise ContractError(message)


def sequences(ends: Sequence[int], rows: int) -> list[slice]:
    """Each sequence's rows, from cumulative ends: a repeated end is an empty sequence, zeros at the end are unused."""
    require(all(type(end) is int for end in ends), "lengths are host integers")
    require(1 <= len(ends) <= _SEQUENCES, f"TND takes 1 to {_SEQUENCES} sequences, these are {len(ends)}")
    require(rows <= _ROWS, f"TND takes at most {_ROWS} rows, these are {rows}")
    used = len(ends)
    while used and ends[used - 1] == 0:
        used -= 1
    starts = [0, *ends[:used]]
    require(starts == sorted(starts), "lengths are cumulative: they never fall")
    require(starts[-1] <= rows, f"the last sequence ends at {starts[-1]} of {rows} rows")
    return [slice(a, b) for a, b in pairwise(starts)] + [slice(0, 0)] * (len(ends) - used)


def check_mask(mask: Tensor | None, mode: int, prefix: Sequence[int] | None, count: int) -> None:
    """Mask dtype and shape, and the compressed masks' contents; ``count`` sequences."""
    require(mode in (0, 1, 2, 3, 4, 6), f"TND has no sparse_mode {mode} here: 5 is refused, 7 and 8 aren't modelled")
    require((prefix is not None) == (mode == 6), "prefix belongs to sparse_mode 6")
    if prefix is not None:
        require(len(prefix) == count <= 32, "one prefix a sequence, at most 32")
    if mask is None:
        require(mode == 0, f"sparse_mode {mode} needs its mask: without one every key is seen")
        return
    require(mask.dtype in (torch.bool, torch.uint8), "a mask is bool or uint8")
    require(mask.dim() == 2, "the mask of TND is [rows, keys]")
    if mode >= 2:
        wanted = compressed(mode == 6).to(mask.device)
        require(mask.shape == wanted.shape, f"the compressed mask of mode {mode} is {tuple(wanted.shape)}")
        same = torch.equal(mask.bool().contiguous().view(torch.int64), wanted.view(torch.int64))  # eight at a time
        require(same, "the compressed mask hides what lies above the diagonal: 1 hides")


@cache
def compressed(prefix: bool = False) -> Tensor:
    """The mask that modes 2, 3, 4 ask for; with ``prefix`` that of mode 6."""
    triangle = torch.ones(_EDGE, _EDGE, dtype=torch.bool).triu(1)
    rectangle = torch.zeros(_RECTANGLE, _EDGE, dtype=torch.bool)
    rectangle[:, _EDGE // 2 :] = True
    return torch.cat([triangle, rectangle]) if prefix else triangle


def visible(
    rows: int,
    keys: int,
    mode: int,
    mask: Tensor | None,
    before: int,
    after: int,
    prefix: int | None,
    device: torch.device,
) -> Tensor:
    """Bool ``[rows, keys]`` of one sequence; refused if a row sees nothing."""
    i = torch.arange(rows, device=device)[:, None]
    j = torch.arange(keys, device=device)
    below = j - (i + keys - rows)
    if mask is None:
        seen = torch.ones(rows, keys, dtype=torch.bool, device=device)
    elif mode in (0, 1):
        require(mask.shape[0] >= rows and mask.shape[1] >= keys, "the full mask is [longest query, longest key]")
        seen = ~mask[:rows, :keys].bool()
        if mode == 0:
            band = (j - i <= after) & (i - j <= before)
            require(bool((band | ~seen).all()), "sparse_mode 0: the mask must agree with pre_tockens and next_tockens")
            seen &= band
    elif mode == 2:
        seen = j <= i
    elif mode == 4:
        seen = (-before <= below) & (below <= after)
    else:
        seen = below <= 0
    if prefix is not None:
        require(max(0, keys - rows) <= prefix <= keys, f"a prefix lies in [{max(0, keys - rows)}, {keys}]")
        seen = seen | (j < prefix)
    require(bool(seen.any(-1).all()), "a row of the mask hides every key")
    return seen
