"""How a dim is shared out over the ranks of a mesh axis, and where each share lies in the whole. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """`length` indices of the whole from `whole_start` on, found in a rank's share from `share_start` on."""

    share_start: int
    whole_start: int
    length: int


@dataclass(frozen=True, slots=True)
class Run:
    """Pieces of `ranks` neighbours whose shares all have the shape `share_shape`, one behind the other in the whole.

    Rank `first_rank + k` has indices [whole_start + k * length, ... + length), from `share_start` on in its share.
    """

    first_rank: int
    ranks: int
    share_shape: Shape
    share_start: int
    whole_start: int
    length: int


def chunk_sizes(length: int, parts: int) -> Shape:
    """torch.chunk's rule, padded to `parts`: pieces of ceil(length / parts), the last ones short or empty."""
    size = -(-length // parts)
    return tuple(min(length, size * (part + 1)) - min(length, size * part) for part in range(parts))


def share_sizes(length: int, ranks: int, split_factor: int) -> Shape:
    """What each rank holds of a dim that is cut into `split_factor` pieces, each of which is chunked over the ranks."""
    pieces = [chunk_sizes(piece, ranks) for piece in chunk_sizes(length, split_factor)]
    return tuple(sum(sizes) for sizes in zip(*pieces, strict=True))


def contiguous_pieces(sizes: Sequence[int]) -> list[list[Piece]]:
    """One piece for each rank, in rank order."""
    return [[Piece(0, end - size, size)] for size, end in zip(sizes, accumulate(sizes), strict=True)]


def interleaved_pieces(length: int, ranks: int, split_factor: int) -> list[list[Piece]]:
    """For each rank its chunk of each of `split_factor` pieces, as `_StridedShard` shares a dim out."""
    shares: list[list[Piece]] = [[] for _ in range(ranks)]
    held = [0] * ranks
    start = 0
    for piece in chunk_sizes(length, split_factor):
        for rank, size in enumerate(chunk_sizes(piece, ranks)):
            shares[rank].append(Piece(held[rank], start, size))
            held[rank] += size
            start += size
    return shares


def merge_runs(pieces: Iterable[Sequence[Piece]], share_shapes: Sequence[Shape]) -> tuple[Run, ...]:
    """The non-empty pieces of all ranks, those of neighbours with shares of the same shape as one run."""
    runs: list[Run] = []
    for column in zip(*pieces, strict=True):
        held = [(rank, piece) for rank, piece in enumerate(column) if piece.length]
        # rank - order is the same for neighbours only: a rank that holds nothing ends a run
        keys = {
            rank: (rank - order, share_shapes[rank], piece.share_start, piece.length)
            for order, (rank, piece) in enumerate(held)
        }
        for (_, shape, share_start, length), group in groupby(held, key=lambda item: keys[item[0]]):
            members = list(group)
            runs.append(Run(members[0][0], len(members), shape, share_start, members[0][1].whole_start, length))
    return tuple(runs)
