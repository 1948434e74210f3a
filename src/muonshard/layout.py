"""The boxes of a global tensor that each rank holds.

A mesh axis either replicates a tensor or cuts one of its dims. The cuts of different dims are independent, so a shard
is a product: for each dim, the runs of indices that survive the axes cutting that dim. Nothing here is per element,
and nothing is padded: uneven, empty and strided shards are just different runs.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, product
from operator import mul

Box = tuple[tuple[int, int], ...]
"""A (start, stop) range of indices for each dim of a tensor."""

Slices = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """A mesh axis that cuts `dim`, as `Shard(dim)` does, or as `_StridedShard(dim, split_factor)` does.

    A strided cut is made when inner axes have cut the dim into `split_factor` pieces already (FSDP2 over tensor
    parallel): each piece is chunked. Where no inner axes make so many pieces, they are chunks of the dim.
    """

    dim: int
    split_factor: int = 1


Placement = Cut | None
"""What one mesh axis does to a tensor; None replicates it."""


@dataclass(frozen=True, slots=True)
class Run:
    """Global indices [start, stop) of one dim, found from `local` on in the shard that holds them."""

    start: int
    stop: int
    local: int


@dataclass(frozen=True, eq=False)
class DimSplit:
    """How one dim is shared out: share k has the runs `shares[k]`, and a shard's index is the sum of its dims' keys k.

    `starts`, `runs` and `keys` list all non-empty runs by global index, with the share that holds each.
    """

    size: int
    shares: dict[int, tuple[Run, ...]]
    starts: tuple[int, ...]
    runs: tuple[Run, ...]
    keys: tuple[int, ...]

    def length(self, key: int) -> int:
        """The number of indices in share `key`."""
        return sum(run.stop - run.start for run in self.shares[key])

    def held(self, key: int, start: int, stop: int) -> int:
        """The number of indices of [start, stop) in share `key`."""
        return sum(max(0, min(run.stop, stop) - max(run.start, start)) for run in self.shares[key])

    def touching(self, start: int, stop: int) -> list[int]:
        """The shares that hold some of [start, stop), each once, by first index."""
        if start >= stop:
            return []
        first = max(0, bisect_right(self.starts, start) - 1)
        last = bisect_right(self.starts, stop - 1)
        return list(dict.fromkeys(self.keys[first:last]))


@dataclass(frozen=True, slots=True)
class Overlap:
    """Where a shard and a box meet: the same elements, in the shard's own indices and in the box's own."""

    local: Slices
    inner: Slices
    numel: int


@dataclass(frozen=True, eq=False)
class Layout:
    """A tensor of `shape` cut over `shards` shards; shard f of the axes that cut it, in row-major mesh order.

    Replicating axes do not appear: every replica has the same layout.
    """

    shape: tuple[int, ...]
    shards: int
    dims: tuple[DimSplit, ...]
    axes: tuple[tuple[int, int, int], ...]
    """(dim, axis size, stride of the axis in the shard index) for every cutting axis."""

    def keys(self, shard: int) -> tuple[int, ...]:
        """The share of each dim that makes up `shard`."""
        keys = [0] * len(self.shape)
        for dim, size, stride in self.axes:
            keys[dim] += shard // stride % size * stride
        return tuple(keys)

    def local_shape(self, shard: int) -> tuple[int, ...]:
        """The shape of the tensor that `shard` holds."""
        return tuple(split.length(key) for split, key in zip(self.dims, self.keys(shard), strict=True))

    @cached_property
    def max_local_numel(self) -> int:
        """An upper bound, met for most layouts, on the elements of any one shard."""
        return math.prod(max(map(split.length, split.shares)) for split in self.dims)

    def held(self, shard: int, box: Box) -> int:
        """The number of elements of `box` that `shard` holds."""
        keys = self.keys(shard)
        return math.prod(split.held(key, *span) for split, key, span in zip(self.dims, keys, box, strict=True))

    def holders(self, box: Box) -> Iterator[int]:
        """The shards that hold some of `box`."""
        touching = [split.touching(*span) for split, span in zip(self.dims, box, strict=True)]
        return (sum(keys) for keys in product(*touching))

    def largest_holders(self, box: Box) -> list[int]:
        """The shards that hold no less of `box` than any other."""
        best = [_largest_shares(split, *span) for split, span in zip(self.dims, box, strict=True)]
        return [sum(keys) for keys in product(*best)]

    def overlaps(self, shard: int, box: Box) -> list[Overlap]:
        """Where `shard` and `box` meet, in row-major order of the runs; empty where they do not."""
        spans = [
            [
                (run.local + max(run.start, start) - run.start, max(run.start, start) - start, length)
                for run in split.shares[key]
                if (length := min(run.stop, stop) - max(run.start, start)) > 0
            ]
            for split, key, (start, stop) in zip(self.dims, self.keys(shard), box, strict=True)
        ]
        return [
            Overlap(
                local=tuple(slice(local, local + length) for local, _, length in parts),
                inner=tuple(slice(inner, inner + length) for _, inner, length in parts),
                numel=math.prod(length for _, _, length in parts),
            )
            for parts in product(*spans)
        ]


@lru_cache(maxsize=4096)
def make_layout(shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]) -> Layout:
    """The layout of a tensor of `shape` on a mesh, one placement for each mesh axis.

    Several axes may cut one dim: they cut it in mesh order, but for strided cuts, as DTensor does.

    Raises:
        ValueError: a placement for each axis is missing, or a cut names a dim the tensor does not have.
    """
    if len(mesh_shape) != len(placements):
        raise ValueError(f"a mesh of {len(mesh_shape)} axes needs as many placements, got {len(placements)}")
    for cut in placements:
        if cut is not None and not (0 <= cut.dim < len(shape) and cut.split_factor >= 1):
            raise ValueError(f"{cut} does not fit a tensor of shape {shape}")
    shards = 1
    axes: list[tuple[int, int, int, int]] = []
    for size, cut in reversed(list(zip(mesh_shape, placements, strict=True))):
        if cut is not None:
            axes.append((cut.dim, size, shards, cut.split_factor))
            shards *= size
    axes.reverse()
    dims = tuple(
        _split_dim(length, _in_order([(size, stride, factor) for d, size, stride, factor in axes if d == dim]))
        for dim, length in enumerate(shape)
    )
    return Layout(shape, shards, dims, tuple(axis[:3] for axis in axes))


def _in_order(axes: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """The (axis size, stride, split factor) of a dim's cuts in the order in which they are made.

    Where every strided cut can follow inner cuts that make its pieces, all are plain cuts in that order.
    """
    order: list[tuple[int, int, int]] = []
    for size, stride, factor in reversed(axes):
        pieces = list(accumulate((inner for inner, _, _ in order), mul, initial=1))
        if factor not in pieces:
            return axes
        order.insert(pieces.index(factor), (size, stride, 1))
    return order


def _split_dim(length: int, axes: list[tuple[int, int, int]]) -> DimSplit:
    """Cut indices [0, length) by each (axis size, stride, split factor) in turn."""
    shares: dict[int, list[tuple[int, int]]] = {0: [(0, length)]}
    for size, stride, factor in axes:
        shares = {
            key + coordinate * stride: _take(spans, size, coordinate, factor)
            for key, spans in shares.items()
            for coordinate in range(size)
        }
    runs = {key: _number(spans) for key, spans in shares.items()}
    ordered = sorted((run.start, key, run) for key, share in runs.items() for run in share)
    return DimSplit(
        length,
        runs,
        tuple(start for start, _, _ in ordered),
        tuple(run for _, _, run in ordered),
        tuple(key for _, key, _ in ordered),
    )


def _take(spans: list[tuple[int, int]], parts: int, index: int, factor: int) -> list[tuple[int, int]]:
    """Part `index` of `parts` of the indices in `spans`, from each of `factor` pieces of them."""
    if factor == 1:
        return _chunk(spans, parts, index)
    return [span for piece in range(factor) for span in _chunk(_chunk(spans, factor, piece), parts, index)]


def _chunk(spans: list[tuple[int, int]], parts: int, index: int) -> list[tuple[int, int]]:
    """Chunk `index` by torch.chunk's rule: pieces of ceil(length / parts), the last ones short or empty."""
    length = sum(stop - start for start, stop in spans)
    size = -(-length // parts)
    begin, end = min(length, size * index), min(length, size * (index + 1))
    chunk = []
    position = 0
    for start, stop in spans:
        low, high = max(begin, position), min(end, position + stop - start)
        if low < high:
            chunk.append((start + low - position, start + high - position))
        position += stop - start
    return chunk


def _number(spans: list[tuple[int, int]]) -> tuple[Run, ...]:
    """Runs with their local positions; spans that touch become one run."""
    runs: list[Run] = []
    local = 0
    for start, stop in spans:
        if runs and runs[-1].stop == start:
            runs[-1] = Run(runs[-1].start, stop, runs[-1].local)
        elif start < stop:
            runs.append(Run(start, stop, local))
        local += stop - start
    return tuple(runs)


def _largest_shares(split: DimSplit, start: int, stop: int) -> list[int]:
    """The shares that hold no less of [start, stop) than any other."""
    held = {key: split.held(key, start, stop) for key in split.touching(start, stop)}
    most = max(held.values(), default=0)
    return [key for key, count in held.items() if count == most]
