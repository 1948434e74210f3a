"""This library's optimizer, and the orthogonalisers that it may be given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import muonshard
from benchmarks.methods import Method, Parameters, Steps
from benchmarks.problem import Recipe
from muonshard.orthogonalize import resolve


@dataclass(frozen=True)
class Ours:
    """`muonshard.Muon` with one of its exchanges and one of its orthogonalisers."""

    name: str
    exchange: Literal["auto", "owner", "allgather"] = "auto"
    orthogonalize: str = "newton_schulz"
    is_muon: bool = True

    @property
    def reference(self) -> Method | None:
        return self

    def prepare(self, params: Parameters, mesh: DeviceMesh | None, recipe: Recipe) -> Steps:
        return muonshard.Muon(
            params,
            lr=recipe.lr,
            weight_decay=recipe.weight_decay,
            momentum=recipe.momentum,
            ns_steps=recipe.steps,
            ns_coefficients=recipe.coefficients,
            exchange=self.exchange,
            orthogonalize=self.orthogonalize,
        )


@dataclass(frozen=True)
class OurOrthogonalizer:
    """One of the library's orthogonalisers by itself, on stacks of one shape, as the optimizer calls it."""

    orthogonalize: str = "newton_schulz"

    def __call__(self, matrices: list[Tensor], recipe: Recipe) -> None:
        orthogonalizer = resolve(self.orthogonalize, coefficients=recipe.coefficients, steps=recipe.steps)
        by_shape: dict[torch.Size, list[Tensor]] = {}
        for matrix in matrices:
            by_shape.setdefault(matrix.shape, []).append(matrix)
        for stack in by_shape.values():
            orthogonalizer(torch.stack(stack))
