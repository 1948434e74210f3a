"""Gathering gives whole tensors and slicing gives the shards back, bit for bit, on real groups and any layout."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hsdp_workers
from hsdp_cases import (
    MESHES,
    Case,
    Shape,
    coordinates,
    cut_tensor,
    local_tensor,
    ordered_cases,
    strided_cases,
    uneven_cases,
    whole_tensor,
)
from muonshard.hsdp import ParamLayoutSpec, ParamShardMeta
from muonshard.hsdp.types import StridedParamLayoutSpec
from pool import Pool


@pytest.fixture(scope="module", params=MESHES, ids=str)
def mesh_shape(request: pytest.FixtureRequest) -> Shape:
    """One mesh after another, so that process groups are formed once for each."""
    return request.param


def check_metadata(case: Case, place: int, coordinate: Shape, meta: ParamShardMeta) -> None:
    """Every stage tells what the ranks of its axis hold after the cuts that are not yet undone."""
    shape, local = case.shapes[place], local_tensor(case, place, coordinate).shape
    assert (meta.global_shape, meta.global_numel) == (shape, math.prod(shape))
    assert (meta.local_shape, meta.local_numel) == (local, local.numel())
    assert len(meta.stage_metas) == len(case.cuts)
    left = list(range(len(case.cuts)))
    for cut, stage in zip(case.gather_order(), meta.stage_metas, strict=True):
        mesh_dim, dim, _ = case.cuts[cut]
        ranks = range(case.mesh_shape[mesh_dim])
        peers = [(*coordinate[:mesh_dim], rank, *coordinate[mesh_dim + 1 :]) for rank in ranks]
        shapes = [tuple(cut_tensor(case, place, whole_tensor(case, place), peer, left).shape) for peer in peers]
        assert (stage.tensor_dim, stage.shard_size) == (dim, len(ranks))
        assert stage.cur_rank_in_shard_group == coordinate[mesh_dim]
        assert stage.rank_shapes == tuple(shapes)
        assert stage.split_sizes == tuple(shape[dim] for shape in shapes)
        assert stage.pad_shape == tuple(max(sizes) for sizes in zip(*shapes, strict=True))
        left.remove(cut)


def check_round_trip(case: Case, found: list[dict[str, Any]]) -> None:
    cutting = [mesh_dim for mesh_dim, _, _ in case.cuts]
    order = [case.cuts[cut][:2] for cut in case.gather_order()]
    strided = any(factor != 1 for _, _, factor in case.cuts)
    replicas = tuple(dim for dim in range(len(case.mesh_shape)) if dim not in cutting)
    wire = {"all": len(order), "gathers": len(order)} if order else {}
    for coordinate, rank in zip(coordinates(case), found, strict=True):
        count = len(case.shapes)
        assert rank["whole"] == [True] * count
        assert rank["slices"] == [True] * count
        assert all(rank["by rule"])
        assert all(rank["torch"])
        assert rank["kept"] == [True if place in case.keep else None for place in range(count)]
        assert rank["collectives"] == (wire, wire)
        layout = ParamLayoutSpec(case.ndim, tuple(order), replicas)
        if strided:
            factors = tuple(case.cuts[cut][2] for cut in case.gather_order())
            layout = StridedParamLayoutSpec(case.ndim, tuple(order), replicas, factors)
        assert rank["layout"] == layout
        assert rank["key"].mesh_shape == case.mesh_shape
        assert rank["key"].mesh_rank_list == tuple(range(case.world))
        assert (rank["key"].replicate_mesh_dims, rank["key"].shard_mesh_dims) == (replicas, tuple(sorted(cutting)))
        sizes = [case.mesh_shape[mesh_dim] for mesh_dim, _ in order], [case.mesh_shape[dim] for dim in replicas]
        assert rank["group sizes"] == list(sizes)
        assert rank["on records"] == rank["metadata"]
        for place, meta in enumerate(rank["metadata"]):
            check_metadata(case, place, coordinate, meta)


@settings(max_examples=40)
@given(data=st.data())
def test_any_order_of_cuts_is_undone_and_made_again(pool: Pool, mesh_shape: Shape, data: st.DataObject) -> None:
    case = data.draw(ordered_cases(mesh_shape))
    check_round_trip(case, pool.run(case.world, hsdp_workers.round_trip, case, True))


@settings(max_examples=20)
@given(data=st.data())
def test_shards_of_any_sizes_are_gathered_as_they_really_are(
    pool: Pool, mesh_shape: Shape, data: st.DataObject
) -> None:
    case = data.draw(uneven_cases(mesh_shape))
    check_round_trip(case, pool.run(case.world, hsdp_workers.round_trip, case, False))


@settings(max_examples=20)
@given(data=st.data())
def test_strided_cuts_that_no_order_explains_are_interleaved(
    pool: Pool, mesh_shape: Shape, data: st.DataObject
) -> None:
    case = data.draw(strided_cases(mesh_shape))
    assert all(all(rank) for rank in pool.run(case.world, hsdp_workers.as_torch_says, case))
    once = len({dim for _, dim, _ in case.cuts}) == len(case.cuts)  # torch's own scrambles two such cuts of one dim
    check_round_trip(case, pool.run(case.world, hsdp_workers.round_trip, case, once))
