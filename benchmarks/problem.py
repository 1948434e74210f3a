"""What is optimized: sets of weight shapes, meshes, and one rank's shards of both weights and gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

GRADIENTS = 2  # distinct gradients that the steps take in turn


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight (out, in), or a stack of experts (experts, out, in), and which side tensor parallelism cuts."""

    shape: tuple[int, ...]
    parallel: Literal["out", "in"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """Hyper-parameters that every method is given (AdamW takes the first two)."""

    lr: float = 0.02
    weight_decay: float = 0.1
    momentum: float = 0.95
    steps: int = 5
    coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)  # kellerjordan.github.io/posts/muon


def _blocks(count: int, size: int, tall: int) -> tuple[Weight, ...]:
    """`count` squares (size, size) and as many (tall, size), cut in turn on each side."""
    sides: tuple[Literal["out"], Literal["in"]] = ("out", "in")
    shapes = [(size, size)] * count + [(tall, size)] * count
    return tuple(Weight(shape, sides[index % 2]) for index, shape in enumerate(shapes))


def _llama(layers: int, hidden: int, kv: int, inner: int) -> tuple[Weight, ...]:
    """Attention with grouped queries and a gated MLP, layer by layer."""
    layer = (
        *(Weight((rows, hidden), "out") for rows in (hidden, kv, kv)),
        Weight((hidden, hidden), "in"),
        *(Weight((inner, hidden), "out") for _ in range(2)),
        Weight((hidden, inner), "in"),
    )
    return layer * layers


def _moe(layers: int, experts: int, hidden: int, inner: int) -> tuple[Weight, ...]:
    """Stacks of experts: one up and one down projection per layer."""
    return (Weight((experts, inner, hidden), "out"), Weight((experts, hidden, inner), "in")) * layers


SETS: dict[str, tuple[Weight, ...]] = {
    "dense": _blocks(24, 512, 2048),
    "llama": _llama(8, 576, 192, 1536),
    "moe": _moe(4, 8, 384, 768),
    "odd": _blocks(24, 510, 2046),
    "small": _blocks(6, 256, 1024),
    "many": (Weight((8, 8), "out"),) * 2000,
}


@dataclass(frozen=True, slots=True)
class MeshKind:
    """A mesh and how it cuts a weight; without axes, one process on plain tensors."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]

    @property
    def world(self) -> int:
        """How many ranks it has."""
        return math.prod(self.shape)

    def build(self) -> DeviceMesh | None:
        """The device mesh; needs the default process group."""
        return None if not self.axes else init_device_mesh("cpu", self.shape, mesh_dim_names=self.axes)

    def placements(self, weight: Weight) -> tuple[Placement, ...]:
        """One placement per mesh axis, as FSDP2 over tensor parallelism makes them."""
        out = len(weight.shape) - 2
        cut = out if weight.parallel == "out" else out + 1
        fsdp: Placement = Shard(0)
        if "tensor" in self.axes and cut == 0:
            fsdp = _StridedShard(0, split_factor=self.shape[self.axes.index("tensor")])
        by_axis = {"replicate": Replicate(), "shard": fsdp, "tensor": Shard(cut)}
        return tuple(by_axis[axis] for axis in self.axes)


MESHES: dict[str, MeshKind] = {
    "fsdp": MeshKind((4,), ("shard",)),
    "hsdp": MeshKind((2, 2), ("replicate", "shard")),
    "fsdp-tp": MeshKind((2, 2), ("shard", "tensor")),
    "alone": MeshKind((), ()),
}


def shard_of(full: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """This rank's part of `full`: the last axis cuts first, which is what a `_StridedShard` before it stands for."""
    place = mesh.get_coordinate()
    assert place is not None, "every rank is in the mesh"
    part = full
    for axis in reversed(range(mesh.ndim)):
        placement = placements[axis]
        if isinstance(placement, Replicate):
            continue
        dim, size = placement.dim, mesh.size(axis)  # type: ignore[attr-defined]
        chunk = math.ceil(part.shape[dim] / size)
        start = min(place[axis] * chunk, part.shape[dim])
        part = part.narrow(dim, start, min(chunk, part.shape[dim] - start))
    return part.contiguous()


class Problem:
    """Weights and gradients of one set on one mesh, of which this rank holds its shards; the same on every run."""

    def __init__(self, weights: Sequence[Weight], kind: MeshKind, seed: int) -> None:
        self.weights = tuple(weights)
        self.seed = seed
        self.mesh = kind.build()
        self.placements = [kind.placements(weight) for weight in weights]
        full = self._full(0)
        self._initial = [self.local(index, full[index]) for index in range(len(weights))]
        self._gradients = []
        for gradient in range(1, 1 + GRADIENTS):
            full = self._full(gradient)
            self._gradients.append([self.local(index, full[index]) for index in range(len(weights))])

    def _full(self, what: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self.seed * (1 + GRADIENTS) + what)
        return [torch.randn(weight.shape, generator=generator).mul_(0.02) for weight in self.weights]

    def local(self, index: int, full: Tensor) -> Tensor:
        """This rank's part of a whole tensor that is cut like the weight `index`."""
        return full if self.mesh is None else shard_of(full, self.mesh, self.placements[index])

    def _wrapped(self, index: int, local: Tensor) -> Tensor:
        if self.mesh is None:
            return local
        shape = torch.Size(self.weights[index].shape)
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, self.mesh, self.placements[index], run_check=False, shape=shape, stride=stride)

    def parameters(self) -> list[torch.nn.Parameter]:
        """Fresh copies of the weights."""
        return [torch.nn.Parameter(self._wrapped(i, local.clone())) for i, local in enumerate(self._initial)]

    def gradients(self, step: int) -> list[Tensor]:
        """Fresh copies of the gradients of a step: some methods write into them."""
        return [self._wrapped(i, local.clone()) for i, local in enumerate(self._gradients[step % GRADIENTS])]


def local_part(tensor: Tensor) -> Tensor:
    """The tensor's own shard, where it is a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
