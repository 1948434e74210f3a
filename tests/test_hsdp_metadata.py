"""Metadata of shards: real ones from FSDP2 over tensor parallel, broken ones, and what is logged of them."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import hsdp_workers
from hsdp_cases import Case, Shape
from muonshard import hsdp
from pool import Pool

COLUMN, ROW = 0, 1


@pytest.mark.parametrize(
    ("mesh_shape", "names"), [((2, 2), ("dp", "tp")), ((3, 2), ("dp", "tp")), ((2, 2, 2), ("rep", "dp", "tp"))], ids=str
)
def test_shards_of_fsdp2_over_tensor_parallel_are_put_together_as_they_were_cut(
    pool: Pool, mesh_shape: Shape, names: tuple[str, ...]
) -> None:
    """Of 7 or 13 rows over (3, 2) ranks FSDP2 holds other shards than its placements say: the real ones count."""
    rows = [4, 1, 7, 3, 13, 5]
    sizes = [(outer, 6, COLUMN) for outer in rows] + [(6, outer, ROW) for outer in rows]
    for found in pool.run(
        torch.Size(mesh_shape).numel(), hsdp_workers.fsdp_over_tensor_parallel, mesh_shape, names, sizes
    ):
        dp = len(mesh_shape) - 2
        assert [index for index, *_ in found] == list(range(len(sizes)))
        for index, axes, good in found:
            assert axes == ((dp, 0), (dp + 1, sizes[index][2]))
            assert good == [True] * 4


Shapes = dict[Shape, Shape]


@pytest.mark.parametrize(
    ("mesh_shape", "placements", "locals_", "shape", "reason"),
    [
        ((2,), [Shard(0)], {(0,): (2, 3), (1,): (2, 2)}, (4, 3), "do not fit together"),
        ((2,), [Shard(1)], {(0,): (3, 2), (1,): (2, 2)}, (3, 4), "do not fit together"),
        ((2,), [Shard(0)], {(0,): (2, 3), (1,): (1, 3)}, (4, 3), "together make up (3, 3)"),
        ((2,), [Replicate()], {(0,): (2, 3), (1,): (2, 3)}, (4, 3), "together make up (2, 3)"),
        ((2,), [_StridedShard(0, split_factor=3)], {(0,): (4, 3), (1,): (2, 3)}, (6, 3), "as its split factor says"),
        (  # wrong among the ranks of mesh coordinate (_, 1) alone: all are told
            (2, 2),
            [Shard(0), Shard(1)],
            {(0, 0): (2, 2), (1, 0): (2, 2), (0, 1): (2, 2), (1, 1): (2, 1)},
            (4, 4),
            "do not fit together",
        ),
        (
            (2, 2),
            [Shard(1), Shard(0)],
            {(0, 0): (2, 2), (1, 0): (2, 2), (0, 1): (1, 2), (1, 1): (3, 2)},
            (4, 4),
            "do not fit together",
        ),
        (
            (2, 2),
            [_StridedShard(0, split_factor=3), Shard(1)],
            {(0, 0): (4, 2), (1, 0): (2, 2), (0, 1): (4, 2), (1, 1): (2, 2)},
            (6, 4),
            "as its split factor says",
        ),
        (  # where torch cuts left to right, but can only gather right to left
            (3, 2),
            [_StridedShard(0, split_factor=2), Shard(0)],
            {(0, 0): (2, 1), (0, 1): (1, 1), (1, 0): (2, 1), (1, 1): (1, 1), (2, 0): (1, 1), (2, 1): (0, 1)},
            (7, 1),
            "were cut left to right",
        ),
    ],
)
def test_shards_that_do_not_make_up_the_parameter_are_an_error_on_every_rank(
    pool: Pool, mesh_shape: Shape, placements: list[Placement], locals_: Shapes, shape: Shape, reason: str
) -> None:
    world = torch.Size(mesh_shape).numel()
    for message in pool.run(world, hsdp_workers.metadata_error, mesh_shape, placements, locals_, shape):
        assert message.startswith(f"parameter 1 of global shape {shape} and placements (")
        assert reason in message


def test_metadata_of_a_plain_tensor_has_no_stages() -> None:
    tensor = torch.zeros(3, 4)
    key = hsdp.CommDomainKey((1,), (0,), (0,), ())
    group = hsdp.HSDPCommGroup(key, hsdp.ParamLayoutSpec(2, (), (0,)))
    group.add_param(5, tensor)
    metadata = hsdp.build_param_shard_metadata_for_group(group)
    assert metadata == {tensor: hsdp.ParamShardMeta((3, 4), 12, (3, 4), 12, ())}
    assert metadata[tensor] == hsdp.make_param_shard_meta(tensor, [])
    assert [(record.index, record.shard_meta) for record in group.records] == [(5, metadata[tensor])]


def test_metadata_travels_on_the_device_of_the_mesh(pool: Pool) -> None:
    case = Case((2,), ((4, 4),), ((0, 0, 1),))
    assert pool.run(2, hsdp_workers.metadata_device, case) == [["meta", "meta"]] * 2


def test_metadata_of_no_parameters_is_empty_and_silent(pool: Pool) -> None:
    assert pool.run(2, hsdp_workers.metadata_of_nothing) == [({}, 0)] * 2


def test_the_log_tells_all_local_shapes_on_rank_0_alone(pool: Pool) -> None:
    case = Case((3, 2), ((7, 5), (4, 2)), ((1, 0, 1), (0, 0, 1)))
    first, *others = pool.run(6, hsdp_workers.log_lines, case, logging.DEBUG)
    placements = "placements (_StridedShard(dim=0, sf=2), Shard(dim=0)), mesh (3, 2)"
    assert first == [
        (
            "muonshard.hsdp.metadata",
            logging.DEBUG,
            f"parameter 0: {placements}, global shape (7, 5), local shapes [(2, 5), (1, 5), (0, 5)]",
        ),
        (
            "muonshard.hsdp.metadata",
            logging.DEBUG,
            f"parameter 1: {placements}, global shape (4, 2), local shapes [(1, 2), (0, 2)]",
        ),
    ]
    assert others == [[]] * 5


def test_the_log_tells_the_real_shapes_of_uneven_and_strided_shards(pool: Pool) -> None:
    uneven = Case((2, 2), ((7, 5),), ((0, 0, 1), (1, 1, 1)), (((1, 6), (5, 0)),))
    assert pool.run(4, hsdp_workers.log_lines, uneven, logging.DEBUG)[0][0][2].endswith(
        "local shapes [(6, 5), (6, 0), (1, 5), (1, 0)]"
    )
    strided = Case((2,), ((7, 5),), ((0, 0, 3),))
    assert pool.run(2, hsdp_workers.log_lines, strided, logging.DEBUG)[0][0][2].endswith(
        "local shapes [(5, 5), (2, 5)]"
    )


def test_nothing_is_logged_or_looked_up_above_debug(pool: Pool) -> None:
    group = hsdp.HSDPCommGroup(hsdp.CommDomainKey((), (), (), ()), hsdp.ParamLayoutSpec(2, (), ()))
    group.add_param(0, torch.zeros(2, 2))
    assert hsdp_workers.captured_log(group, {}, logging.INFO) == []
    assert pool.run(2, hsdp_workers.log_lines, Case((2,), ((4, 4),), ((0, 0, 1),)), logging.INFO) == [[], []]


def test_a_single_process_logs_too_and_uses_the_name_a_parameter_has() -> None:
    class Named:
        name = "layers.0.weight"
        shape = (2, 2)

    named = Named()
    group = hsdp.HSDPCommGroup(hsdp.CommDomainKey((), (), (), ()), hsdp.ParamLayoutSpec(2, (), ()))
    group.add_param(0, named)  # type: ignore[arg-type]
    metadata = {named: hsdp.ParamShardMeta((2, 2), 4, (2, 2), 4, ())}
    [(_, _, line)] = hsdp_workers.captured_log(group, metadata, logging.DEBUG)
    assert line == "layers.0.weight: placements None, mesh (), global shape (2, 2), local shapes [(2, 2)]"
