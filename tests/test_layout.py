"""Shards as boxes: the textbook rule of chunks, element by element, and what torch itself puts on each rank."""

from __future__ import annotations

from itertools import pairwise, permutations, product
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from muonshard.layout import Box, Cut, Layout, Placement, make_layout
from muonshard.meshes import find_residence
from pool import Pool

Array = np.ndarray[Any, Any]
Case = tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]]


def indices(shape: tuple[int, ...]) -> Array:
    """A tensor in which every element is its own number."""
    return np.arange(prod(shape)).reshape(shape)


def chunk(array: Array, parts: int, index: int, dim: int) -> Array:
    """Rows [index c, index c + c) of `dim`, where c = ceil(size / parts): the rule of torch.chunk."""
    size = -(-array.shape[dim] // parts)
    return array.take(range(min(size * index, array.shape[dim]), min(size * (index + 1), array.shape[dim])), dim)


def cut_up(array: Array, parts: int, index: int, dim: int, factor: int) -> Array:
    """Part `index` of `parts` of each of `factor` pieces of `dim`."""
    pieces = [chunk(array, factor, piece, dim) for piece in range(factor)]
    return np.concatenate([chunk(piece, parts, index, dim) for piece in pieces], dim)


def in_order(cutting: list[tuple[int, Cut]]) -> list[tuple[int, int]]:
    """(axis, split factor) in the order of the cuts: a factor is how many pieces inner axes have made before."""
    for order in permutations(range(len(cutting))):
        made = [prod(cutting[other][0] for other in order[:place] if other > axis) for place, axis in enumerate(order)]
        if made == [cutting[axis][1].split_factor for axis in order]:
            return [(axis, 1) for axis in order]
    return [(axis, cut.split_factor) for axis, (_, cut) in enumerate(cutting)]


def textbook_shards(case: Case) -> list[Array]:
    """All shards, in row-major order of the axes that cut."""
    shape, mesh_shape, placements = case
    cutting = [(size, cut) for size, cut in zip(mesh_shape, placements, strict=True) if cut is not None]
    shards = []
    for at in product(*(range(size) for size, _ in cutting)):
        shard = indices(shape)
        for dim in range(len(shape)):
            axes = [axis for axis, (_, cut) in enumerate(cutting) if cut.dim == dim]
            for place, factor in in_order([cutting[axis] for axis in axes]):
                shard = cut_up(shard, cutting[axes[place]][0], at[axes[place]], dim, factor)
        shards.append(shard)
    return shards


def runs_of(layout: Layout, shard: int) -> Array:
    """The elements that a layout says a shard holds, in the places where it says they are."""
    picked = []
    for split, key in zip(layout.dims, layout.keys(shard), strict=True):
        places = np.full(split.length(key), -1)
        for run in split.shares[key]:
            places[run.local : run.local + run.stop - run.start] = range(run.start, run.stop)
        picked.append(places)
    return indices(layout.shape)[np.ix_(*picked)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A tensor of 1 to 3 dims on a mesh of 1 to 3 axes; dims may be empty, cut twice, and strided."""
    shape = tuple(draw(st.lists(st.integers(0, 11), min_size=1, max_size=3)))
    mesh_shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    cut = st.builds(Cut, st.integers(0, len(shape) - 1), st.sampled_from([1, 1, 2, 3, 4]))
    placements = tuple(draw(st.one_of(st.none(), cut, cut)) for _ in mesh_shape)
    return shape, mesh_shape, placements


@st.composite
def boxed_cases(draw: st.DrawFn) -> tuple[Case, Box]:
    """A case, and a box of its tensor, which may be empty."""
    case = draw(cases())
    ends = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in case[0]]
    return case, tuple((start, stop) for start, stop in ends)


TWICE_UNEVEN: Case = ((7, 3), (2, 3), (Cut(0), Cut(0)))
FSDP_OVER_TP: Case = ((9, 3), (4, 2), (Cut(0, 2), Cut(0)))
NOTHING_IN_IT: Case = ((0, 3), (2, 2), (Cut(0), Cut(1)))


@given(cases())
@example(TWICE_UNEVEN)
@example(FSDP_OVER_TP)
@example(NOTHING_IN_IT)
def test_every_shard_is_what_the_rule_of_chunks_makes_it(case: Case) -> None:
    layout = make_layout(*case)
    expected = textbook_shards(case)
    assert layout.shards == len(expected)
    for shard, elements in enumerate(expected):
        assert layout.local_shape(shard) == elements.shape
        assert np.array_equal(runs_of(layout, shard), elements)


@given(cases())
def test_shards_hold_every_element_once(case: Case) -> None:
    layout = make_layout(*case)
    held = [runs_of(layout, shard).ravel() for shard in range(layout.shards)]
    assert sorted(np.concatenate(held)) == list(range(prod(case[0])))


@given(cases())
def test_no_shard_is_larger_than_the_bound(case: Case) -> None:
    layout = make_layout(*case)
    assert layout.max_local_numel >= max(prod(layout.local_shape(shard)) for shard in range(layout.shards))


@given(cases())
def test_runs_that_touch_are_one_run(case: Case) -> None:
    for split in make_layout(*case).dims:
        for share in split.shares.values():
            assert all(before.stop != after.start for before, after in pairwise(share))
            assert all(run.start < run.stop for run in share)


@given(boxed_cases())
@example((FSDP_OVER_TP, ((1, 9), (0, 2))))
def test_overlaps_are_the_same_elements_seen_from_the_shard_and_from_the_box(drawn: tuple[Case, Box]) -> None:
    case, box = drawn
    layout = make_layout(*case)
    inside = indices(case[0])[tuple(slice(*span) for span in box)]
    filled = np.zeros(inside.shape, int)
    for shard, local in enumerate(textbook_shards(case)):
        common = 0
        for overlap in layout.overlaps(shard, box):
            assert np.array_equal(local[overlap.local], inside[overlap.inner])
            assert overlap.numel == inside[overlap.inner].size > 0
            filled[overlap.inner] += 1
            common += overlap.numel
        assert layout.held(shard, box) == common == len(np.intersect1d(local, inside))
    assert (filled == 1).all()


@given(boxed_cases())
def test_holders_are_the_shards_that_hold_some_and_the_largest_hold_most(drawn: tuple[Case, Box]) -> None:
    case, box = drawn
    layout = make_layout(*case)
    held = [layout.held(shard, box) for shard in range(layout.shards)]
    assert sorted(layout.holders(box)) == [shard for shard, count in enumerate(held) if count]
    most = [shard for shard, count in enumerate(held) if count and count == max(held)]
    assert sorted(layout.largest_holders(box)) == most


def test_a_layout_has_no_record_for_each_element() -> None:
    layout = make_layout((1 << 40, 1 << 20), (64, 8), (Cut(0, 8), Cut(0)))
    assert sum(len(split.runs) for split in layout.dims) == 64 * 8 + 1


def test_layouts_of_equal_tensors_are_one_object() -> None:
    assert make_layout((6, 4), (2,), (Cut(0),)) is make_layout((6, 4), (2,), (Cut(0),))


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (((4, 4), (2, 2), (Cut(0),)), "a mesh of 2 axes needs as many placements, got 1"),
        (((4, 4), (2,), (Cut(2),)), "does not fit a tensor of shape \\(4, 4\\)"),
        (((4, 4), (2,), (Cut(-1),)), "does not fit"),
        (((4, 4), (2,), (Cut(0, 0),)), "does not fit"),
    ],
)
def test_impossible_placements_are_refused(case: Case, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_layout(*case)


def as_torch(placement: Placement) -> Any:
    if placement is None:
        return Replicate()
    if placement.split_factor == 1:
        return Shard(placement.dim)
    return _StridedShard(placement.dim, split_factor=placement.split_factor)


TORCH_PLACEMENTS: list[Placement] = [None, Cut(0), Cut(1), Cut(0, 2), Cut(1, 3)]
TORCH_SHAPES = [(5, 4), (1, 9), (7, 3), (0, 3), (16, 8)]


def shards_unlike_distribute_tensor(mesh_shape: tuple[int, ...]) -> list[str]:
    """Which tensors distribute_tensor cuts otherwise for this rank than their layout says."""
    mesh = init_device_mesh("cpu", mesh_shape)
    wrong = []
    for shape, placements in product(TORCH_SHAPES, product(TORCH_PLACEMENTS, repeat=len(mesh_shape))):
        whole = torch.from_numpy(indices(shape))
        dtensor = distribute_tensor(whole, mesh, [as_torch(placement) for placement in placements], src_data_rank=None)
        residence = find_residence(dtensor, None)
        assert residence is not None
        shard = residence.grid.seats[dist.get_rank()].shard
        layout = make_layout(shape, mesh_shape, placements)
        if residence.layout is not layout or not np.array_equal(runs_of(layout, shard), dtensor.to_local().numpy()):
            wrong.append(f"{shape} {placements}")
    return wrong


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)], ids=str)
def test_torch_gives_every_rank_the_shard_that_its_layout_says(pool: Pool, mesh_shape: tuple[int, ...]) -> None:
    assert pool.run(prod(mesh_shape), shards_unlike_distribute_tensor, mesh_shape) == [[]] * prod(mesh_shape)


class Pair(nn.Module):
    """Two linear layers whose weights number their elements; the middle width is to be cut by tensor parallel."""

    def __init__(self, width: int, middle: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, middle, bias=False)
        self.down = nn.Linear(middle, width, bias=False)
        for layer in (self.up, self.down):
            layer.weight.data = torch.from_numpy(indices(tuple(layer.weight.shape))).float()


def shards_unlike_fsdp_over_tp(width: int, middle: int, cut_columns: bool) -> list[str]:
    """Which of the pair's weights, sharded by TP and then FSDP2, are other elements than their layout says."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Pair(width, middle)
    wholes = {name: param.detach().clone().numpy() for name, param in model.named_parameters()}
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"], shard_placement_fn=(lambda _: Shard(1)) if cut_columns else None)
    wrong = []
    for name, param in model.named_parameters():
        residence = find_residence(param, None)
        assert residence is not None
        shard = residence.grid.seats[dist.get_rank()].shard
        expected = wholes[name].ravel()[runs_of(residence.layout, shard)]
        if residence.layout.shards != 4 or not np.array_equal(expected, param.to_local().detach().numpy()):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize(
    ("width", "middle", "cut_columns"),
    [(8, 8, False), (5, 7, False), (3, 10, False), (1, 3, False), (8, 12, True)],  # FSDP2 cuts columns only evenly
)
def test_fsdp_over_tensor_parallel_puts_the_rows_where_the_layout_says(
    pool: Pool, width: int, middle: int, cut_columns: bool
) -> None:
    assert pool.run(4, shards_unlike_fsdp_over_tp, width, middle, cut_columns) == [[]] * 4
