"""Models on meshes, and runs on them, for the tests of checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import muonshard
import same_bits
from same_bits import Shape

MATRICES: tuple[Shape, ...] = ((16, 24), (7, 9), (3, 8, 4), (2, 5), (12, 4))
"""Even and uneven, a stack of three, fewer rows than ranks, heads."""
VECTORS: tuple[Shape, ...] = ((10,), (3,))
SHAPES = MATRICES + VECTORS
OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "exchange": "owner"}


class Model(nn.Module):
    """Matrices for Muon and vectors for AdamW; `seed` draws their values."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        values = same_bits.draw(SHAPES, seed)
        self.matrices = nn.ParameterList(values[: len(MATRICES)])
        self.vectors = nn.ParameterList(values[len(MATRICES) :])


Layout = Callable[[Model], dict[str, Any]]
"""Puts a model on the mesh of the world, and returns what the optimizer must be told."""


@dataclass(frozen=True)
class Place:
    """Somewhere to run: so many processes, and what they do to a model."""

    world: int
    layout: Layout


def whole(model: Model) -> dict[str, Any]:
    """Plain tensors in one process."""
    return {}


def data_parallel(model: Model) -> dict[str, Any]:
    """Plain tensors, as under DistributedDataParallel."""
    return {"process_group": dist.group.WORLD}


def fsdp(model: Model) -> dict[str, Any]:
    """FSDP2 over all ranks."""
    fully_shard(model, mesh=same_bits.mesh_of((dist.get_world_size(),)))
    return {}


def hsdp(model: Model) -> dict[str, Any]:
    """Two replicas."""
    fully_shard(model, mesh=same_bits.mesh_of((2, dist.get_world_size() // 2)))
    return {}


def fsdp_tp(model: Model) -> dict[str, Any]:
    """FSDP2 over tensor parallel by two: matrices are cut by rows or by columns, and then by rows again."""
    mesh = same_bits.mesh_of((dist.get_world_size() // 2, 2))
    for index, param in enumerate(model.matrices):
        cut = distribute_tensor(param.detach(), mesh["b"], [Shard(index % 2)], src_data_rank=None)
        model.matrices[index] = nn.Parameter(cut)
    fully_shard(model, mesh=mesh["a"])
    return {}


PLACES = {
    "one process": Place(1, whole),
    "ddp 2": Place(2, data_parallel),
    "fsdp 2": Place(2, fsdp),
    "fsdp 3": Place(3, fsdp),
    "fsdp 4": Place(4, fsdp),
    "hsdp 2x2": Place(4, hsdp),
    "fsdp x tp 2x2": Place(4, fsdp_tp),
}


def groups(model: Model) -> list[dict[str, Any]]:
    """Named groups: matrices, one with heads of its own, vectors."""
    matrices = [(f"matrices.{index}", param) for index, param in enumerate(model.matrices)]
    return [
        {"params": matrices[:-1]},
        {"params": matrices[-1:], "num_heads": 3, "lr": 0.05},
        {"params": [(f"vectors.{i}", p) for i, p in enumerate(model.vectors)], "algorithm": "adamw", "lr": 0.01},
    ]


def make_run(
    layout: Layout, start: int = 0, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[Model, muonshard.Muon]:
    """A model in its place, with the weights that `start` draws, and its optimizer."""
    model = Model(start).to(dtype)
    told = layout(model)
    return model, muonshard.Muon(groups(model), **{**OPTIONS, **told, **options})


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    """Take steps of those numbers, each with the gradients that its number draws."""
    for step in steps:
        for param, grad in zip(model.parameters(), same_bits.draw(SHAPES, seed=step + 1), strict=True):
            param.grad = same_bits.shard_like(grad.to(param.dtype), param)
        optimizer.step()


def unbroken(steps: int, **options: Any) -> list[Tensor]:
    """Weights after some steps of one process."""
    model, optimizer = make_run(whole, **options)
    train(model, optimizer, range(steps))
    return [param.detach() for param in model.parameters()]
