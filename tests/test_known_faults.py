"""Faults found in other sharded Muons, each of which gave wrong weights, a refusal or a hang there.

References are the textbook: one step without momentum is W <- (1 - lr decay) W - lr sqrt(max(1, rows / cols)) U V^T,
with G = U S V^T in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import muonshard
import same_bits
from layout_cases import polar, unit_rows
from pool import Pool
from same_bits import Shape, draw, local, shard_like

WORLD = 4
LR, DECAY = 0.1, 0.05
EXACT = {"lr": LR, "weight_decay": DECAY, "momentum": 0.0, "nesterov": False, "exchange_dtype": torch.float32}
"""Options under which a step is the textbook's; give `orthogonalize=polar` too."""


def textbook(weight: Tensor, grad: Tensor) -> Tensor:
    """A (rows, cols) matrix after one step."""
    u, _, vh = torch.linalg.svd(grad.double(), full_matrices=False)
    ratio = math.sqrt(max(1, weight.shape[0] / weight.shape[1]))
    return (1 - LR * DECAY) * weight.double() - LR * ratio * (u @ vh)


def cut(value: Tensor, mesh: DeviceMesh, *placements: Replicate | Shard) -> nn.Parameter:
    """A parameter that holds this rank's part of a whole tensor."""
    return nn.Parameter(distribute_tensor(value, mesh, placements, src_data_rank=None))


def farthest(params: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference between this rank's shards and those of whole tensors."""
    pairs = [
        (local(param), local(shard_like(value.to(param.dtype), param)))
        for param, value in zip(params, expected, strict=True)
    ]
    return max((float((a - b).abs().max()) for a, b in pairs if a.numel()), default=0.0)


def one_gradient_missing_on_each_rank() -> list[int]:
    """Two weights of one shape; rank 1 lacks a gradient of the first, rank 2 of the second: as many on each."""
    mesh = init_device_mesh("cpu", (WORLD,))
    shapes = ((8, 6), (8, 6))
    params = [cut(value, mesh, Shard(0)) for value in draw(shapes, seed=0)]
    alone = [nn.Parameter(value) for value in draw(shapes, seed=0)]
    optimizer, reference = muonshard.Muon(params, lr=LR), muonshard.Muon(alone, lr=LR)
    for step in range(1, 4):
        for index, grad in enumerate(draw(shapes, seed=step)):
            missing = dist.get_rank() == index + 1
            params[index].grad = None if missing else shard_like(grad, params[index])
            alone[index].grad = grad.clone()
            alone[index].grad[2 * (index + 1) : 2 * (index + 2)] = 0
        optimizer.step()
        reference.step()
    return same_bits.differing(params, [param.detach() for param in alone])


def test_a_gradient_missing_on_one_rank_spoils_no_other_parameter(pool: Pool) -> None:
    assert pool.run(WORLD, one_gradient_missing_on_each_rank) == [[]] * WORLD


def partial_gradient() -> tuple[str, float]:
    mesh = init_device_mesh("cpu", (WORLD,))
    weight, total = draw(((8, 6), (8, 6)), seed=0)
    param = cut(weight.clone(), mesh, Replicate())
    optimizer = muonshard.Muon([("weight", param)], **EXACT, orthogonalize=polar)
    mine = total if dist.get_rank() == 0 else torch.zeros_like(total)
    param.grad = DTensor.from_local(mine, mesh, [Partial()])
    with pytest.raises(ValueError, match=r"weight has placements .*Partial.*redistribute") as caught:
        optimizer.step()
    param.grad = param.grad.redistribute(mesh, [Replicate()])
    optimizer.step()
    return type(caught.value).__name__, farthest([param], [textbook(weight, total)])


def test_partial_gradients_are_refused_until_they_are_summed(pool: Pool) -> None:
    for error, difference in pool.run(WORLD, partial_gradient):
        assert error == "ValueError"
        assert difference < 1e-5


def two_convolutions() -> float:
    mesh = init_device_mesh("cpu", (WORLD,))
    shapes = ((8, 3, 3, 3), (8, 3, 3, 3))
    weights, grads = draw(shapes, seed=0), draw(shapes, seed=1)
    params = [cut(weight.clone(), mesh, Shard(0)) for weight in weights]
    optimizer = muonshard.Muon([{"params": params, "flatten": True}], **EXACT, orthogonalize=polar)
    for param, grad in zip(params, grads, strict=True):
        param.grad = shard_like(grad, param)
    optimizer.step()
    expected = [textbook(weight.flatten(1), grad.flatten(1)) for weight, grad in zip(weights, grads, strict=True)]
    return farthest(params, [matrix.view(shapes[0]) for matrix in expected])


def test_convolutions_of_one_shape_are_flattened_one_by_one(pool: Pool) -> None:
    assert max(pool.run(WORLD, two_convolutions)) < 1e-5


class Pair(nn.Module):
    """Two layers, of which tensor parallel cuts the first by rows and the second by columns."""

    def __init__(self, width: int, middle: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, middle, bias=False), nn.Linear(middle, width, bias=False)


def fsdp_over_tensor_parallel(mesh_shape: Shape, width: int, middle: int) -> float:
    """How far from the textbook this rank's shards are."""
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("data", "tensor"))
    weights, grads = (draw(((middle, width), (width, middle)), seed=seed) for seed in (0, 1))
    model = Pair(width, middle)
    for param, value in zip(model.parameters(), weights, strict=True):
        param.data.copy_(value)
    parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    params = list(model.parameters())
    optimizer = muonshard.Muon(model.named_parameters(), **EXACT, orthogonalize=polar)
    for param, grad in zip(params, grads, strict=True):
        param.grad = as_sharded(grad, param, mesh)
    optimizer.step()
    expected = [textbook(weight, grad) for weight, grad in zip(weights, grads, strict=True)]
    differences = [
        (local(param) - local(as_sharded(value, param, mesh))).abs().max()
        for param, value in zip(params, expected, strict=True)
        if local(param).numel()
    ]
    return float(max(differences, default=0.0))


def as_sharded(whole: Tensor, param: Tensor, mesh: DeviceMesh) -> DTensor:
    """A whole tensor as FSDP2 over tensor parallel cuts it: by the tensor axis, then each part by the data axis."""
    assert isinstance(param, DTensor)
    data, tensor = mesh.get_coordinate() or (0, 0)
    part = chunk(whole, mesh.size(1), tensor, param.placements[1].dim)
    part = chunk(part, mesh.size(0), data, param.placements[0].dim)
    return DTensor.from_local(
        part.contiguous(), mesh, param.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def chunk(whole: Tensor, parts: int, index: int, dim: int) -> Tensor:
    pieces = whole.chunk(parts, dim)
    return pieces[index] if index < len(pieces) else whole.narrow(dim, 0, 0)


@pytest.mark.parametrize(
    ("mesh_shape", "width", "middle"), [((2, 2), 6, 8), ((2, 2), 5, 7), ((4, 2), 17, 9), ((2, 4), 6, 5)], ids=str
)
def test_fsdp_over_tensor_parallel_on_one_dim_is_exact(pool: Pool, mesh_shape: Shape, width: int, middle: int) -> None:
    outcomes = pool.run(math.prod(mesh_shape), fsdp_over_tensor_parallel, mesh_shape, width, middle)
    assert max(outcomes) < 1e-5


def uneven_rows(shape: Shape) -> list[int]:
    params = [cut(value, init_device_mesh("cpu", (WORLD,)), Shard(0)) for value in draw((shape,), seed=0)]
    optimizer = muonshard.Muon(params, lr=LR)
    same_bits.train(params, (shape,), 3, optimizer)
    return same_bits.differing(params, same_bits.reference((shape,), 3, lr=LR))


@pytest.mark.parametrize("shape", [(5, 6), (6, 7), (9, 10)], ids=str)
def test_rows_are_not_padded_to_divide_which_would_make_a_wide_matrix_tall(pool: Pool, shape: Shape) -> None:
    assert pool.run(WORLD, uneven_rows, shape) == [[]] * WORLD


def split_across_shards() -> tuple[float, int]:
    """Blocks of 5, 3 and 4 rows on shards of 3: how far from the textbook, and the bytes that two whole ones save."""
    mesh = init_device_mesh("cpu", (WORLD,))
    (weight,), (grad,) = draw(((12, 4),), seed=0), draw(((12, 4),), seed=1)
    param = cut(weight.clone(), mesh, Shard(0))
    group = {"params": [param], "splits": [5, 3, 4]}
    optimizer = muonshard.Muon([group], **EXACT, orthogonalize=polar, exchange="owner")
    param.grad = shard_like(grad, param)
    optimizer.step()
    blocks = zip(weight.split([5, 3, 4]), grad.split([5, 3, 4]), strict=True)
    return farthest([param], [torch.cat([textbook(*block) for block in blocks])]), optimizer.plan.payload_bytes


def test_a_split_that_crosses_a_shards_edge_has_the_learning_rate_of_its_own_shape(pool: Pool) -> None:
    outcomes = pool.run(WORLD, split_across_shards)
    assert max(difference for difference, _ in outcomes) < 1e-5
    least = 2 * (2 + 1 + 1) * 4 * 4  # there and back, float32: the smaller parts of the three blocks, in rows of four
    assert sum(payload for _, payload in outcomes) == least


def dense_and_experts() -> tuple[float, list[Shape]]:
    """Dense weights on all ranks, experts on two axes of another mesh: how far from the textbook, and what is held."""
    every, pairs = init_device_mesh("cpu", (WORLD,)), DeviceMesh("cpu", torch.arange(WORLD).view(2, 2))
    shapes = ((7, 6), (4, 6, 5))
    weights, grads = draw(shapes, seed=0), draw(shapes, seed=1)
    params = [cut(weights[0].clone(), every, Shard(0)), cut(weights[1].clone(), pairs, Shard(1), Shard(0))]
    optimizer = muonshard.Muon(params, **EXACT, orthogonalize=polar)
    for param, grad in zip(params, grads, strict=True):
        param.grad = shard_like(grad, param)
    optimizer.step()
    experts = torch.stack([textbook(*expert) for expert in zip(weights[1], grads[1], strict=True)])
    held = [tuple(local(param).shape) for param in params]
    return farthest(params, [textbook(weights[0], grads[0]), experts]), held


def test_dense_and_expert_parameters_may_live_on_different_meshes(pool: Pool) -> None:
    outcomes = pool.run(WORLD, dense_and_experts)
    assert max(difference for difference, _ in outcomes) < 1e-5
    assert all(held[1] == (2, 3, 5) for _, held in outcomes)


def many_shapes() -> list[int]:
    shapes = tuple((3 + index, 20 - index) for index in range(12))
    params = [cut(value, init_device_mesh("cpu", (2,)), Shard(0)) for value in draw(shapes, seed=0)]
    optimizer = muonshard.Muon(params, lr=LR)
    with torch.compiler.set_stance("fail_on_recompile"):
        same_bits.train(params, shapes, 2, optimizer)
    return same_bits.differing(params, same_bits.reference(shapes, 2, lr=LR))


def test_a_dozen_shapes_recompile_nothing(pool: Pool) -> None:
    assert pool.run(2, many_shapes) == [[]] * 2


def columns_cut(dim: int) -> float:
    mesh = init_device_mesh("cpu", (WORLD,))
    (weight,), (grad,) = draw(((6, 9),), seed=0), draw(((6, 9),), seed=1)
    param = cut(weight.clone(), mesh, Shard(dim))
    optimizer = muonshard.Muon([param], **EXACT, orthogonalize=unit_rows)
    param.grad = shard_like(grad, param)
    optimizer.step()
    update = grad.double() / grad.double().norm(dim=1, keepdim=True)
    return farthest([param], [(1 - LR * DECAY) * weight.double() - LR * update])


def test_the_norm_of_a_neuron_is_that_of_its_whole_row(pool: Pool) -> None:
    assert max(pool.run(WORLD, columns_cut, 1)) < 1e-6


def works_left_over(mesh_shape: Shape) -> list[bool]:
    """Whether each exchange of a step was over when the step was."""
    works: list[dist.Work] = []
    deal, spread = dist.all_to_all_single, dist.batch_isend_irecv

    def dealt(*args: object, **options: object) -> dist.Work:
        works.append(deal(*args, **options))  # type: ignore[arg-type]
        return works[-1]

    def spreading(operations: list[dist.P2POp]) -> list[dist.Work]:
        sent = spread(operations)
        works.extend(sent)
        return sent

    mesh = same_bits.mesh_of(mesh_shape)
    shapes = ((16, 8), (9, 7), (5, 6))
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    params = [cut(value, mesh, *placements) for value in draw(shapes, seed=0)]
    optimizer = muonshard.Muon(params, lr=LR, exchange="owner", bucket_bytes=1)
    dist.all_to_all_single, dist.batch_isend_irecv = dealt, spreading
    try:
        same_bits.train(params, shapes, 1, optimizer)
    finally:
        dist.all_to_all_single, dist.batch_isend_irecv = deal, spread
    return [work.is_completed() for work in works]


@pytest.mark.parametrize(("mesh_shape", "works"), [((4,), [6]), ((2, 2), range(6 + 3, 6 + 2 * 3 + 1))], ids=str)
def test_no_exchange_is_left_to_itself(pool: Pool, mesh_shape: Shape, works: Sequence[int]) -> None:
    """Two all-to-alls for each of three buckets; across replicas a send, a receipt or both."""
    for over in pool.run(WORLD, works_left_over, mesh_shape):
        assert len(over) in works
        assert all(over)


def hardly_any_rows(world: int) -> tuple[list[int], int]:
    """What differs, and how many shards of this rank are empty."""
    shapes = ((1, 9), (2, 4), (1, 1), (3, 50))
    params = [cut(value, init_device_mesh("cpu", (world,)), Shard(0)) for value in draw(shapes, seed=0)]
    optimizer = muonshard.Muon(params, lr=LR)
    same_bits.train(params, shapes, 2, optimizer)
    differing = same_bits.differing(params, same_bits.reference(shapes, 2, lr=LR))
    return differing, sum(local(param).numel() == 0 for param in params)


def test_empty_shards_take_part(pool: Pool) -> None:
    outcomes = pool.run(8, hardly_any_rows, 8)
    assert [differing for differing, _ in outcomes] == [[]] * 8
    assert [empty for _, empty in outcomes] == [0, 2, 3, 4, 4, 4, 4, 4]


def rebuilt_mesh() -> tuple[list[int], int]:
    """A mesh made again over the same ranks: what differs, and in how many worlds the parameters live."""
    shapes = ((12, 8), (7, 5), (3, 10))
    first = init_device_mesh("cpu", (WORLD,))
    again = DeviceMesh("cpu", torch.arange(WORLD))
    meshes = zip(draw(shapes, seed=0), (first, again, again), strict=True)
    params = [cut(value, mesh, Shard(0)) for value, mesh in meshes]
    optimizer = muonshard.Muon(params, lr=LR)
    for step in range(2):
        for param, grad, mesh in zip(params, draw(shapes, seed=step + 1), (again, again, first), strict=True):
            param.grad = distribute_tensor(grad, mesh, [Shard(0)], src_data_rank=None)
        optimizer.step()
    return same_bits.differing(params, same_bits.reference(shapes, 2, lr=LR)), len(optimizer.plan.domains)


def test_a_mesh_rebuilt_over_the_same_ranks_is_the_same_world(pool: Pool) -> None:
    assert pool.run(WORLD, rebuilt_mesh) == [([], 1)] * WORLD


def layout_error() -> bool:
    """Whether an optimizer refuses, when it is made, a shard that is not what its placement says."""
    mesh = init_device_mesh("cpu", (2,))
    weight = draw(((8, 6),), seed=0)[0]
    odd = DTensor.from_local(weight[:5], mesh, [Shard(0)], run_check=False, shape=weight.shape, stride=weight.stride())
    with pytest.raises(ValueError, match=r"weight holds a shard of shape \(5, 6\).*give \(4, 6\)"):
        muonshard.Muon([("weight", nn.Parameter(odd))])
    return True


def test_layout_errors_surface_when_the_optimizer_is_made(pool: Pool) -> None:
    assert pool.run(2, layout_error) == [True] * 2
