"""What a parameter says of its mesh: the grid of ranks, the cuts of its dims, and the process groups along them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, TypeGuard
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from muonshard import _torch
from muonshard.layout import Cut, Layout, Placement, make_layout
from muonshard.owners import Seat
from muonshard.plan import Grid

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_distributed(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether it is a DTensor or has, as one does, a mesh, placements and a shard of its own."""
    return _has_shards(type(tensor))


@cache
def _has_shards(kind: Hashable) -> bool:
    """By type and only once for each: a step asks this of every parameter."""
    return all(hasattr(kind, name) for name in ("device_mesh", "placements", "to_local"))


@dataclass(frozen=True)
class Residence:
    """Where a parameter lives: its grid, its layout on it, and the groups its ranks can talk through.

    Attributes:
        grid: [replica][shard] ranks.
        layout: how the tensor is cut over the shards.
        placements: the same for people to read.
        groups: process groups that together reach every rank of the grid, one for each mesh axis; none for a tensor
            that only this process knows of.
    """

    grid: Grid
    layout: Layout
    placements: str
    groups: tuple[dist.ProcessGroup, ...]


@dataclass(frozen=True)
class Link:
    """A process group along one side of a grid; `order[k]` is the place in the grid of the group's rank k."""

    group: dist.ProcessGroup
    order: tuple[int, ...]


@dataclass(frozen=True)
class Links:
    """A domain's links; None where this rank would be alone.

    Attributes:
        shard: along the shards of this rank's replica, to the owners.
        back: the same ranks, from the owners. Often the same group.
        replica: across replicas.
    """

    shard: Link | None
    back: Link | None
    replica: Link | None


def local_part(tensor: Tensor) -> Tensor:
    """This rank's shard of a distributed tensor, sharing its memory; a plain tensor itself."""
    return tensor.to_local() if is_distributed(tensor) else tensor


def local_gradient(grad: Tensor, name: str) -> Tensor:
    """This rank's shard of a gradient.

    Raises:
        ValueError: a gradient that is sparse.
    """
    check_dense(grad, name)
    return local_part(grad)


def check_gradient(param: Tensor, name: str) -> None:
    """Raise ValueError for a gradient that is sparse or complex, or that is not cut as its parameter is."""
    grad = param.grad
    if grad is None:
        return
    check_dense(grad, name)
    if grad.is_complex():
        raise ValueError(f"{name} has a complex gradient, {grad.dtype}: Muon takes real ones")
    if not _cut_alike(grad, param):
        found, own = (getattr(tensor, "placements", "none, it is a plain tensor") for tensor in (grad, param))
        raise ValueError(
            f"{name} has placements {own}, but its gradient has {found}: bring it to the parameter's "
            "(grad.redistribute; where it is Partial, that makes the sums that are still to be made)"
        )


def check_dense(grad: Tensor, name: str) -> None:
    """Raise ValueError for a sparse gradient."""
    if grad.layout != torch.strided:
        raise ValueError(
            f"{name} has a gradient of layout {grad.layout}: make it dense (sparse=False in the embedding)"
        )


def _cut_alike(grad: Tensor, param: Tensor) -> bool:
    """Whether a gradient has its parameter's placements; those on mesh axes of one rank do not matter."""
    found, own = getattr(grad, "placements", None), getattr(param, "placements", None)
    if found is None or own is None or tuple(found) == tuple(own):
        return (found is None) == (own is None)
    pairs = zip(found, own, param.device_mesh.shape, strict=True)  # type: ignore[attr-defined]
    return all(
        size == 1 or (not one.is_partial() and read_placement(one, param.ndim) == read_placement(other, param.ndim))
        for one, other, size in pairs
    )


def work_device(param: Tensor) -> torch.device:
    """Where matrices are exchanged and orthogonalised: its mesh's device, also if shards are offloaded."""
    own = local_part(param).device
    kind = param.device_mesh.device_type if is_distributed(param) else own.type
    return own if kind == own.type else torch.device(kind, torch.get_device_module(kind).current_device())


def find_residence(tensor: Tensor, group: dist.ProcessGroup | None) -> Residence | None:
    """Where `tensor` lives; plain tensors are replicated over `group`. None if this rank is not on its mesh.

    Raises:
        ValueError: a placement that no shard can be computed from, or a shard of another shape than its placement says.
    """
    if not is_distributed(tensor):
        layout = make_layout(tuple(tensor.shape), (), ())
        if group is None:
            return Residence(Grid(((this_rank(),),)), layout, "whole", ())
        members = dist.get_process_group_ranks(group)
        return Residence(Grid(tuple((rank,) for rank in members)), layout, "replicated", (group,))
    mesh = tensor.device_mesh
    if mesh.get_coordinate() is None:
        return None
    placements = tuple(read_placement(placement, tensor.ndim) for placement in tensor.placements)
    ranks = mesh.mesh.cpu().numpy()
    residence = Residence(
        grid=make_grid(ranks, placements),
        layout=make_layout(tuple(tensor.shape), ranks.shape, placements),
        placements=f"{tuple(tensor.placements)}",
        groups=tuple(mesh.get_group(axis) for axis in range(mesh.ndim)),
    )
    _check_shard(tensor, residence)
    return residence


def this_rank() -> int:
    """This process's global rank; 0 where there is one process."""
    return dist.get_rank() if dist.is_initialized() else 0


def read_placement(placement: Any, ndim: int) -> Placement:
    """A DTensor placement as a cut, or None where it replicates.

    Raises:
        ValueError: a partial sum, or a placement of a kind not known here.
    """
    if placement.is_replicate():
        return None
    if placement.is_partial():
        raise ValueError(
            f"has placement {placement}, sums that are still to be made: "
            "redistribute it to Shard or Replicate placements first"
        )
    if not hasattr(placement, "dim"):
        raise ValueError(f"has placement {placement}, which is neither Shard nor Replicate: redistribute it first")
    return Cut(placement.dim % ndim, _torch.split_factor(placement))


def make_grid(ranks: np.ndarray[Any, Any], placements: Sequence[Placement]) -> Grid:
    """The ranks of a mesh as [replica][shard], both in row-major order of the mesh axes."""
    replicating = [axis for axis, cut in enumerate(placements) if cut is None]
    cutting = [axis for axis, cut in enumerate(placements) if cut is not None]
    shards = int(np.prod([ranks.shape[axis] for axis in cutting], dtype=np.int64))
    table = ranks.transpose(replicating + cutting).reshape(-1, shards)
    return Grid(tuple(tuple(row) for row in table.tolist()))


def make_links(grid: Grid, seat: Seat, groups: Sequence[dist.ProcessGroup]) -> Links:
    """The groups along this rank's row and column of `grid`: those of `groups` that fit, else new ones."""
    row = grid.ranks[seat.replica]
    column = tuple(by_shard[seat.shard] for by_shard in grid.ranks)
    along = _make_link(row, groups)
    return Links(along, along, _make_link(column, groups))


def make_links_apart(grid: Grid, seat: Seat, groups: Sequence[dist.ProcessGroup]) -> Links:
    """As `make_links`, but ways there and back that nobody else uses: their order is then nobody else's business."""
    row = grid.ranks[seat.replica]
    across = make_links(grid, seat, groups).replica
    if len(row) == 1:
        return Links(None, None, across)
    return Links(_order(row, _join(row, groups, "there")), _order(row, _join(row, groups, "back")), across)


def _make_link(ranks: tuple[int, ...], groups: Sequence[dist.ProcessGroup]) -> Link | None:
    if len(ranks) == 1:
        return None
    known = [*groups, dist.group.WORLD]
    group = next((g for g in known if set(dist.get_process_group_ranks(g)) == set(ranks)), None)
    return _order(ranks, group or _join(ranks, groups, "joined"))


def _order(ranks: tuple[int, ...], group: dist.ProcessGroup) -> Link:
    places = {rank: place for place, rank in enumerate(ranks)}
    return Link(group, tuple(places[rank] for rank in dist.get_process_group_ranks(group)))


_Joined = dict[tuple[str, tuple[int, ...]], dist.ProcessGroup]
_JOINED: WeakKeyDictionary[dist.ProcessGroup, _Joined] = WeakKeyDictionary()


def _join(ranks: tuple[int, ...], groups: Sequence[dist.ProcessGroup], purpose: str) -> dist.ProcessGroup:
    """A group of `ranks` for one purpose. Made once for each world, by all ranks that `groups` reach at once."""
    world = dist.group.WORLD
    assert world is not None
    joined = _JOINED.setdefault(world, {})
    key = purpose, tuple(sorted(ranks))
    memberships = _most(_torch.memberships(), groups)
    if key not in joined:
        joined[key] = _new_group(list(key[1]), memberships, _torch.group_timeout(groups[0]))
    return joined[key]


def _new_group(ranks: list[int], memberships: int, timeout: timedelta | None) -> dist.ProcessGroup:
    """A group made by its members alone.

    Each finds the others by a name that torch makes of `ranks` and of the number of groups that the process is in: who
    is in fewer than the others would wait for ever, and so joins groups of its own until it is in as many.
    """
    own = [
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
        for _ in range(memberships - _torch.memberships())
    ]
    group = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
    for dummy in own:
        dist.destroy_process_group(dummy)
    return group


def _most(value: int, groups: Sequence[dist.ProcessGroup]) -> int:
    """The largest of the values of all ranks that `groups` reach."""
    for group in groups:
        values: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(values, value, group=group)
        value = max(values)
    return value


def _check_shard(tensor: Tensor, residence: Residence) -> None:
    seat = residence.grid.seats[dist.get_rank()]
    expected, found = residence.layout.local_shape(seat.shard), tuple(local_part(tensor).shape)
    if found != expected and (0 not in found or 0 not in expected):  # FSDP2 leaves no dim of an empty shard
        raise ValueError(
            f"holds a shard of shape {found}, but placements and global shape {tuple(tensor.shape)} give {expected}: "
            "make it with distribute_tensor, or give DTensor.from_local the global shape"
        )
