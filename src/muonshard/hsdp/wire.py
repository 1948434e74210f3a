"""The wire of the fused all-gather: one buffer of bytes for each stage, and where every tensor lies in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import prod
from operator import mul

import torch
import torch.distributed as dist
from torch import Tensor

from muonshard.hsdp.splits import Shape
from muonshard.hsdp.types import ParamShardStageMeta

ALIGNMENT = 512
"""Bytes to which every tensor's offset on the wire is aligned."""

BufferCache = dict[tuple[torch.device, int], Tensor]
"""Bytes to reuse from call to call, by device and place; a buffer that has become too small is replaced."""


def all_gather(received: Tensor, sent: Tensor, group: dist.ProcessGroup) -> None:
    """Fill `received` with what every rank of `group` sends, in rank order."""
    # torch 2.13 renamed the function, and warns about the old name
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(received, sent, group=group)


@dataclass(frozen=True)
class Stage:
    """One gather of the fused call: the axis' group, and the stage of every tensor.

    Attributes:
        group: the process group of the axis.
        metas: what its ranks hold of each tensor.
        offsets: where each tensor begins in a rank's part of the wire, in elements.
        stride: elements of a rank's part.
    """

    group: dist.ProcessGroup
    metas: Sequence[ParamShardStageMeta]
    offsets: Sequence[int]
    stride: int


def make_stage_wire(group: dist.ProcessGroup, metas: Sequence[ParamShardStageMeta], itemsize: int) -> Stage:
    """Lay the tensors' padded shards end to end, each from a multiple of 512 bytes on.

    Where all are empty a rank's part is one block all the same, so that every rank runs the same collectives.
    """
    block = ALIGNMENT // itemsize
    ends = list(accumulate((-(-prod(meta.pad_shape) // block) * block for meta in metas), initial=0))
    return Stage(group, metas, ends[:-1], ends[-1] or block)


def take_buffer(cache: BufferCache, place: int, elements: int, like: Tensor) -> Tensor:
    """A flat buffer of `elements` with the dtype and device of `like`, from `cache` when that holds enough bytes."""
    size = elements * like.element_size()
    buffer = cache.get((like.device, place))
    if buffer is None or buffer.numel() < size:
        buffer = cache[like.device, place] = torch.empty(size, dtype=torch.uint8, device=like.device)
    return buffer[:size].view(like.dtype)


@lru_cache(maxsize=4096)
def strides_of(shape: Shape) -> Shape:
    """The strides of a contiguous tensor of at least one dim."""
    return tuple(accumulate(reversed(shape[1:]), mul, initial=1))[::-1]


def unpack_views(
    wire: Tensor, stage: Stage, place: int, target: Tensor, target_offset: int
) -> list[tuple[Tensor, Tensor]]:
    """(target, source) views that put tensor `place` together from `wire`, contiguous in `target` from an offset on."""
    meta, offset = stage.metas[place], stage.offsets[place]
    dim = meta.tensor_dim
    whole_strides = strides_of(meta.whole_shape)
    pairs = []
    for run in meta.runs:
        share_strides = strides_of(run.share_shape)
        shape = (run.ranks, *run.share_shape[:dim], run.length, *run.share_shape[dim + 1 :])
        first = run.first_rank * stage.stride + offset + run.share_start * share_strides[dim]
        start = target_offset + run.whole_start * whole_strides[dim]
        pairs.append(
            (
                target.as_strided(shape, (run.length * whole_strides[dim], *whole_strides), start),
                wire.as_strided(shape, (stage.stride, *share_strides), first),
            )
        )
    return pairs
