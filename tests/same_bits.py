"""The promise that every mesh gives the same bits, as something a test can call.

Gradients are drawn from a seed, whole; the reference steps plain tensors in one process; each rank steps its shards of
the same tensors with its shards of the same gradients, and its shards must then be those of the reference's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

import muonshard

Shape = tuple[int, ...]
STACK: tuple[Shape, ...] = ((64, 64), (70, 33), (3, 50), (128, 8), (1, 40))
"""Square, uneven both ways, fewer rows than ranks, tall, one row."""


def draw(shapes: Sequence[Shape], seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Whole tensors that depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def reference(shapes: Sequence[Shape], steps: int, **options: Any) -> list[Tensor]:
    """Weights after some steps of one process with plain tensors."""
    params = [nn.Parameter(value) for value in draw(shapes, seed=0)]
    optimizer = muonshard.Muon(params, **options)
    for step in range(steps):
        for param, grad in zip(params, draw(shapes, seed=step + 1), strict=True):
            param.grad = grad
        optimizer.step()
    return [param.detach() for param in params]


def shard_like(value: Tensor, param: Tensor) -> Tensor:
    """This rank's part of a whole tensor, in a DTensor like `param`; all of it if `param` is plain."""
    if not isinstance(param, DTensor):
        return value.clone()
    return distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)


def train(params: Sequence[Tensor], shapes: Sequence[Shape], steps: int, optimizer: torch.optim.Optimizer) -> None:
    """Some steps with this rank's shards of the reference's gradients."""
    for step in range(steps):
        for param, grad in zip(params, draw(shapes, seed=step + 1), strict=True):
            param.grad = shard_like(grad, param)
        optimizer.step()


def differing(params: Iterable[Tensor], expected: Iterable[Tensor]) -> list[int]:
    """Which of this rank's shards are not bit for bit those of the expected whole tensors."""
    return [
        index
        for index, (param, value) in enumerate(zip(params, expected, strict=True))
        if not torch.equal(local(param), local(shard_like(value, param)))
    ]


def local(tensor: Tensor) -> Tensor:
    """This rank's shard, detached."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def mesh_of(shape: Shape) -> DeviceMesh:
    """A CPU mesh of that shape over the world, with axes called a, b, c."""
    return init_device_mesh("cpu", shape, mesh_dim_names=tuple("abc"[: len(shape)]))


def replicated(mesh: DeviceMesh, value: Tensor) -> nn.Parameter:
    """A DTensor parameter that every rank holds whole."""
    return nn.Parameter(distribute_tensor(value, mesh, [Replicate()] * mesh.ndim, src_data_rank=None))


def rank_zero_says(value: Any) -> Any:
    """The value of rank 0, on every rank."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


Maker = Callable[[], list[Tensor]]
