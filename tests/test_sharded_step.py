"""The sharded step against one process: the same bits on every mesh, and no byte more than the plan says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import muonshard
import same_bits
from benchmarks.counting import count_traffic
from pool import Pool
from same_bits import STACK, Shape

STEPS = 5
OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}


class Stack(nn.Module):
    """Matrices of the given shapes."""

    def __init__(self, shapes: tuple[Shape, ...]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(value) for value in same_bits.draw(shapes, seed=0))


def sharded(mesh: Shape, shapes: tuple[Shape, ...]) -> tuple[list[Tensor], dict[str, Any]]:
    """FSDP2 on a 1-D mesh, HSDP on a 2-D one."""
    model = Stack(shapes)
    fully_shard(model, mesh=same_bits.mesh_of(mesh))
    return list(model.parameters()), {}


def replicated(mesh: Shape, shapes: tuple[Shape, ...]) -> tuple[list[Tensor], dict[str, Any]]:
    """DTensors that every rank holds whole."""
    device_mesh = same_bits.mesh_of(mesh)
    return [same_bits.replicated(device_mesh, value) for value in same_bits.draw(shapes, seed=0)], {}


def data_parallel(mesh: Shape, shapes: tuple[Shape, ...]) -> tuple[list[Tensor], dict[str, Any]]:
    """Plain tensors, as under DistributedDataParallel."""
    return list(Stack(shapes).parameters()), {"process_group": dist.group.WORLD}


Layout = Callable[[Shape, tuple[Shape, ...]], tuple[list[Tensor], dict[str, Any]]]


@dataclass(frozen=True)
class Outcome:
    """What a rank saw: parameters whose bits differ, empty shards, and the traffic of the last step."""

    differing: list[int]
    empty: int
    bytes_sent: int
    collectives: int
    planned_bytes: int
    planned_payload: int
    planned_collectives: int
    bound: float


def run_layout(layout: Layout, mesh: Shape, shapes: tuple[Shape, ...], options: dict[str, Any]) -> Outcome:
    params, more = layout(mesh, shapes)
    expected = same_bits.reference(shapes, STEPS, **options)
    optimizer = muonshard.Muon(params, **options, **more)
    same_bits.train(params, shapes, STEPS - 1, optimizer)
    for param, grad in zip(params, same_bits.draw(shapes, seed=STEPS), strict=True):
        param.grad = same_bits.shard_like(grad, param)
    with count_traffic() as traffic:
        optimizer.step()
    return Outcome(
        differing=same_bits.differing(params, expected),
        empty=sum(same_bits.local(param).numel() == 0 for param in params),
        bytes_sent=traffic.bytes_sent,
        collectives=traffic.collectives,
        planned_bytes=optimizer.plan.bytes_sent,
        planned_payload=optimizer.plan.payload_bytes,
        planned_collectives=optimizer.plan.collectives,
        bound=optimizer.plan.bound_bytes,
    )


MESHES = [
    (sharded, (2,)),
    (sharded, (3,)),
    (sharded, (4,)),
    (sharded, (2, 2)),
    (sharded, (2, 4)),
    (data_parallel, (4,)),
    (replicated, (4,)),
    (replicated, (2, 2)),
]


@pytest.mark.parametrize(("layout", "mesh"), MESHES, ids=lambda value: getattr(value, "__name__", str(value)))
@pytest.mark.parametrize("bucket_bytes", [64 << 20, 1 << 12], ids=["one bucket", "many buckets"])
@pytest.mark.parametrize("exchange", ["owner", "allgather"])
def test_every_mesh_gives_the_bits_of_one_process(
    pool: Pool, layout: Layout, mesh: Shape, exchange: str, bucket_bytes: int
) -> None:
    world = int(torch.tensor(mesh).prod())
    options = OPTIONS | {"bucket_bytes": bucket_bytes, "exchange": exchange}
    outcomes = pool.run(world, run_layout, layout, mesh, STACK, options)
    assert [outcome.differing for outcome in outcomes] == [[]] * world
    for outcome in outcomes:
        assert outcome.bytes_sent == outcome.planned_bytes
        assert outcome.collectives == outcome.planned_collectives
    if exchange == "owner":
        assert sum(o.planned_payload for o in outcomes) <= sum(o.bound for o in outcomes)
    if layout is sharded and mesh[-1] > 3:
        assert any(outcome.empty for outcome in outcomes)


@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2), (2, 4)], ids=str)
def test_bytes_sent_are_the_formula_where_matrices_divide_evenly(pool: Pool, mesh: Shape) -> None:
    world = int(torch.tensor(mesh).prod())
    shapes = ((64, 32),) * (2 * world)
    outcomes = pool.run(world, run_layout, sharded, mesh, shapes, OPTIONS | {"exchange": "owner"})
    elements, shards, itemsize = 64 * 32 * 2 * world, mesh[-1], 2
    replicas = world // shards
    formula = itemsize * (2 * elements / world * (1 - 1 / shards) + elements / shards * (1 - 1 / replicas))
    assert [outcome.planned_payload for outcome in outcomes] == [formula] * world
    assert [outcome.bound for outcome in outcomes] == [formula] * world
    assert [outcome.bytes_sent - outcome.planned_bytes for outcome in outcomes] == [0] * world
