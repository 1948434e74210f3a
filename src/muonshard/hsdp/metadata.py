"""What every rank of a shard group really holds of each parameter, learned with one collective for each mesh axis."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from itertools import product
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from muonshard.hsdp.placements import Cut, as_dtensor, read_cuts, shape_by_rule, to_local_if_dtensor
from muonshard.hsdp.splits import Shape, share_sizes
from muonshard.hsdp.types import HSDPCommGroup, ParamLayoutSpec, ParamShardMeta, ParamShardStageMeta, make_stage
from muonshard.hsdp.wire import all_gather

logger = logging.getLogger(__name__)


class Fault(IntEnum):
    """Why shards do not make up a parameter. It travels with the shapes, so that every rank raises the same error."""

    NONE = 0
    NO_GRID = 1
    NOT_BY_FACTOR = 2
    OTHER_ORDER = 3


REASONS = {
    Fault.NO_GRID: "its shards do not fit together: along a mesh axis they may differ only in the dim that it cuts",
    Fault.NOT_BY_FACTOR: "its shards are not shared out as its split factor says",
    Fault.OTHER_ORDER: "its shards were cut left to right, but its placements tell another order, as after FSDP2 over "
    "tensor parallel; torch itself cannot gather such a tensor",
}


def make_param_shard_meta(param: Tensor, stage_metas: Sequence[ParamShardStageMeta]) -> ParamShardMeta:
    """The metadata of `param` on this rank, with the stages that lead from its local shape to its global one."""
    global_shape, local_shape = tuple(param.shape), tuple(to_local_if_dtensor(param).shape)
    return ParamShardMeta(global_shape, prod(global_shape), local_shape, prod(local_shape), tuple(stage_metas))


def build_param_shard_metadata_for_group(hsdp_group: HSDPCommGroup) -> dict[Tensor, ParamShardMeta]:
    """Learn the real local shapes along every shard axis, and put the metadata on the group's records too.

    One all-gather of P x (tensor_ndim + 1) int64 for each axis of more than one rank, for all P parameters together.
    Every rank of the shard group must call this with the same parameters in the same order.

    Raises:
        ValueError: shards that do not make up the parameter; on every rank of the shard group, after the collectives.
    """
    spec, params = hsdp_group.layout_spec, hsdp_group.params
    if not params:
        return {}
    shapes = [tuple(to_local_if_dtensor(param).shape) for param in params]
    faults = [_fault_of_order(param, spec) for param in params]
    stages: list[list[ParamShardStageMeta]] = [[] for _ in params]
    # where the groups communicate: offloaded shards lie elsewhere
    device = getattr(getattr(params[0], "device_mesh", None), "device_type", None)
    for axis, (tensor_dim, group) in enumerate(zip(spec.shard_tensor_dims, hsdp_group.shard_pgs, strict=True)):
        factor, rank = spec.split_factor(axis), dist.get_rank(group)
        rows = [(*shape, fault) for shape, fault in zip(shapes, faults, strict=True)]
        gathered = _gather_rows(rows, group, device)
        for place, by_rank in enumerate(zip(*gathered, strict=True)):
            stage = make_stage(tensor_dim, rank, [tuple(row[:-1]) for row in by_rank], factor)
            stages[place].append(stage)
            shapes[place] = stage.whole_shape
            faults[place] = Fault(max(row[-1] for row in by_rank)) or _fault_of(stage, factor)
    for record, shape, fault in zip(hsdp_group.records, shapes, faults, strict=True):
        _check(record.index, record.param, shape, fault)
    metas = {pair[0]: make_param_shard_meta(*pair) for pair in zip(params, stages, strict=True)}
    hsdp_group.records[:] = [replace(record, shard_meta=metas[record.param]) for record in hsdp_group.records]
    return metas


def _gather_rows(rows: list[tuple[int, ...]], group: dist.ProcessGroup, device: str | None) -> list[list[list[int]]]:
    """[rank][parameter][value]: the rows of every rank of `group`."""
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return [[list(row) for row in rows]] * ranks
    mine = torch.tensor(rows, dtype=torch.int64, device=device)
    table = torch.empty((ranks, *mine.shape), dtype=torch.int64, device=device)
    all_gather(table.view(-1), mine.view(-1), group)
    return table.tolist()


def _fault_of_order(param: Tensor, spec: ParamLayoutSpec) -> Fault:
    """Whether this rank's shard has the shape of cuts made in mesh order, where that is not the order of `spec`."""
    dtensor = as_dtensor(param)
    if dtensor is None:
        return Fault.NONE
    mesh_shape, coordinate = tuple(dtensor.device_mesh.shape), dtensor.device_mesh.get_coordinate()
    in_spec_order = [Cut(*pair, spec.split_factor(axis)) for axis, pair in reversed(list(enumerate(spec.shard_axes)))]
    told, left_to_right = (
        shape_by_rule(tuple(param.shape), cuts, mesh_shape, coordinate) for cuts in (in_spec_order, read_cuts(dtensor))
    )
    return Fault.OTHER_ORDER if told != left_to_right == tuple(dtensor.to_local().shape) else Fault.NONE


def _fault_of(stage: ParamShardStageMeta, split_factor: int) -> Fault:
    dim = stage.tensor_dim
    for shape in stage.rank_shapes:
        # FSDP2 gives a rank that tensor parallel left nothing a shard of size 0 in every dim
        if shape[dim] and (*shape[:dim], *shape[dim + 1 :]) != (*stage.pad_shape[:dim], *stage.pad_shape[dim + 1 :]):
            return Fault.NO_GRID
    if split_factor != 1 and stage.split_sizes != share_sizes(sum(stage.split_sizes), stage.shard_size, split_factor):
        return Fault.NOT_BY_FACTOR
    return Fault.NONE


def _check(index: int, param: Tensor, gathered_shape: Shape, fault: Fault) -> None:
    if fault is Fault.NONE and gathered_shape == tuple(param.shape):
        return
    reason = REASONS.get(fault, f"its shards together make up {gathered_shape}")
    raise ValueError(
        f"parameter {index} of global shape {tuple(param.shape)} and placements {getattr(param, 'placements', None)}, "
        f"here with a shard of shape {tuple(to_local_if_dtensor(param).shape)}: {reason}; "
        "make it with distribute_tensor or fully_shard, or redistribute it"
    )


def log_param_shard_metadata(hsdp_group: HSDPCommGroup, param_to_meta: Mapping[Tensor, ParamShardMeta]) -> None:
    """Log each parameter's name, placements, mesh shape, global shape and kinds of local shapes, on rank 0 at DEBUG.

    Without distributed processes this process is rank 0. A parameter's name is its `name`, where it has one, else its
    index.
    """
    if not logger.isEnabledFor(logging.DEBUG) or (dist.is_initialized() and dist.get_rank() != 0):
        return
    for record in hsdp_group.records:
        meta = param_to_meta[record.param]
        logger.debug(
            "%s: placements %s, mesh %s, global shape %s, local shapes %s",
            getattr(record.param, "name", None) or f"parameter {record.index}",
            getattr(record.param, "placements", None),
            hsdp_group.comm_key.mesh_shape,
            meta.global_shape,
            local_shape_kinds(meta, hsdp_group.layout_spec),
        )


def local_shape_kinds(meta: ParamShardMeta, layout_spec: ParamLayoutSpec) -> list[Shape]:
    """The distinct local shapes of all ranks, the largest first.

    Along the axes of this rank they are the real ones. Where another axis has cut the same dim before, those on its
    other coordinates follow torch's chunk rule.
    """
    kinds = [{size} for size in meta.global_shape]
    for axis, stage in reversed(list(enumerate(meta.stage_metas))):
        mine = sum(stage.split_sizes)
        others = kinds[stage.tensor_dim] - {mine}
        cut = [share_sizes(size, stage.shard_size, layout_spec.split_factor(axis)) for size in others]
        kinds[stage.tensor_dim] = set(stage.split_sizes).union(*cut)
    return sorted(product(*kinds), reverse=True)
