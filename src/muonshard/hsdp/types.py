"""The plain data of the shard layer: layouts, gather stages, a parameter's shards, groups that communicate alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch.distributed as dist
from torch import Tensor

from muonshard.hsdp.splits import Piece, Run, Shape, contiguous_pieces, interleaved_pieces, merge_runs


@dataclass(frozen=True)
class ParamLayoutSpec:
    """How a tensor lies on a mesh.

    Attributes:
        tensor_ndim: dims of the tensor.
        shard_axes: (mesh_dim, tensor_dim) for each mesh dim that cuts the tensor, in the order in which shards are put
            together again. Cuts of different dims come in mesh order; of those of one dim the last made comes first, so
            `(Shard(0), Shard(0))` is ((1, 0), (0, 0)), and FSDP2 over tensor parallel is ((0, 0), (1, 0)).
            Negative tensor dims are counted from the end.
        replicate_mesh_dims: mesh dims over which the tensor is replicated.

    Raises:
        ValueError: a tensor dim that the tensor does not have.
    """

    tensor_ndim: int
    shard_axes: tuple[tuple[int, int], ...]
    replicate_mesh_dims: tuple[int, ...]

    def __post_init__(self) -> None:
        for mesh_dim, tensor_dim in self.shard_axes:
            if not -self.tensor_ndim <= tensor_dim < self.tensor_ndim:
                raise ValueError(
                    f"shard_axes has mesh dim {mesh_dim} cut tensor dim {tensor_dim}, "
                    f"but the tensor has {self.tensor_ndim} dims: name one of them"
                )
        axes = tuple((mesh_dim, tensor_dim % self.tensor_ndim) for mesh_dim, tensor_dim in self.shard_axes)
        object.__setattr__(self, "shard_axes", axes)

    @property
    def shard_mesh_dims(self) -> tuple[int, ...]:
        """The mesh dims that cut the tensor, in gather order."""
        return tuple(mesh_dim for mesh_dim, _ in self.shard_axes)

    @property
    def shard_tensor_dims(self) -> tuple[int, ...]:
        """The tensor dim that each of `shard_mesh_dims` cuts."""
        return tuple(tensor_dim for _, tensor_dim in self.shard_axes)

    @property
    def is_last2d_sharded(self) -> bool:
        """Whether the last two dims, those of the matrices, are cut."""
        return any(tensor_dim >= self.tensor_ndim - 2 for tensor_dim in self.shard_tensor_dims)

    def split_factor(self, axis: int) -> int:
        """Into how many pieces the dim of `shard_axes[axis]` was cut before each was shared out over the axis."""
        return 1


@dataclass(frozen=True)
class StridedParamLayoutSpec(ParamLayoutSpec):
    """A layout with `_StridedShard` placements that no order of the mesh dims explains.

    Attributes:
        split_factors: the split factor of each of `shard_axes`.
    """

    split_factors: tuple[int, ...]

    def split_factor(self, axis: int) -> int:
        return self.split_factors[axis]


@dataclass(frozen=True)
class ParamShardStageMeta:
    """One gather stage of one parameter: what the ranks of one mesh axis put together.

    Attributes:
        tensor_dim: the dim along which the shares are joined.
        shard_size: number of ranks of the axis.
        cur_rank_in_shard_group: this rank's place among them.
        rank_shapes: the shape that each of them really holds on entering the stage.
        split_sizes: those shapes along `tensor_dim`.
        pad_shape: their elementwise maximum.
    """

    tensor_dim: int
    shard_size: int
    cur_rank_in_shard_group: int
    rank_shapes: tuple[Shape, ...]
    split_sizes: Shape
    pad_shape: Shape

    @cached_property
    def whole_shape(self) -> Shape:
        """What every rank of the axis holds after the stage."""
        whole = list(self.pad_shape)  # a rank that holds nothing may not know the other dims
        whole[self.tensor_dim] = sum(self.split_sizes)
        return tuple(whole)

    @cached_property
    def pieces(self) -> list[list[Piece]]:
        """For each rank, where its share lies in the whole."""
        return contiguous_pieces(self.split_sizes)

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """All pieces, those of ranks that hold alike as one."""
        return merge_runs(self.pieces, self.rank_shapes)


@dataclass(frozen=True)
class StridedParamShardStageMeta(ParamShardStageMeta):
    """A stage whose ranks each hold a chunk of each of `split_factor` pieces of the dim."""

    split_factor: int

    @cached_property
    def pieces(self) -> list[list[Piece]]:
        return interleaved_pieces(sum(self.split_sizes), self.shard_size, self.split_factor)


def make_stage(tensor_dim: int, cur_rank: int, rank_shapes: Sequence[Shape], split_factor: int) -> ParamShardStageMeta:
    """The stage at which ranks that hold `rank_shapes` meet."""
    shapes = tuple(rank_shapes)
    sizes = tuple(shape[tensor_dim] for shape in shapes)
    padded = tuple(max(column) for column in zip(*shapes, strict=True))
    if split_factor == 1:
        return ParamShardStageMeta(tensor_dim, len(shapes), cur_rank, shapes, sizes, padded)
    return StridedParamShardStageMeta(tensor_dim, len(shapes), cur_rank, shapes, sizes, padded, split_factor)


@dataclass(frozen=True)
class ParamShardMeta:
    """One parameter's shards as this rank sees them: the stages run from `local_shape` to `global_shape`."""

    global_shape: Shape
    global_numel: int
    local_shape: Shape
    local_numel: int
    stage_metas: tuple[ParamShardStageMeta, ...]


@dataclass(frozen=True, eq=False)
class ParamRecord:
    """A parameter, its place in the list that the caller grouped, and its shards once they are known."""

    index: int
    param: Tensor
    shard_meta: ParamShardMeta | None = None


@dataclass(frozen=True)
class CommDomainKey:
    """The ranks of a mesh, and which of its dims replicate and which cut."""

    mesh_shape: Shape
    mesh_rank_list: tuple[int, ...]
    replicate_mesh_dims: tuple[int, ...]
    shard_mesh_dims: tuple[int, ...]


@dataclass
class HSDPCommGroup:
    """Parameters of one mesh, one number of dims and one layout: what can travel in one fused collective.

    Attributes:
        comm_key: the mesh and the roles of its dims.
        layout_spec: the layout of every parameter here.
        replicate_pgs: a process group for each of `layout_spec.replicate_mesh_dims`.
        shard_pgs: a process group for each of `layout_spec.shard_axes`.
        records: the parameters.
    """

    comm_key: CommDomainKey
    layout_spec: ParamLayoutSpec
    replicate_pgs: tuple[dist.ProcessGroup, ...] = ()
    shard_pgs: tuple[dist.ProcessGroup, ...] = ()
    records: list[ParamRecord] = field(default_factory=list)

    @property
    def params(self) -> list[Tensor]:
        """The parameters, in the order they were added."""
        return [record.param for record in self.records]

    def add_param(self, index: int, param: Tensor) -> None:
        """Add the parameter at `index` of the caller's list."""
        self.records.append(ParamRecord(index, param))

    def __len__(self) -> int:
        return len(self.records)
