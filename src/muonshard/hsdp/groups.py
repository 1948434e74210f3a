"""Which parameters can travel together, and which replica works on which of them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

from torch import Tensor

from muonshard.hsdp.placements import DTensorLike, as_dtensor, make_layout_spec
from muonshard.hsdp.types import CommDomainKey, HSDPCommGroup, ParamLayoutSpec, ParamRecord


def group_parameters_for_hsdp(params: Iterable[Tensor]) -> tuple[list[Tensor], list[HSDPCommGroup]]:
    """Parameters that no other rank has a part in, and groups of the others by mesh, number of dims and layout.

    Fully local are plain tensors, and DTensors on a mesh of one rank. A record's `index` is the parameter's place in
    `params`. Groups stand in the order of their first parameters, so ranks that pass the same list get the same groups.

    Raises:
        ValueError: a placement that is neither a shard nor a replica, or a mesh that this rank is not part of.
    """
    local: list[Tensor] = []
    groups: dict[Any, HSDPCommGroup] = {}
    for index, param in enumerate(params):
        dtensor = as_dtensor(param)
        if dtensor is None or math.prod(dtensor.device_mesh.shape) == 1:
            local.append(param)
            continue
        mesh = dtensor.device_mesh
        if mesh.get_coordinate() is None:
            raise ValueError(f"params[{index}] lives on {mesh}, which this rank is not part of: leave it out here")
        try:
            layout = make_layout_spec(dtensor)
        except ValueError as error:
            raise ValueError(f"params[{index}] of shape {tuple(param.shape)}: {error}") from None
        key = _comm_key(dtensor, layout)
        place = (key, layout, mesh.device_type)
        if place not in groups:
            groups[place] = HSDPCommGroup(
                key,
                layout,
                tuple(mesh.get_group(mesh_dim) for mesh_dim in layout.replicate_mesh_dims),
                tuple(mesh.get_group(mesh_dim) for mesh_dim in layout.shard_mesh_dims),
            )
        groups[place].add_param(index, param)
    return local, list(groups.values())


def _comm_key(tensor: DTensorLike, layout: ParamLayoutSpec) -> CommDomainKey:
    mesh = tensor.device_mesh
    return CommDomainKey(
        tuple(mesh.shape),
        tuple(mesh.mesh.flatten().tolist()),
        layout.replicate_mesh_dims,
        tuple(sorted(layout.shard_mesh_dims)),
    )


def build_owner_by_size(records: Sequence[ParamRecord], replicate_sizes: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """For each record's index the coordinate, on a grid of `replicate_sizes`, that works on it.

    Longest first (Graham, "Bounds on multiprocessing timing anomalies", 1969): the largest parameter left goes to the
    coordinate with the fewest elements so far, the first of equals in row-major order. The same on every rank.

    Raises:
        ValueError: a grid without coordinates.
    """
    if any(size < 1 for size in replicate_sizes):
        raise ValueError(f"replicate_sizes is {tuple(replicate_sizes)}: every size must be at least 1")
    loads = [(0, coordinate) for coordinate in product(*(range(size) for size in replicate_sizes))]
    owners: dict[int, tuple[int, ...]] = {}
    for numel, index in sorted((-math.prod(record.param.shape), record.index) for record in records):
        load, coordinate = loads[0]
        owners[index] = coordinate
        heapq.heapreplace(loads, (load - numel, coordinate))
    return owners
