"""This library's optimizer, and the orthogonalisers that it may be given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import muonshard
from benchmarks.methods import Method, Parameters, Steps
from benchmarks.problem import Recipe
from muonshard.orthogonalize import NewtonSchulz

Form = Literal["newton_schulz", "standard", "polar_express"]
"""The default; the same with X X^T formed afresh at every step, as `torch.optim.Muon` does; other coefficients."""


@dataclass(frozen=True)
class Ours:
    """`muonshard.Muon` with one of its exchanges and one of its orthogonalisers."""

    name: str
    exchange: Literal["auto", "owner", "allgather"] = "auto"
    form: Form = "newton_schulz"

    @property
    def is_muon(self) -> bool:
        return self.form != "polar_express"

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
            orthogonalize=_orthogonalizer(self.form, recipe),
        )


@dataclass(frozen=True)
class OurOrthogonalizer:
    """The default orthogonaliser by itself, on stacks of one shape and into them, as the optimizer calls it."""

    def __call__(self, matrices: list[Tensor], recipe: Recipe) -> None:
        orthogonalizer = NewtonSchulz((recipe.coefficients,) * recipe.steps)
        by_shape: dict[torch.Size, list[Tensor]] = {}
        for matrix in matrices:
            by_shape.setdefault(matrix.shape, []).append(matrix)
        for stack in by_shape.values():
            orthogonalizer(torch.stack(stack))


def _orthogonalizer(form: Form, recipe: Recipe) -> str | Callable[[Tensor], Tensor]:
    if form == "standard":
        return NewtonSchulz((recipe.coefficients,) * recipe.steps, restart=tuple(range(1, recipe.steps)))
    return form
