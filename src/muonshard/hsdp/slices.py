"""This rank's side of an update: what it puts into the communication, and the slice of the result that is its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from muonshard.hsdp.placements import as_dtensor, to_local_if_dtensor
from muonshard.hsdp.splits import Shape, share_sizes
from muonshard.hsdp.types import ParamLayoutSpec, ParamRecord, ParamShardMeta, ParamShardStageMeta, make_stage


@torch.no_grad()
def build_pad_ns_inputs(
    comm_params: Sequence[Tensor | ParamRecord],
    param_to_ns_input: Mapping[Tensor, Tensor | None],
    param_shard_metadata: Mapping[Tensor, ParamShardMeta] | None = None,
) -> list[Tensor]:
    """An input for every parameter of a communication, in order, so that all ranks send alike.

    Args:
        comm_params: the parameters, or their records.
        param_to_ns_input: this rank's inputs (a DTensor gives its shard); a parameter may be missing or None.
        param_shard_metadata: where known.

    Returns:
        The input given, else zeros of this rank's local shape, from the metadata, the record's (or parameter's own)
        `shard_meta`, or the parameter's data. Zeros are of the dtype and on the device of the inputs given, or, where
        none is, of each parameter.

    Raises:
        ValueError: inputs of several dtypes, or of another shape than the shard they stand for.
    """
    known = param_shard_metadata or {}
    params = [entry.param if isinstance(entry, ParamRecord) else entry for entry in comm_params]
    given = [
        None if (found := param_to_ns_input.get(param)) is None else to_local_if_dtensor(found) for param in params
    ]
    like = next((tensor for tensor in given if tensor is not None), None)
    inputs = []
    for place, (entry, param, tensor) in enumerate(zip(comm_params, params, given, strict=True)):
        shard = to_local_if_dtensor(param)
        meta: ParamShardMeta | None = known.get(param) or getattr(entry, "shard_meta", None)
        shape = tuple(shard.shape) if meta is None else meta.local_shape
        if tensor is None:
            tensor = (shard if like is None else like).new_zeros(shape)
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"the input of comm_params[{place}] has shape {tuple(tensor.shape)}, but this rank's shard is {shape}: "
                "give its own momentum"
            )
        if like is not None and tensor.dtype != like.dtype:
            raise ValueError(
                f"the input of comm_params[{place}] is {tensor.dtype}, but others are {like.dtype}: use one dtype"
            )
        inputs.append(tensor)
    return inputs


@torch.no_grad()
def chunk_update_by_layout(
    global_update: Tensor,
    param: Tensor,
    layout_spec: ParamLayoutSpec,
    param_shard_meta: ParamShardMeta | None = None,
) -> Tensor:
    """This rank's slice of a full update: contiguous, and a view of the update where that is possible.

    Args:
        global_update: of the global shape of `param`.
        param: the parameter that the update is for.
        layout_spec: its layout.
        param_shard_meta: its shards; without it, torch's chunk rule says what this rank holds.

    Raises:
        ValueError: an update of another shape than the parameter's, or a slice of another shape than this rank's shard.
    """
    found, expected = tuple(global_update.shape), tuple(param.shape)
    if param_shard_meta is not None:
        expected, stages = param_shard_meta.global_shape, param_shard_meta.stage_metas
    else:
        stages = _stages_by_rule(expected, layout_spec, *_mesh_place(param, layout_spec))
    if found != expected:
        raise ValueError(f"global_update has shape {found}, but the parameter has {expected}: pass the whole update")
    update = global_update
    for stage in reversed(stages):
        update = _own_share(update, stage)
    shard = to_local_if_dtensor(param)
    if update.shape != shard.shape and (update.numel() or shard.numel()):
        raise ValueError(
            f"this rank's slice has shape {tuple(update.shape)}, but its shard of the parameter of shape {expected} "
            f"has {tuple(shard.shape)}: pass param_shard_meta, built since the shards last changed"
        )
    return update.reshape(shard.shape).contiguous()


def _own_share(whole: Tensor, stage: ParamShardStageMeta) -> Tensor:
    pieces = [
        whole.narrow(stage.tensor_dim, piece.whole_start, piece.length)
        for piece in stage.pieces[stage.cur_rank_in_shard_group]
    ]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, stage.tensor_dim)


def _mesh_place(param: Tensor, layout_spec: ParamLayoutSpec) -> tuple[Shape, Shape]:
    """The sizes of the shard axes, and this rank's coordinate on each."""
    if not layout_spec.shard_axes:
        return (), ()
    dtensor = as_dtensor(param)
    if dtensor is None:
        raise ValueError("param is not a DTensor, so nothing tells its mesh: pass param_shard_meta")
    mesh, mesh_dims = dtensor.device_mesh, layout_spec.shard_mesh_dims
    coordinate = mesh.get_coordinate()
    return tuple(mesh.shape[dim] for dim in mesh_dims), tuple(coordinate[dim] for dim in mesh_dims)


@lru_cache(maxsize=4096)
def _stages_by_rule(
    global_shape: Shape, layout_spec: ParamLayoutSpec, sizes: Shape, coordinates: Shape
) -> tuple[ParamShardStageMeta, ...]:
    """The stages of a tensor that was cut by torch's chunk rule."""
    stages = []
    shape = global_shape
    axes = list(zip(range(len(sizes)), layout_spec.shard_tensor_dims, sizes, coordinates, strict=True))
    for axis, dim, size, coordinate in reversed(axes):
        factor = layout_spec.split_factor(axis)
        shares = [(*shape[:dim], length, *shape[dim + 1 :]) for length in share_sizes(shape[dim], size, factor)]
        stages.append(make_stage(dim, coordinate, shares, factor))
        shape = shares[coordinate]
    return tuple(reversed(stages))
