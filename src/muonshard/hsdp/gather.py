"""Whole tensors from shards: one all-gather for each mesh axis, however many tensors there are.

Shards are packed into this rank's part of a wire, and the gather fills in the other ranks' parts. Unpacking the wire of
one axis packs that of the next; unpacking the last makes the outputs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from muonshard import _torch
from muonshard.hsdp.placements import to_local_if_dtensor
from muonshard.hsdp.splits import Shape, share_sizes
from muonshard.hsdp.types import ParamLayoutSpec, ParamShardMeta, ParamShardStageMeta, make_stage
from muonshard.hsdp.wire import BufferCache, Stage, all_gather, make_stage_wire, strides_of, take_buffer, unpack_views


@torch.no_grad()
def fused_allgather_dtensor_params(
    local_tensors: Sequence[Tensor],
    shard_pgs: Sequence[dist.ProcessGroup],
    layout_spec: ParamLayoutSpec,
    param_shard_metadata: Mapping[Tensor, ParamShardMeta] | Sequence[ParamShardMeta] | None = None,
    buffer_cache: BufferCache | None = None,
    keep_indices: Collection[int] | None = None,
) -> list[Tensor | None]:
    """Put whole tensors together from the shards of all ranks, with one all-gather for each shard axis.

    Every rank of the shard groups must call this with tensors of the same dtype in the same order. An axis of one rank
    costs nothing, and where all are so, or there is none, the results are the tensors given.

    Args:
        local_tensors: this rank's shards (or DTensors, whose shards are taken), of one dtype and on one device.
        shard_pgs: the group of each of `layout_spec.shard_axes`.
        layout_spec: the layout of all the tensors.
        param_shard_metadata: the metadata of each tensor, in order, or a mapping whose values are. Without it all ranks
            must hold shards of the same shape.
        buffer_cache: where to look for wire buffers, and to leave them. Calls that share it must not overlap.
        keep_indices: places in `local_tensors` whose whole tensors are wanted here; the others come back as None.

    Returns:
        A new contiguous tensor for each place, which shares no memory with the buffers.

    Raises:
        ValueError: arguments that do not fit each other. It is raised before any collective, on this rank alone if only
            this rank's arguments are wrong: the other ranks then wait in the collective until this process ends or the
            timeout of their group passes.
    """
    shards = [to_local_if_dtensor(tensor) for tensor in local_tensors]
    _check_tensors(shards, layout_spec)
    kept = range(len(shards)) if keep_indices is None else _check_kept(keep_indices, len(shards))
    if len(shard_pgs) != len(layout_spec.shard_axes):
        raise ValueError(
            f"shard_pgs has {len(shard_pgs)} groups, but layout_spec has {len(layout_spec.shard_axes)} shard axes: "
            "give one group for each, in the same order"
        )
    active = [(axis, group) for axis, group in enumerate(shard_pgs) if dist.get_world_size(group) > 1]
    if not active or not shards:
        return [shard if place in kept else None for place, shard in enumerate(shards)]
    stages_of_each = _stages_of_each(shards, shard_pgs, layout_spec, param_shard_metadata)
    itemsize = shards[0].element_size()
    stages = [make_stage_wire(group, [metas[axis] for metas in stages_of_each], itemsize) for axis, group in active]
    wire = _gather(shards, stages, {} if buffer_cache is None else buffer_cache)
    return _unpack(wire, stages[-1], shards, kept)


def _gather(shards: Sequence[Tensor], stages: Sequence[Stage], cache: BufferCache) -> Tensor:
    """Pack, gather along each axis in turn, and return the wire of the last."""
    wire = shards[0]
    for step, stage in enumerate(stages):
        ranks, rank = dist.get_world_size(stage.group), dist.get_rank(stage.group)
        received = take_buffer(cache, step % 2, ranks * stage.stride, shards[0])
        start = rank * stage.stride
        if step == 0:
            pairs = [
                (received.as_strided(shard.shape, strides_of(tuple(shard.shape)), start + offset), shard)
                for shard, offset in zip(shards, stage.offsets, strict=True)
            ]
        else:
            before = stages[step - 1]
            pairs = [
                pair
                for place, offset in enumerate(stage.offsets)
                for pair in unpack_views(wire, before, place, received, start + offset)
            ]
        _copy(pairs)
        mine = received[start : start + stage.stride]
        all_gather(received.view(torch.uint8), mine.view(torch.uint8), stage.group)
        wire = received
    return wire


def _unpack(wire: Tensor, stage: Stage, shards: Sequence[Tensor], kept: Collection[int]) -> list[Tensor | None]:
    outputs: list[Tensor | None] = [None] * len(shards)
    pairs = []
    for place in kept:
        output = shards[place].new_empty(stage.metas[place].whole_shape)
        pairs += unpack_views(wire, stage, place, output, 0)
        outputs[place] = output
    _copy(pairs)
    return outputs


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    _torch.foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


def _check_tensors(shards: Sequence[Tensor], layout_spec: ParamLayoutSpec) -> None:
    for place, shard in enumerate(shards):
        if shard.ndim != layout_spec.tensor_ndim:
            raise ValueError(
                f"local_tensors[{place}] has shape {tuple(shard.shape)}, but layout_spec is of tensors with "
                f"{layout_spec.tensor_ndim} dims: gather tensors of another number of dims by themselves"
            )
        if (shard.dtype, shard.device) != (shards[0].dtype, shards[0].device):
            raise ValueError(
                f"local_tensors[{place}] is {shard.dtype} on {shard.device}, but local_tensors[0] is {shards[0].dtype} "
                f"on {shards[0].device}: one call gathers one dtype on one device, so call once for each"
            )


def _check_kept(keep_indices: Collection[int], count: int) -> set[int]:
    wrong = sorted(index for index in keep_indices if not 0 <= index < count)
    if wrong:
        raise ValueError(f"keep_indices has {wrong}, but there are {count} local_tensors: count from 0")
    return set(keep_indices)


def _stages_of_each(
    shards: Sequence[Tensor],
    shard_pgs: Sequence[dist.ProcessGroup],
    layout_spec: ParamLayoutSpec,
    param_shard_metadata: Mapping[Tensor, ParamShardMeta] | Sequence[ParamShardMeta] | None,
) -> Sequence[Sequence[ParamShardStageMeta]]:
    """The stages of every tensor along all axes, from the metadata or as for shards that are all alike."""
    sizes = tuple(dist.get_world_size(group) for group in shard_pgs)
    ranks = tuple(dist.get_rank(group) for group in shard_pgs)
    if param_shard_metadata is None:
        return [_even_stages(tuple(shard.shape), layout_spec, sizes, ranks) for shard in shards]
    given = param_shard_metadata.values() if isinstance(param_shard_metadata, Mapping) else param_shard_metadata
    metas = list(given)
    if len(metas) != len(shards):
        raise ValueError(
            f"param_shard_metadata has {len(metas)} entries for {len(shards)} local_tensors: give one for each"
        )
    dims = layout_spec.shard_tensor_dims
    for place, (shard, meta) in enumerate(zip(shards, metas, strict=True)):
        stages = meta.stage_metas
        if tuple(shard.shape) != meta.local_shape:
            raise ValueError(
                f"local_tensors[{place}] has shape {tuple(shard.shape)}, but its metadata says {meta.local_shape}: "
                "pass this rank's whole shard, or build the metadata again if the shards have changed"
            )
        found = tuple((stage.tensor_dim, stage.shard_size, stage.cur_rank_in_shard_group) for stage in stages)
        if found != (expected := tuple(zip(dims, sizes, ranks, strict=True))):
            raise ValueError(
                f"the metadata of local_tensors[{place}] has stages with (tensor dim, ranks, this rank) {found}, but "
                f"layout_spec and shard_pgs say {expected}: build it for this group"
            )
    return [meta.stage_metas for meta in metas]


@lru_cache(maxsize=4096)
def _even_stages(
    local_shape: Shape, layout_spec: ParamLayoutSpec, sizes: tuple[int, ...], ranks: tuple[int, ...]
) -> tuple[ParamShardStageMeta, ...]:
    """The stages of a tensor of which every rank holds a shard of `local_shape`."""
    stages = []
    shape = local_shape
    for axis, (dim, size, rank) in enumerate(zip(layout_spec.shard_tensor_dims, sizes, ranks, strict=True)):
        factor = layout_spec.split_factor(axis)
        stage = make_stage(dim, rank, [shape] * size, factor)
        if stage.split_sizes != share_sizes(sum(stage.split_sizes), size, factor):
            raise ValueError(
                f"a shard of shape {local_shape} cannot be the same on all {size} ranks with split factor {factor}: "
                "pass param_shard_metadata"
            )
        stages.append(stage)
        shape = stage.whole_shape
    return tuple(stages)
