"""Layouts for the tests of the shard layer: how each tensor is split, by torch.chunk alone, and drawn at random."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

MESHES = [(2,), (3,), (4,), (2, 2), (2, 3), (2, 2, 2)]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """Tensors of one layout: `cuts` are (mesh dim, tensor dim, split factor), in the order in which they are made.

    `uneven`, where given, holds for each tensor and cut the sizes that the ranks of the axis get.
    """

    mesh_shape: Shape
    shapes: tuple[Shape, ...]
    cuts: tuple[tuple[int, int, int], ...]
    uneven: tuple[tuple[Shape, ...], ...] | None = None
    dtype: str = "float32"
    keep: tuple[int, ...] = ()

    @property
    def world(self) -> int:
        return math.prod(self.mesh_shape)

    @property
    def ndim(self) -> int:
        return len(self.shapes[0])

    def placements(self) -> list[Placement]:
        """What DTensor calls this layout: a cut made after cuts of later mesh dims is strided by their sizes."""
        found: list[Placement] = [Replicate()] * len(self.mesh_shape)
        for place, (mesh_dim, dim, factor) in enumerate(self.cuts):
            earlier = [m for m, d, _ in self.cuts[:place] if d == dim and m > mesh_dim]
            factor *= math.prod(self.mesh_shape[m] for m in earlier)
            found[mesh_dim] = Shard(dim) if factor == 1 else _StridedShard(dim, split_factor=factor)
        return found

    def gather_order(self) -> list[int]:
        """Places in `cuts`: of each dim the last made first, and else by mesh dim."""
        left = list(range(len(self.cuts)))
        order = []
        while left:
            last_of_dim = {self.cuts[place][1]: place for place in left}
            order.append(min(last_of_dim.values(), key=lambda place: self.cuts[place][0]))
            left.remove(order[-1])
        return order


def whole_tensor(case: Case, place: int) -> Tensor:
    """Distinct values, the same on every rank, exact in bfloat16 where there are few."""
    numel = math.prod(case.shapes[place])
    return (torch.arange(numel) - place).to(getattr(torch, case.dtype)).reshape(case.shapes[place])


def cut_tensor(case: Case, place: int, tensor: Tensor, coordinate: Shape, cuts: Sequence[int]) -> Tensor:
    """What a rank holds after `cuts` (places in `case.cuts`) of the tensor at `place`."""
    for cut in cuts:
        mesh_dim, dim, factor = case.cuts[cut]
        ranks = case.mesh_shape[mesh_dim]
        if case.uneven is not None:
            tensor = tensor.split(case.uneven[place][cut], dim)[coordinate[mesh_dim]]
            continue
        pieces = [_chunks(piece, ranks, dim)[coordinate[mesh_dim]] for piece in _chunks(tensor, factor, dim)]
        tensor = torch.cat(pieces, dim)
    return tensor


def local_tensor(case: Case, place: int, coordinate: Shape) -> Tensor:
    """What the rank at `coordinate` holds of the tensor at `place`."""
    return cut_tensor(case, place, whole_tensor(case, place), coordinate, range(len(case.cuts))).contiguous()


def coordinates(case: Case) -> list[Shape]:
    """The mesh coordinate of each rank."""
    return list(product(*(range(size) for size in case.mesh_shape)))


def _chunks(tensor: Tensor, parts: int, dim: int) -> list[Tensor]:
    chunks = list(tensor.chunk(parts, dim))
    return chunks + [tensor.narrow(dim, 0, 0)] * (parts - len(chunks))


@st.composite
def shapes_of(draw: st.DrawFn, ndim: int, largest: int = 9) -> tuple[Shape, ...]:
    sizes = st.integers(1, largest if ndim < 3 else 5)
    return tuple(draw(st.lists(st.tuples(*[sizes] * ndim), min_size=1, max_size=4)))


@st.composite
def cuts_of(draw: st.DrawFn, mesh_shape: Shape, ndim: int, in_mesh_order: bool) -> tuple[tuple[int, int, int], ...]:
    """Each mesh dim replicates or cuts a dim; dim 0 is drawn often, so that several cut the same."""
    dims = st.one_of(st.none(), st.just(0), st.integers(0, ndim - 1))
    cuts = [(mesh_dim, dim, 1) for mesh_dim in range(len(mesh_shape)) if (dim := draw(dims)) is not None]
    return tuple(cuts if in_mesh_order else draw(st.permutations(cuts)))


@st.composite
def ordered_cases(draw: st.DrawFn, mesh_shape: Shape) -> Case:
    """Cuts by torch's chunk rule, made in any order of the mesh dims."""
    shapes = draw(st.integers(1, 4).flatmap(lambda ndim: shapes_of(ndim)))
    cuts = draw(cuts_of(mesh_shape, len(shapes[0]), in_mesh_order=False))
    dtype = draw(st.sampled_from(["float32", "float64", "bfloat16", "int64", "bool"]))
    keep = draw(st.lists(st.integers(0, len(shapes) - 1), unique=True))
    return Case(mesh_shape, shapes, cuts, dtype=dtype, keep=tuple(keep))


@st.composite
def uneven_cases(draw: st.DrawFn, mesh_shape: Shape) -> Case:
    """Every cut gives the ranks of its axis any sizes at all, some of them none; no two cuts of one dim."""
    shapes = draw(st.integers(1, 3).flatmap(lambda ndim: shapes_of(ndim)))
    found = draw(cuts_of(mesh_shape, len(shapes[0]), in_mesh_order=True))
    cuts = tuple({dim: (mesh_dim, dim, factor) for mesh_dim, dim, factor in found}.values())
    uneven = []
    for shape in shapes:
        sizes = []
        for mesh_dim, dim, _ in cuts:
            inner = st.lists(st.integers(0, shape[dim]), min_size=mesh_shape[mesh_dim] - 1)
            bounds = [0, *sorted(draw(inner.map(lambda b, n=mesh_shape[mesh_dim] - 1: b[:n]))), shape[dim]]
            sizes.append(tuple(stop - start for start, stop in pairwise(bounds)))
        uneven.append(tuple(sizes))
    return Case(mesh_shape, shapes, cuts, tuple(uneven))


@st.composite
def strided_cases(draw: st.DrawFn, mesh_shape: Shape) -> Case:
    """Strided cuts, made in mesh order, whose factors no order of ordinary cuts explains."""
    shapes = draw(st.integers(1, 3).flatmap(lambda ndim: shapes_of(ndim, largest=30)))
    cuts = draw(cuts_of(mesh_shape, len(shapes[0]), in_mesh_order=True).filter(bool))
    factors = [draw(st.sampled_from([1, 5, 7])) for _ in cuts[1:]] + [draw(st.sampled_from([5, 7]))]
    strided = tuple((mesh_dim, dim, factor) for (mesh_dim, dim, _), factor in zip(cuts, factors, strict=True))
    return Case(mesh_shape, shapes, strided)
