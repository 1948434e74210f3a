"""Copies of a shard that are no longer the same are found, and named on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import muonshard
import same_bits
from pool import Pool
from same_bits import Shape
from test_sharded_step import Layout, data_parallel, replicated, sharded

SHAPES = ((9, 6), (16, 8), (3, 5))
MESHES = [(sharded, (2, 2)), (sharded, (2, 3)), (replicated, (2, 2)), (data_parallel, (4,))]
MESH_NAMES = ["HSDP 2x2", "HSDP 2x3", "replicated 2x2", "DDP 4"]


def check(layout: Layout, mesh: Shape, spoilt: str, rank: int) -> str:
    """What `check_replicas` says after two steps, if the last parameter but one is spoilt on one rank."""
    params, more = layout(mesh, SHAPES)
    groups = [
        {"params": [("first", params[0]), ("second", params[1])]},
        {"params": [("third", params[2])], "algorithm": "adamw"},
    ]
    optimizer = muonshard.Muon(groups, lr=0.02, **more)
    same_bits.train(params, SHAPES, 2, optimizer)
    optimizer.check_replicas()
    if dist.get_rank() == rank and spoilt:
        part = same_bits.local(
            {
                "weights": params[1],
                "momentum_buffer": optimizer.state[params[1]]["momentum_buffer"],
                "exp_avg": optimizer.state[params[2]].get("exp_avg"),
            }[spoilt]
        )
        bits = part.view(torch.int32).flatten()
        bits[-1] ^= 1
    try:
        optimizer.check_replicas()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("layout", "mesh"), MESHES, ids=MESH_NAMES)
@pytest.mark.parametrize(
    ("spoilt", "name"), [("weights", "second"), ("momentum_buffer", "second"), ("exp_avg", "third")], ids=str
)
def test_one_bit_on_one_rank_is_found_and_named_on_all(
    pool: Pool, layout: Layout, mesh: Shape, spoilt: str, name: str
) -> None:
    world = int(torch.tensor(mesh).prod())
    (said,) = set(pool.run(world, check, layout, mesh, spoilt, 1))
    assert said.startswith(f"replicas of {name} differ in {spoilt}: rank")
    assert "rank 1" in said


@pytest.mark.parametrize(("layout", "mesh"), [*MESHES, (sharded, (4,))], ids=[*MESH_NAMES, "FSDP 4"])
def test_nothing_is_said_of_copies_that_are_equal_nor_where_there_are_none(
    pool: Pool, layout: Layout, mesh: Shape
) -> None:
    world = int(torch.tensor(mesh).prod())
    assert set(pool.run(world, check, layout, mesh, "", 0)) == {""}


def not_a_number() -> str:
    params, more = data_parallel((4,), SHAPES)
    optimizer = muonshard.Muon(params, lr=0.02, **more)
    with torch.no_grad():
        params[0][0, 0] = float("nan")
        params[1][0, 0] = -0.0 if dist.get_rank() == 3 else 0.0
    with pytest.raises(RuntimeError) as caught:
        optimizer.check_replicas()
    return str(caught.value)


def test_bits_are_compared_and_not_values(pool: Pool) -> None:
    for said in pool.run(4, not_a_number):
        assert "parameter 1 of group 0 differ in weights: ranks 0, 1, 2, other than rank 3" in said
