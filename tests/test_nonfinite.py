"""Matrices that are not finite: skipped, raised on every rank, or spread, as asked; decided by their owners."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import muonshard
import same_bits
from few_matrices import LR, SHAPES, WORLD, give, sharded, spoil
from pool import Pool
from same_bits import Shape, draw, local, shard_like


def raise_where_not_finite(mesh_shape: Shape) -> tuple[str, bool, list[int]]:
    """The error's text, whether the matrix at fault stayed as it was, and which others differ from skipping it."""
    mesh = same_bits.mesh_of(mesh_shape)
    rows = ((1, 6), (12, 8), (8, 4))
    params = sharded(mesh, draw(rows, seed=0))
    optimizer = muonshard.Muon([(f"weight {i}", param) for i, param in enumerate(params)], **LR, nonfinite="raise")
    grads = draw(rows, seed=1)
    grads[0][0, 0] = torch.inf
    for param, grad in zip(params, grads, strict=True):
        param.grad = shard_like(grad, param)
    with pytest.raises(FloatingPointError) as caught:
        optimizer.step()
    others = [nn.Parameter(value) for value in draw(rows, seed=0)]
    skipping = muonshard.Muon(others, **LR)
    for index, (param, grad) in enumerate(zip(others, grads, strict=True)):
        param.grad = grad if index else None
    skipping.step()
    untouched = torch.equal(local(params[0]), local(shard_like(draw(rows, seed=0)[0], params[0])))
    for param, grad in zip(params, draw(rows, seed=2), strict=True):
        param.grad = shard_like(grad, param)
    for param, grad in zip(others, draw(rows, seed=2), strict=True):
        param.grad = grad
    optimizer.step()
    skipping.step()
    return str(caught.value), untouched, same_bits.differing(params, [param.detach() for param in others])


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2), (2, 2, 2)], ids=str)
def test_all_ranks_raise_for_a_matrix_that_is_not_finite_also_those_that_hold_none_of_it(
    pool: Pool, mesh_shape: Shape
) -> None:
    world = int(torch.tensor(mesh_shape).prod())
    for text, untouched, differing in pool.run(world, raise_where_not_finite, mesh_shape):
        assert text.startswith("weight 0 became infinite or NaN")
        assert untouched
        assert differing == []


def raise_on_one_of_two_meshes() -> str:
    """Experts on pairs of ranks, dense weights on all: one expert is not finite."""
    rank = dist.get_rank()
    pairs = DeviceMesh("cpu", torch.arange(WORLD).view(2, 2), mesh_dim_names=("pair", "expert"))
    experts, dense = draw(((4, 3, 5), (8, 6)), seed=rank // 2)[0], draw(((8, 6),), seed=0)[0]
    params = [
        nn.Parameter(distribute_tensor(experts, pairs["expert"], [Shard(0)], src_data_rank=None)),
        nn.Parameter(distribute_tensor(dense, init_device_mesh("cpu", (WORLD,)), [Shard(0)], src_data_rank=None)),
    ]
    optimizer = muonshard.Muon([("experts", params[0]), ("dense", params[1])], **LR, nonfinite="raise")
    params[0].grad = torch.zeros_like(params[0])
    params[1].grad = torch.ones_like(params[1])
    if rank == 1:
        local(params[0].grad)[0, 0, 0] = torch.nan
    with pytest.raises(FloatingPointError) as caught:
        optimizer.step()
    return str(caught.value)


def test_ranks_of_another_mesh_hear_of_it_in_the_same_step(pool: Pool) -> None:
    texts = pool.run(WORLD, raise_on_one_of_two_meshes)
    assert all(text.startswith("experts became infinite or NaN") for text in texts[:2])
    assert all("another mesh became infinite or NaN" in text for text in texts[2:])


def spread_not_a_number() -> list[bool]:
    params = sharded(same_bits.mesh_of((WORLD,)), draw(SHAPES, seed=0))
    optimizer = muonshard.Muon(params, **LR)
    give(params, 0)
    spoil(params, [0])
    optimizer.step()
    return [bool(local(param).isfinite().all()) for param in params]


def test_by_default_what_is_not_finite_spreads_over_its_own_matrix_alone(pool: Pool) -> None:
    assert pool.run(WORLD, spread_not_a_number) == [[False, True, True, True, True]] * WORLD
