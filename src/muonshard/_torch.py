"""Every torch name that torch does not promise to keep, in one place, each behind a function of ours."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

Tensors = list[Tensor]


def foreach_lerp(starts: Tensors, ends: Tensors, weight: float) -> list[Tensor]:
    """`start.lerp(end, weight)` for each pair."""
    return list(torch._foreach_lerp(starts, ends, weight)) if starts else []


def foreach_lerp_(starts: Tensors, ends: Tensors, weight: float) -> None:
    """`start.lerp_(end, weight)` for each pair."""
    if starts:
        torch._foreach_lerp_(starts, ends, weight)


def foreach_mul_(tensors: Tensors, factor: float) -> None:
    """`tensor.mul_(factor)` for each.

    On CPU torch rounds the factor of a foreach call to the tensors' dtype first: in bfloat16, 0.9985 would become 1.
    """
    together = [tensor for tensor in tensors if tensor.dtype.itemsize > 2 or not tensor.is_cpu]
    if together:
        torch._foreach_mul_(together, factor)
    for tensor in tensors:
        if tensor.dtype.itemsize <= 2 and tensor.is_cpu:
            tensor.mul_(factor)


def foreach_add_(tensors: Tensors, others: Tensors, alpha: float) -> None:
    """`tensor.add_(other, alpha=alpha)` for each pair."""
    if tensors:
        torch._foreach_add_(tensors, others, alpha=alpha)


def foreach_copy_(targets: Tensors, sources: Tensors) -> None:
    """`target.copy_(source)` for each pair; dtypes may differ."""
    if targets:
        torch._foreach_copy_(targets, sources)


def split_factor(placement: Any) -> int:
    """1 for `Shard`; for `_StridedShard`, whose class is private, into how many pieces it splits the dim first."""
    return int(getattr(placement, "split_factor", 1))


def group_timeout(group: Any) -> timedelta | None:
    """The timeout that a process group was made with, or None where this torch does not say."""
    try:
        backend = group._get_backend(torch.device("cuda" if group.name() == "nccl" else "cpu"))
        timeout = backend.options._timeout
    except (AttributeError, RuntimeError):
        return None
    return timeout if isinstance(timeout, timedelta) else None


def memberships() -> int:
    """How many process groups this process is in; 0 where this torch does not say."""
    world = getattr(torch.distributed.distributed_c10d, "_world", None)
    return len(getattr(world, "pg_names", ()))


def load_hooks(optimizer: torch.optim.Optimizer) -> tuple[list[Any], list[Any]]:
    """What was registered to run before and after `load_state_dict`."""
    before, after = optimizer._optimizer_load_state_dict_pre_hooks, optimizer._optimizer_load_state_dict_post_hooks
    return list(before.values()), list(after.values())
