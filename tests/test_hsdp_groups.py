"""Layouts, groups, owners, and this rank's inputs and slices."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, fields
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import hsdp_workers
from hsdp_cases import Case
from muonshard.hsdp import (
    CommDomainKey,
    HSDPCommGroup,
    ParamLayoutSpec,
    ParamRecord,
    ParamShardMeta,
    ParamShardStageMeta,
    build_owner_by_size,
    to_local_if_dtensor,
)
from pool import Pool


def test_a_layout_tells_its_dims_and_counts_them_from_the_front() -> None:
    layout = ParamLayoutSpec(4, ((2, -1), (0, 1)), (1,))
    assert layout == ParamLayoutSpec(4, ((2, 3), (0, 1)), (1,))
    assert layout.shard_mesh_dims == (2, 0)
    assert layout.shard_tensor_dims == (3, 1)


def test_the_plain_data_is_frozen() -> None:
    layout = ParamLayoutSpec(2, ((0, 0),), ())
    stage = ParamShardStageMeta(0, 1, 0, ((2, 2),), (2,), (2, 2))
    meta = ParamShardMeta((2, 2), 4, (2, 2), 4, (stage,))
    record, key = ParamRecord(0, torch.zeros(2, 2)), CommDomainKey((1,), (0,), (), (0,))
    assert record.shard_meta is None
    for frozen in (layout, stage, meta, record, key):
        for name in [field.name for field in fields(frozen)]:
            with pytest.raises(FrozenInstanceError):
                setattr(frozen, name, None)


def test_groups_share_no_list_of_records() -> None:
    key, layout = CommDomainKey((1,), (0,), (), (0,)), ParamLayoutSpec(2, ((0, 0),), ())
    first, second = HSDPCommGroup(key, layout), HSDPCommGroup(key, layout)
    first.add_param(3, torch.zeros(2, 2))
    assert (len(first), len(second)) == (1, 0)
    assert (first.replicate_pgs, first.shard_pgs) == ((), ())


@pytest.mark.parametrize(("ndim", "dim", "matrix"), [(2, 0, True), (3, 0, False), (3, 1, True), (4, -3, False)])
def test_a_layout_tells_whether_matrices_are_cut(ndim: int, dim: int, matrix: bool) -> None:
    assert ParamLayoutSpec(ndim, ((0, dim),), ()).is_last2d_sharded is matrix
    assert not ParamLayoutSpec(ndim, (), (0,)).is_last2d_sharded


@pytest.mark.parametrize("dim", [2, -3])
def test_a_layout_refuses_dims_that_a_tensor_does_not_have(dim: int) -> None:
    with pytest.raises(ValueError, match=f"mesh dim 1 cut tensor dim {dim}, but the tensor has 2 dims"):
        ParamLayoutSpec(2, ((0, -2), (1, dim)), ())


@pytest.mark.parametrize("missing", [None, "to_local", "device_mesh", "placements"])
def test_whatever_has_the_three_marks_of_a_dtensor_gives_its_local_part(missing: str | None) -> None:
    local = torch.zeros(3)
    marks = {"to_local": lambda: local, "device_mesh": object(), "placements": ()}
    tensor: Any = SimpleNamespace(**{name: mark for name, mark in marks.items() if name != missing})
    assert to_local_if_dtensor(tensor) is (local if missing is None else tensor)
    assert to_local_if_dtensor(local) is local


def test_groups_are_of_one_mesh_one_number_of_dims_and_one_layout(pool: Pool) -> None:
    kinds = [
        ((), [], (4, 4)),
        ((2, 2), [Shard(0), Shard(1)], (4, 4)),
        ((4,), [Shard(0)], (4, 4)),
        ((2, 2), [Shard(0), Shard(1)], (8, 2)),
        ((2, 2), [Shard(0), Shard(1)], (4, 4, 4)),
        ((2, 2), [Shard(0), Shard(0)], (4, 4)),
        ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)], (4, 4)),
        ((), [], (3,)),
        ((2, 2), [Replicate(), Shard(-1)], (4, 4)),
        ((2, 2), [Replicate(), Replicate()], (4, 4)),
        ((2, 2), [_StridedShard(0, split_factor=3), Shard(0)], (12, 4)),
        ((2, 2), [_StridedShard(0, split_factor=5), Shard(0)], (20, 4)),
    ]
    ranks = (0, 1, 2, 3)
    for local, groups in pool.run(4, hsdp_workers.group_params, kinds):
        assert local == [0, 7]
        assert [members for members, *_ in groups] == [[1, 3], [2], [4], [5], [6], [8], [9], [10], [11]]
        keys = [key for _, key, *_ in groups]
        assert keys[0] == CommDomainKey((2, 2), ranks, (), (0, 1))
        assert keys[1] == CommDomainKey((4,), ranks, (), (0,))
        assert keys[5] == CommDomainKey((2, 2), ranks, (0,), (1,))
        assert keys[6] == CommDomainKey((2, 2), ranks, (0, 1), ())
        layouts = [(layout.tensor_ndim, layout.shard_axes, layout.replicate_mesh_dims) for _, _, layout, *_ in groups]
        assert layouts[:7] == [
            (2, ((0, 0), (1, 1)), ()),
            (2, ((0, 0),), ()),
            (3, ((0, 0), (1, 1)), ()),
            (2, ((1, 0), (0, 0)), ()),
            (2, ((0, 0), (1, 0)), ()),
            (2, ((1, 1),), (0,)),
            (2, (), (0, 1)),
        ]
        assert [pgs for *_, replicas, shards in groups for pgs in [(replicas, shards)]][4:7] == [(0, 2), (1, 1), (2, 0)]


def test_a_mesh_of_one_rank_is_local(pool: Pool) -> None:
    assert pool.run(1, hsdp_workers.group_params, [((1,), [Shard(0)], (4, 4)), ((), [], (2,))]) == [([0, 1], [])]


def test_parameters_that_cannot_be_grouped_are_named(pool: Pool) -> None:
    for rank, (partial, unknown, of_a_dim, elsewhere) in enumerate(pool.run(3, hsdp_workers.group_errors)):
        start = "params[1] of shape (4, 4): placement "
        assert partial.startswith(start + "P")
        assert partial.endswith("on mesh dim 0 is neither Shard nor Replicate: call redistribute on the tensor first")
        assert unknown.startswith(start)
        assert of_a_dim.startswith(start)
        if rank == 2:
            assert elsewhere.startswith("params[1] lives on ")
            assert elsewhere.endswith("which this rank is not part of: leave it out here")
        else:
            assert elsewhere == ""


def make_records(sizes: list[int]) -> list[ParamRecord]:
    return [ParamRecord(10 + place, torch.empty(size, device="meta")) for place, size in enumerate(sizes)]


@given(
    sizes=st.lists(st.integers(0, 50), max_size=12),
    grid=st.lists(st.integers(1, 3), max_size=3),
    order=st.randoms(use_true_random=False),
)
def test_owners_are_dealt_longest_first(sizes: list[int], grid: list[int], order: object) -> None:
    """Whoever has most would have less without its last and smallest: no other had fewer when that came."""
    records = make_records(sizes)
    owners = build_owner_by_size(records, grid)
    order.shuffle(records)  # type: ignore[attr-defined]
    assert build_owner_by_size(records, grid) == owners
    cells = list(product(*(range(size) for size in grid)))
    loads = dict.fromkeys(cells, 0)
    for size, place in sorted((-size, place) for place, size in enumerate(sizes)):
        least = min(cells, key=lambda cell: (loads[cell], cell))
        assert owners.pop(10 + place) == least
        loads[least] -= size
    assert owners == {}


@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6), replicas=st.integers(1, 3))
def test_no_owner_has_more_than_4_thirds_of_what_it_must(sizes: list[int], replicas: int) -> None:
    """Graham's bound for longest first, against the best of all assignments."""
    owners = build_owner_by_size(make_records(sizes), [replicas])
    loads = [0] * replicas
    for place, size in enumerate(sizes):
        loads[owners[10 + place][0]] += size
    best = min(
        max(sum(size for size, at in zip(sizes, places, strict=True) if at == cell) for cell in range(replicas))
        for places in product(range(replicas), repeat=len(sizes))
    )
    assert max(loads) <= math.ceil(best * (4 / 3 - 1 / (3 * replicas)))


def test_owners_need_a_grid() -> None:
    with pytest.raises(ValueError, match=r"replicate_sizes is \(2, 0\): every size must be at least 1"):
        build_owner_by_size(make_records([3]), [2, 0])


def test_missing_inputs_are_zeros_like_the_others(pool: Pool) -> None:
    case = Case((2,), ((3, 4), (4, 4), (1, 4)), ((0, 0, 1),))
    for rank, found in enumerate(pool.run(2, hsdp_workers.pad_inputs, case)):
        assert all(found["shapes"])
        assert found["dtypes"] == {
            "data": {torch.bfloat16},
            "records": {torch.bfloat16},
            "metadata": {torch.bfloat16},
            "none given": {torch.float32},
        }
        assert found["passed on"]
        assert found["zeros"]
        assert found["told"] == [(1, 2)] * 3
        assert found["shape"] == ((2 - rank, 4), (2, 4))
        assert found["errors"] == [
            "the input of comm_params[1] has shape (2, 3), but this rank's shard is (2, 4): give its own momentum",
            "the input of comm_params[1] is torch.bfloat16, but others are torch.float32: use one dtype",
        ]


@pytest.mark.parametrize(("cut", "shared"), [((0, 0, 1), True), ((0, 1, 1), False), ((0, 0, 2), False)])
def test_a_slice_is_a_view_where_it_is_contiguous(pool: Pool, cut: tuple[int, int, int], shared: bool) -> None:
    case = Case((2,), ((8, 4), (4, 8)), (cut,))
    assert pool.run(2, hsdp_workers.slice_is_view, case) == [[shared, shared]] * 2


def test_updates_that_do_not_fit_are_refused(pool: Pool) -> None:
    case = Case((2,), ((6, 2),), ((0, 0, 1),), (((1, 5),),))
    for rank, (part, part_by_rule, plain, by_rule) in enumerate(pool.run(2, hsdp_workers.slice_errors, case)):
        assert part == "global_update has shape (5, 2), but the parameter has (6, 2): pass the whole update"
        assert part_by_rule == part
        assert plain == "param is not a DTensor, so nothing tells its mesh: pass param_shard_meta"
        assert by_rule == (
            "this rank's slice has shape (3, 2), but its shard of the parameter of shape (6, 2) has "
            f"({5 if rank else 1}, 2): pass param_shard_meta, built since the shards last changed"
        )
