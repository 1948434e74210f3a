"""Distributed Muons from PyPI, as installed (`pip install muonshard[bench]`); each is imported only when asked for."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.methods import Method, Parameters, Steps
from benchmarks.methods.standard import TorchMuonAlone
from benchmarks.problem import Recipe


@dataclass(frozen=True)
class MuonFsdp2:
    """`muon-fsdp2`: gathers each matrix to one rank, in fp32, and scatters it back."""

    name: str = "muon-fsdp2"
    is_muon: bool = True

    @property
    def reference(self) -> Method | None:
        return TorchMuonAlone()

    def prepare(self, params: Parameters, mesh: DeviceMesh | None, recipe: Recipe) -> Steps:
        group = {
            "params": list(params),
            "use_muon": True,
            "lr": recipe.lr,
            "momentum": recipe.momentum,
            "weight_decay": recipe.weight_decay,
            "ns_steps": recipe.steps,
            "rms_scale": False,
        }
        return importlib.import_module("muon_fsdp2").Muon([group])


@dataclass(frozen=True)
class Muonium:
    """`muonium`, or `dtensor-muon`, its earlier form, as published: they need Triton, and a GPU for it."""

    name: str
    module: str
    is_muon: bool = True

    @property
    def reference(self) -> Method | None:
        return TorchMuonAlone()

    def prepare(self, params: Parameters, mesh: DeviceMesh | None, recipe: Recipe) -> Steps:
        importlib.import_module("triton")  # the package does so itself, unless an adapted form has loaded it already
        return _optimizer(importlib.import_module(self.module).Muon, params, recipe)


@dataclass(frozen=True)
class MuoniumOnCpu:
    """The same with what ties it to a GPU taken out: its own torch loops instead of Triton's, and no tensor moved.

    `batched` is its foreach path, which its authors enable on CUDA only; else each parameter is taken by itself.
    """

    name: str
    module: str
    batched: bool
    is_muon: bool = True

    @property
    def reference(self) -> Method | None:
        return TorchMuonAlone()

    def prepare(self, params: Parameters, mesh: DeviceMesh | None, recipe: Recipe) -> Steps:
        with _triton_importable():
            package = importlib.import_module(self.module)
        if self.module == "muonium":
            kind, options, mover = package.Muon, {"foreach": self.batched}, "muonium.optim.optim"
        else:
            kind, options = package.MuonForeach if self.batched else package.Muon, {}
            mover = "dtensor_muon.optim.optim_foreach"
        return _WithoutGpu(_optimizer(kind, params, recipe, **options), self.module, mover)


class _WithoutGpu:
    """Steps of an optimizer of the `muonium` family, during which its GPU parts are replaced."""

    def __init__(self, optimizer: Any, module: str, mover: str) -> None:
        loop = importlib.import_module(f"{module}.orthogonalize.newton_schulz").ns_loop
        self.optimizer = optimizer
        self.patches = {
            f"{module}.orthogonalize.orthogonalize._get_orthogonalization_fn": lambda strategy, use_triton: loop,
            f"{mover}.move_tensors_to_device": lambda tensors, source, target: tensors,
        }

    @property
    def state(self) -> Mapping[Any, Any]:
        return self.optimizer.state

    def step(self) -> None:
        with ExitStack() as stack:
            for name, replacement in self.patches.items():
                stack.enter_context(patch(name, replacement))
            self.optimizer.step()


def _optimizer(kind: Any, params: Parameters, recipe: Recipe, **options: Any) -> Steps:
    """One group per learning-rate ratio, since it scales weight decay by that ratio and the others do not."""
    groups: dict[float, list[torch.nn.Parameter]] = {}
    for param in params:
        rows, columns = param.shape[-2:]
        groups.setdefault(max(1, rows / columns) ** 0.5, []).append(param)
    return kind(
        [{"params": g, "wd": recipe.weight_decay / ratio, "flatten": False} for ratio, g in groups.items()],
        lr=recipe.lr,
        momentum=recipe.momentum,
        ns_steps=recipe.steps,
        use_cautious_wd=False,
        orthogonalization_strategy="newton_schulz",
        **options,
    )


@contextmanager
def _triton_importable() -> Iterator[None]:
    """While it lasts, importing Triton gives an empty stand-in where the real one is not installed."""
    names = ("triton", "triton.language")
    if importlib.util.find_spec("triton") is not None:
        yield
        return
    torch.compile(lambda: None)  # torch's compiler looks for Triton when first used: it must not find this one
    sys.modules.update({name: MagicMock() for name in names})
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
