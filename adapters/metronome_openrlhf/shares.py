"""How a part's groups become micro-batches for the data-parallel ranks: whole groups where they fit, as many a rank."""

from __future__ import annotations

from collections.abc import Sequence


def shares(lengths: Sequence[Sequence[int]], ranks: int, rows: int) -> list[list[list[tuple[int, int]]]]:
    """Micro-batches of each rank, as ``(group, member)`` places; ranks may have different numbers of them.

    Groups are taken heaviest first, each to the rank with the fewest tokens. With fewer groups than ranks they are cut
    into as many pieces as fill the ranks. A micro-batch holds at most ``rows`` rows and pieces of groups whole where
    they fit; a piece above ``rows`` is cut.

    Args:
        lengths: tokens of every member of every group.
        ranks: data-parallel ranks (>= 1).
        rows: rows that a micro-batch may hold (>= 1).
    """
    pieces = [[(group, member) for member in range(len(lengths[group]))] for group in range(len(lengths))]

    def tokens(piece: list[tuple[int, int]]) -> int:
        return sum(lengths[group][member] for group, member in piece)

    while 0 < len(pieces) < ranks and any(len(piece) > 1 for piece in pieces):
        largest = max((piece for piece in pieces if len(piece) > 1), key=tokens)
        half = len(largest) // 2
        pieces.remove(largest)
        pieces += [largest[:half], largest[half:]]
    pieces = [piece[at : at + rows] for piece in pieces for at in range(0, len(piece), rows)]
    taken: list[list[list[tuple[int, int]]]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for piece in sorted(pieces, key=tokens, reverse=True):
        rank = min(range(ranks), key=lambda one: load[one])
        load[rank] += tokens(piece)
        taken[rank].append(piece)
    return [_filled(one, rows) for one in taken]


def _filled(pieces: list[list[tuple[int, int]]], rows: int) -> list[list[tuple[int, int]]]:
    """Pieces put together, first fit, until a micro-batch is full."""
    batches: list[list[tuple[int, int]]] = []
    for piece in pieces:
        room = next((one for one in batches if len(one) + len(piece) <= rows), None)
        if room is None:
            batches.append(list(piece))
        else:
            room += piece
    return batches
