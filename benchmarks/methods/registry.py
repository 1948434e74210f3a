"""The methods by name."""

from __future__ import annotations

import importlib

from torch import Tensor

from benchmarks.methods import Method
from benchmarks.methods.floor import ComputeAlone
from benchmarks.methods.ours import OurOrthogonalizer, Ours
from benchmarks.methods.packages import MuonFsdp2, Muonium, MuoniumOnCpu
from benchmarks.methods.standard import AdamW, GatherEverywhere, TorchMuon, orthogonalized
from benchmarks.problem import Recipe


def _standard(matrices: list[Tensor], recipe: Recipe) -> None:
    for matrix in matrices:
        orthogonalized(matrix, recipe)


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Ours("ours"),
        Ours("ours-owner", exchange="owner"),
        Ours("ours-allgather", exchange="allgather"),
        Ours("ours-standard", form="standard"),
        Ours("ours-polar", form="polar_express"),
        ComputeAlone("floor-ours", OurOrthogonalizer()),
        ComputeAlone("floor-standard", _standard),
        AdamW(),
        TorchMuon(),
        GatherEverywhere(),
        Muonium("muonium", "muonium"),
        MuoniumOnCpu("muonium-cpu", "muonium", batched=False),
        MuoniumOnCpu("muonium-cpu-batched", "muonium", batched=True),
        Muonium("dtensor-muon", "dtensor_muon"),
        MuoniumOnCpu("dtensor-muon-cpu", "dtensor_muon", batched=False),
        MuoniumOnCpu("dtensor-muon-cpu-batched", "dtensor_muon", batched=True),
        MuonFsdp2(),
    )
}


def plugin(path: str) -> Method:
    """The method that `module:Class` makes when called without arguments.

    Raises:
        ValueError: `path` is not of that form.
    """
    module, colon, name = path.partition(":")
    if not colon or not name:
        raise ValueError(f"--plugin takes module:Class, got {path!r}")
    method: Method = getattr(importlib.import_module(module), name)()
    return method


def find(name: str) -> Method:
    """A method by its name, or a plugin by its `module:Class`.

    Raises:
        ValueError: there is no such method.
    """
    if ":" in name:
        return plugin(name)
    if name not in METHODS:
        raise ValueError(f"no method is called {name!r}; there are {', '.join(METHODS)}, and any module:Class")
    return METHODS[name]
