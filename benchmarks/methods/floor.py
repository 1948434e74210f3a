"""The floor: the same matrices orthogonalised, shared out over all ranks by cost, with nothing else done."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.methods import Method, Parameters, Steps
from benchmarks.problem import Recipe

Orthogonalize = Callable[[list[Tensor], Recipe], object]
"""Orthogonalises whole (m, n) bf16 matrices of any shapes."""


@dataclass(frozen=True)
class ComputeAlone:
    """No momentum, no exchange, no update: a step can be as fast as this only if all of that is free or hidden."""

    name: str
    orthogonalize: Orthogonalize
    is_muon: bool = False

    @property
    def reference(self) -> Method | None:
        return None

    def prepare(self, params: Parameters, mesh: DeviceMesh | None, recipe: Recipe) -> Steps:
        shapes = [tuple(p.shape[-2:]) for p in params for _ in range(math.prod(p.shape[:-2]))]
        ranks, rank = (mesh.size(), torch.distributed.get_rank()) if mesh is not None else (1, 0)
        mine = share_out(shapes, ranks)[rank]
        generator = torch.Generator().manual_seed(rank)
        matrices = [torch.randn(shapes[i], generator=generator).bfloat16() for i in mine]
        return _FloorSteps(matrices, self.orthogonalize, recipe)


class _FloorSteps:
    def __init__(self, matrices: list[Tensor], orthogonalize: Orthogonalize, recipe: Recipe) -> None:
        self.matrices, self.orthogonalize, self.recipe = matrices, orthogonalize, recipe
        self.state: Mapping[Any, Any] = {"matrices": dict(enumerate(matrices))}

    @torch.no_grad()
    def step(self) -> None:
        self.orthogonalize(self.matrices, self.recipe)


def share_out(shapes: list[tuple[int, ...]], ranks: int) -> list[list[int]]:
    """Indices for each rank, longest first to the least loaded; the cost is the standard iteration's m^2 (2n + m)."""
    costs = [min(s) ** 2 * (2 * max(s) + min(s)) for s in shapes]
    loads, shares = [0] * ranks, [list[int]() for _ in range(ranks)]
    for index in sorted(range(len(shapes)), key=lambda i: -costs[i]):
        rank = loads.index(min(loads))
        loads[rank] += costs[index]
        shares[rank].append(index)
    return shares
