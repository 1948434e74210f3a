"""Methods that need only torch: AdamW, torch's own Muon, and gathering every matrix everywhere."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from benchmarks.methods import Method, Parameters, Steps
from benchmarks.problem import Recipe, local_part, shard_of


@dataclass(frozen=True)
class AdamW:
    """torch's AdamW with foreach: what a step without orthogonalisation costs."""

    name: str = "adamw"
    is_muon: bool = False

    @property
    def reference(self) -> Method | None:
        return self

    def prepare(self, params: Parameters, mesh: DeviceMesh | None, recipe: Recipe) -> Steps:
        return torch.optim.AdamW(params, lr=recipe.lr, weight_decay=recipe.weight_decay, foreach=True)


@dataclass(frozen=True)
class TorchMuon:
    """`torch.optim.Muon` on the parameters as they are; DTensor finds the collectives."""

    name: str = "torch-muon"
    is_muon: bool = True

    @property
    def reference(self) -> Method | None:
        return TorchMuonAlone()

    def prepare(self, params: Parameters, mesh: DeviceMesh | None, recipe: Recipe) -> Steps:
        return _torch_muon(params, recipe)


@dataclass(frozen=True)
class TorchMuonAlone:
    """`torch.optim.Muon` on plain tensors in one process, each expert of a stack by itself: what Muon should give."""

    name: str = "torch-muon-alone"
    is_muon: bool = True

    @property
    def reference(self) -> Method | None:
        return self

    def prepare(self, params: Parameters, mesh: DeviceMesh | None, recipe: Recipe) -> Steps:
        return _MatrixByMatrix(params, recipe)


class _MatrixByMatrix:
    """torch.optim.Muon takes 2-D parameters only: it is given views of the stacks'."""

    def __init__(self, params: Parameters, recipe: Recipe) -> None:
        self.stacks = list(params)
        self.matrices = [torch.nn.Parameter(matrix) for param in params for matrix in _unstacked(param.detach())]
        self.optimizer = _torch_muon(self.matrices, recipe)

    @property
    def state(self) -> Mapping[Any, Any]:
        return self.optimizer.state

    def step(self) -> None:
        gradients = [gradient for stack in self.stacks for gradient in _unstacked(stack.grad)]
        for matrix, gradient in zip(self.matrices, gradients, strict=True):
            matrix.grad = gradient
        self.optimizer.step()


def _unstacked(tensor: Tensor | None) -> list[Tensor]:
    assert tensor is not None, "the benchmark sets every gradient"
    return list(tensor) if tensor.ndim == 3 else [tensor]


def _torch_muon(params: Parameters, recipe: Recipe) -> torch.optim.Optimizer:
    return torch.optim.Muon(
        params,
        lr=recipe.lr,
        weight_decay=recipe.weight_decay,
        momentum=recipe.momentum,
        ns_steps=recipe.steps,
        ns_coefficients=recipe.coefficients,
    )


@dataclass(frozen=True)
class GatherEverywhere:
    """Every rank gathers all momenta whole, at once, and orthogonalises all: simple, and W times the work."""

    name: str = "gather-everywhere"
    is_muon: bool = True

    @property
    def reference(self) -> Method | None:
        return TorchMuonAlone()

    def prepare(self, params: Parameters, mesh: DeviceMesh | None, recipe: Recipe) -> Steps:
        return _GatherSteps(params, recipe)


class _GatherSteps:
    def __init__(self, params: Parameters, recipe: Recipe) -> None:
        self.params, self.recipe = params, recipe
        self.state: defaultdict[Tensor, dict[str, Tensor]] = defaultdict(dict)

    @torch.no_grad()
    def step(self) -> None:
        wholes = [self._momentum(param) for param in self.params]
        wholes = [whole.full_tensor() if isinstance(whole, DTensor) else whole for whole in wholes]
        for param, whole in zip(self.params, wholes, strict=True):
            self._apply(param, orthogonalized(whole, self.recipe))

    def _momentum(self, param: torch.nn.Parameter) -> Tensor:
        grad = param.grad
        assert grad is not None, "the benchmark sets every gradient"
        state = self.state[param]
        if not state:
            state["momentum"] = torch.zeros_like(grad)
        momentum = state["momentum"].lerp_(grad, 1 - self.recipe.momentum)
        return grad.lerp(momentum, self.recipe.momentum).bfloat16()

    def _apply(self, param: torch.nn.Parameter, update: Tensor) -> None:
        recipe, (rows, columns) = self.recipe, param.shape[-2:]
        if isinstance(param, DTensor):
            update = shard_of(update, param.device_mesh, param.placements)
        local = local_part(param)
        local.mul_(1 - recipe.lr * recipe.weight_decay)
        local.add_(update, alpha=-recipe.lr * max(1, rows / columns) ** 0.5)


def orthogonalized(x: Tensor, recipe: Recipe) -> Tensor:
    """The quintic Newton-Schulz iteration in bf16 on (..., m, n): https://kellerjordan.github.io/posts/muon."""
    a, b, c = recipe.coefficients
    tall = x.shape[-2] > x.shape[-1]
    y = x.bfloat16()
    y = y.mT if tall else y
    y = y / y.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(recipe.steps):
        gram = y @ y.mT
        y = a * y + (b * gram + c * (gram @ gram)) @ y
    return y.mT if tall else y
