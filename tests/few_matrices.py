"""A few small matrices, sharded or not, and their gradients: for tests of what happens to an optimizer on one day."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from same_bits import Shape, draw, shard_like

SHAPES: tuple[Shape, ...] = ((12, 8), (7, 5), (3, 10), (1, 9), (6, 1))
LR = {"lr": 0.1}
WORLD = 4


def sharded(mesh: DeviceMesh, values: Sequence[Tensor]) -> list[Tensor]:
    """Parameters cut along the last mesh axis and replicated over the others, as HSDP has them."""
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    return [nn.Parameter(distribute_tensor(value, mesh, placements, src_data_rank=None)) for value in values]


def give(params: Sequence[Tensor], step: int, without: Sequence[int] = ()) -> None:
    """Gradients of a step to all but some parameters."""
    for index, (param, grad) in enumerate(zip(params, draw(SHAPES, seed=step + 1), strict=True)):
        param.grad = None if index in without else shard_like(grad, param)


def spoil(params: Sequence[Tensor], indices: Sequence[int]) -> None:
    """Give some parameters a gradient whose last element, of the whole, is NaN."""
    for index in indices:
        value = draw(SHAPES, seed=99)[index]
        value.view(-1)[-1] = torch.nan
        params[index].grad = shard_like(value, params[index])
