"""What the fused gather costs, reuses and refuses; round trips of drawn layouts are in test_hsdp_round_trip.py."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

import hsdp_workers
from hsdp_cases import Case, Shape
from muonshard.hsdp.types import make_stage
from muonshard.hsdp.wire import make_stage_wire
from pool import Pool

GRID = Case((2, 2), ((5, 3), (1, 1), (4, 6)), ((0, 0, 1), (1, 1, 1)))


def test_only_outputs_are_allocated_for_each_tensor_and_one_copy_packs(pool: Pool) -> None:
    """One foreach copy for each pack and unpack; a second call with the cache allocates the outputs and no more."""
    many = Case((2, 2), ((5, 3),) * 7, ((0, 0, 1), (1, 1, 1)))
    moves = {"aten::_foreach_copy_", "aten::as_strided", "aten::slice.Tensor", "aten::view.dtype", "aten::detach"}
    for first, second, places, apart in pool.run(4, hsdp_workers.gather_operators, many):
        calls = Counter(second)
        assert calls["aten::_foreach_copy_"] == 3
        assert calls["aten::new_empty"] == 7
        gathers = {name for name in calls if name.startswith("c10d::")}
        assert set(calls) - gathers == moves | {"aten::new_empty"}
        assert Counter(first) - calls == Counter({"aten::empty.memory_format": 2})
        assert places[0] == places[1]
        assert apart


def test_buffers_are_reused_when_large_enough_and_grow_when_not(pool: Pool) -> None:
    small = Case((2,), ((4, 4),), ((0, 0, 1),))
    large = Case((2,), ((4, 4), (64, 64)), ((0, 0, 1),))
    half = Case((2,), ((64, 64),), ((0, 0, 1),), dtype="bfloat16")
    for sizes in pool.run(2, hsdp_workers.cache_sizes, [small, large, small, half]):
        packed = 2 * (512 + 64 * 32 * 4)
        assert sizes == [[2 * 512], [packed], [packed], [packed]]


def test_two_buffers_serve_any_number_of_axes(pool: Pool) -> None:
    case = Case((2, 2, 2), ((3, 5, 2), (2, 2, 2)), ((0, 0, 1), (1, 1, 1), (2, 2, 1)))
    for sizes in pool.run(8, hsdp_workers.cache_sizes, [case, case]):
        assert sizes[0] == sizes[1] == [2 * 1024, 2 * 1024]


def test_shards_may_be_views(pool: Pool) -> None:
    assert all(pool.run(4, hsdp_workers.gather_views, GRID))


@pytest.mark.parametrize(
    "cuts",
    [((0, 0, 1), (1, 0, 1)), ((1, 0, 1), (0, 0, 1)), ((0, 1, 1), (1, 0, 1)), ((1, 1, 1),), ((0, 0, 3), (1, 1, 1))],
)
def test_shards_that_are_all_alike_need_no_metadata(pool: Pool, cuts: tuple[tuple[int, int, int], ...]) -> None:
    case = Case((2, 2), ((12, 4), (24, 8)), cuts)
    assert all(pool.run(4, hsdp_workers.gather_without_metadata, case))


@pytest.mark.parametrize(("mesh_shape", "placements"), [((4,), [Replicate()]), ((4, 1), [Replicate(), Shard(0)])])
def test_no_axis_of_several_ranks_means_no_communication(
    pool: Pool, mesh_shape: Shape, placements: list[Shard | Replicate]
) -> None:
    for collectives, same, kept, none in pool.run(4, hsdp_workers.gather_nothing, mesh_shape, placements):
        assert (collectives, same, kept, none) == (0, True, True, [])


def test_no_tensors_mean_no_communication(pool: Pool) -> None:
    assert pool.run(4, hsdp_workers.gather_none, GRID) == [([], 0)] * 4


def test_what_a_rank_sends_lies_where_it_will_be_received(pool: Pool) -> None:
    """So there is one buffer for each axis, and backends that gather in place need not copy."""
    for axes in pool.run(4, hsdp_workers.sends_in_place, GRID):
        assert len(axes) == 2
        for offset, size, rank in axes:
            assert offset == rank * size


def test_results_stay_outside_autograd(pool: Pool) -> None:
    for found in pool.run(2, hsdp_workers.outside_autograd, Case((2,), ((4, 3), (3, 3)), ((0, 0, 1),))):
        assert found == [False] * 6


@given(
    shapes=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=6),
    itemsize=st.sampled_from([1, 2, 4, 8, 16]),
)
def test_tensors_lie_apart_on_the_wire_from_multiples_of_512_bytes_on(shapes: list[Shape], itemsize: int) -> None:
    metas = [make_stage(0, 1, [(rows // 2, columns), (rows, columns)], 1) for rows, columns in shapes]
    stage = make_stage_wire(None, metas, itemsize)  # type: ignore[arg-type]
    ends = [*stage.offsets[1:], stage.stride]
    for (rows, columns), offset, end in zip(shapes, stage.offsets, ends, strict=False):
        assert offset * itemsize % 512 == 0
        assert offset + rows * columns <= end
        assert (end - offset) * itemsize < rows * columns * itemsize + 512 or end * itemsize == 512
    assert stage.stride * itemsize % 512 == 0
    assert stage.stride > 0
    assert [*stage.offsets[:1]] == [0] * bool(shapes)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("dtype", ["local_tensors[2] is torch.float64 on cpu", "local_tensors[0] is torch.float32", "one dtype"]),
        ("first dtype", ["local_tensors[1] is torch.float32 on cpu", "local_tensors[0] is torch.float64 on cpu"]),
        ("device", ["local_tensors[2] is torch.float32 on meta", "one device"]),
        ("ndim", ["local_tensors[2] has shape (1, ", "tensors with 2 dims"]),
        ("groups", ["shard_pgs has 1 groups", "has 2 shard axes"]),
        ("kept", ["keep_indices has [-1, 3]", "3 local_tensors"]),
        ("fewer metadata", ["param_shard_metadata has 2 entries for 3 local_tensors"]),
        ("shape", ["local_tensors[2] has shape (2, 2)", "metadata says (2, 3)"]),
        ("other metadata", ["local_tensors[0]", "this rank) ()", "layout_spec and shard_pgs say ((0, 2, "]),
    ],
)
def test_arguments_that_do_not_fit_are_refused_on_every_rank_before_any_collective(
    pool: Pool, change: str, said: list[str]
) -> None:
    for message, collectives in pool.run(4, hsdp_workers.gather_error, GRID, change):
        assert all(part in message for part in said), message
        assert collectives == 0


def test_a_rank_with_the_wrong_shape_is_told_before_any_collective(pool: Pool) -> None:
    found = pool.run(4, hsdp_workers.gather_error, GRID, "one rank's shape")
    assert found[1] == (
        "local_tensors[2] has shape (2, 2), but its metadata says (2, 3): "
        "pass this rank's whole shard, or build the metadata again if the shards have changed",
        0,
    )


def test_a_split_factor_that_leaves_unlike_shards_needs_metadata(pool: Pool) -> None:
    said = "a shard of shape (1, 2) cannot be the same on all 2 ranks with split factor 3: pass param_shard_metadata"
    assert pool.run(2, hsdp_workers.strided_without_metadata, 3) == [said] * 2


def test_tensors_of_other_libraries_count_as_dtensors_and_may_count_dims_from_the_end(pool: Pool) -> None:
    for found in pool.run(4, hsdp_workers.other_librarys_tensors, GRID):
        assert all(found)
