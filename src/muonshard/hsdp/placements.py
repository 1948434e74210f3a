"""What a distributed tensor says of itself: its local shard, its placements as cuts, and the order of those."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from muonshard import _torch
from muonshard.hsdp.splits import Shape, share_sizes
from muonshard.hsdp.types import ParamLayoutSpec, StridedParamLayoutSpec


class DTensorLike(Protocol):
    """A DTensor, or what another library has in its place."""

    @property
    def shape(self) -> Shape: ...

    @property
    def ndim(self) -> int: ...

    @property
    def device_mesh(self) -> Any: ...

    @property
    def placements(self) -> Sequence[Any]: ...

    def to_local(self) -> Tensor: ...


def as_dtensor(tensor: Any) -> DTensorLike | None:
    """`tensor` if it has `to_local`, `device_mesh` and `placements`, else None."""
    found = hasattr(tensor, "to_local") and hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")
    return tensor if found else None


def to_local_if_dtensor(tensor: Tensor) -> Tensor:
    """The local shard of a DTensor (anything with `to_local`, `device_mesh` and `placements`), else the tensor."""
    dtensor = as_dtensor(tensor)
    return tensor if dtensor is None else dtensor.to_local()


@dataclass(frozen=True, slots=True)
class Cut:
    """Mesh dim `mesh_dim` cuts `tensor_dim` into `split_factor` pieces and shares each out over its ranks."""

    mesh_dim: int
    tensor_dim: int
    split_factor: int = 1


def read_cuts(tensor: DTensorLike) -> list[Cut]:
    """The placements that cut `tensor`, in mesh order.

    Raises:
        ValueError: a placement that is neither a shard nor a replica.
    """
    cuts = []
    for mesh_dim, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            continue
        if placement.is_partial() or not hasattr(placement, "dim"):
            raise ValueError(
                f"placement {placement} on mesh dim {mesh_dim} is neither Shard nor Replicate: "
                "call redistribute on the tensor first"
            )
        cuts.append(Cut(mesh_dim, placement.dim % tensor.ndim, _torch.split_factor(placement)))
    return cuts


def make_layout_spec(tensor: DTensorLike) -> ParamLayoutSpec:
    """The layout of `tensor`, its cuts in the order in which shards are put together again.

    Where the split factors of a dim tell the order in which its cuts were made (as they do for FSDP2 over tensor
    parallel), each cut is an ordinary one, made in that order; else they are made in mesh order, each strided.

    Raises:
        ValueError: a placement that is neither a shard nor a replica.
    """
    mesh_shape = tuple(tensor.device_mesh.shape)
    by_dim: defaultdict[int, list[Cut]] = defaultdict(list)
    cuts = read_cuts(tensor)
    for cut in cuts:
        by_dim[cut.tensor_dim].append(cut)
    queues = [list(reversed(_order_made(same_dim, mesh_shape) or same_dim)) for same_dim in by_dim.values()]
    ordered: list[Cut] = []
    while queues := [queue for queue in queues if queue]:
        ordered.append(min(queues, key=lambda queue: queue[0].mesh_dim).pop(0))
    axes = tuple((cut.mesh_dim, cut.tensor_dim) for cut in ordered)
    cutting = {cut.mesh_dim for cut in cuts}
    replicas = tuple(mesh_dim for mesh_dim in range(len(mesh_shape)) if mesh_dim not in cutting)
    factors = tuple(cut.split_factor for cut in ordered)
    if any(factor != 1 for factor in factors):
        return StridedParamLayoutSpec(tensor.ndim, axes, replicas, factors)
    return ParamLayoutSpec(tensor.ndim, axes, replicas)


def _order_made(cuts: Sequence[Cut], mesh_shape: Shape) -> list[Cut] | None:
    """Ordinary cuts in the order that the split factors of one dim's cuts tell, or None where they tell none.

    A cut's factor is the number of pieces that cuts of later mesh dims had made before it.
    """
    made: list[Cut] = []
    for cut in reversed(cuts):
        before = [math.prod(mesh_shape[earlier.mesh_dim] for earlier in made[:place]) for place in range(len(made) + 1)]
        if cut.split_factor not in before:
            return None
        made.insert(before.index(cut.split_factor), Cut(cut.mesh_dim, cut.tensor_dim))
    return made


def shape_by_rule(shape: Shape, cuts: Sequence[Cut], mesh_shape: Shape, coordinate: Sequence[int]) -> Shape:
    """The local shape at `coordinate` of a mesh, where `cuts` are made in the order given by torch's chunk rule."""
    local = list(shape)
    for cut in cuts:
        sizes = share_sizes(local[cut.tensor_dim], mesh_shape[cut.mesh_dim], cut.split_factor)
        local[cut.tensor_dim] = sizes[coordinate[cut.mesh_dim]]
    return tuple(local)
