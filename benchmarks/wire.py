"""The bytes that one call of a collective makes this rank send, read off the operator's arguments.

They are the bytes that the rank must put on the wire under the usual bandwidth-optimal algorithm, in a group of W:

    all_to_all              every chunk but the rank's own
    all_gather              ring: every block but the next rank's, which is (W-1)/W of the output when blocks are even
    reduce_scatter          ring: every block but the rank's own, (W-1)/W of the input when even
    all_reduce              ring: 2 (W-1)/W of the tensor
    broadcast, reduce       chain from, or to, the root: the whole tensor, once, on every rank but the chain's last
    scatter                 the root: every chunk but its own
    gather                  every rank but the root: its tensor
    send                    the tensor
    barrier, recv           nothing
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

POINT_TO_POINT = frozenset({"send", "recv", "recv_any_source", "isend", "irecv"})

_NAMESPACES = frozenset({"c10d", "_c10d_functional", "_dtensor"})
_NOT_COMMUNICATION = frozenset({"wait_tensor", "wrap_tensor_autograd", "check_for_nan"})


def traffic_of(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[str, int, int] | None:
    """`(name, group size, bytes sent by this rank)` of a call of `func`; None if it moves nothing between ranks.

    The name is the operator's, without underscores at its ends.

    Raises:
        NotImplementedError: an operator of torch's collective namespaces that has no rule here.
    """
    if func.namespace not in _NAMESPACES:
        return None
    name = func._opname.strip("_").removesuffix("_out")
    if name in _NOT_COMMUNICATION:
        return None
    if name not in _SENT:
        raise NotImplementedError(f"no rule says how many bytes {func} sends: add it to benchmarks/wire.py")
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    group = _group(given)
    return name, group.size(), _SENT[name](given, group.rank(), group.size())


def _group(given: dict[str, Any]) -> dist.ProcessGroup:
    if "process_group" in given:
        return dist.ProcessGroup.unbox(given["process_group"])
    name: Any = given["group_name"]
    return c10d._resolve_process_group(name) if isinstance(name, str) else name  # type: ignore[attr-defined,arg-type]


def _bytes(tensors: Any) -> int:
    """Bytes of a tensor, or of all tensors in nested sequences."""
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(_bytes(inner) for inner in tensors)


def _first(given: dict[str, Any], *names: str) -> Any:
    return next(given[name] for name in names if name in given)


def _input(given: dict[str, Any]) -> Any:
    return _first(given, "input", "inputs", "input_tensor", "input_tensors", "input_list", "tensor", "tensors")


def _every_block_but(blocks: Sequence[Any], left_out: int) -> int:
    return sum(_bytes(block) for index, block in enumerate(blocks) if index != left_out)


def _nothing(given: dict[str, Any], rank: int, world: int) -> int:
    return 0


def _whole(given: dict[str, Any], rank: int, world: int) -> int:
    return _bytes(_input(given))


def _all_gather(given: dict[str, Any], rank: int, world: int) -> int:
    """The input is this rank's block; all blocks have its size."""
    return (world - 1) * _bytes(_input(given))


def _all_gather_lists(given: dict[str, Any], rank: int, world: int) -> int:
    """The output is, for each input tensor, one block per rank; blocks may differ in size."""
    outputs = _first(given, "output_tensors", "output_lists")
    return sum(_every_block_but(blocks, (rank + 1) % world) for blocks in outputs)


def _reduce_scatter(given: dict[str, Any], rank: int, world: int) -> int:
    """The input is one block per rank, in one tensor; all have the same size."""
    return (world - 1) * _bytes(_input(given)) // world


def _reduce_scatter_lists(given: dict[str, Any], rank: int, world: int) -> int:
    return sum(_every_block_but(blocks, rank) for blocks in given["input_tensors"])


def _all_reduce(given: dict[str, Any], rank: int, world: int) -> int:
    return -(-2 * (world - 1) * _bytes(_input(given)) // world)


def _broadcast(given: dict[str, Any], rank: int, world: int) -> int:
    root = _first(given, "root_rank", "src")
    return 0 if rank == (root - 1) % world else _bytes(_input(given))


def _to_root(given: dict[str, Any], rank: int, world: int) -> int:
    return 0 if rank == given["root_rank"] else _bytes(_input(given))


def _scatter(given: dict[str, Any], rank: int, world: int) -> int:
    return sum(_every_block_but(blocks, rank) for blocks in given["input_tensors"])  # empty but on the root


def _all_to_all(given: dict[str, Any], rank: int, world: int) -> int:
    """One tensor, cut along its first dim by `input_split_sizes`; none given means even chunks."""
    tensor = _input(given)
    splits = given.get("input_split_sizes")
    if not splits:
        return _reduce_scatter(given, rank, world)
    row = _bytes(tensor) // max(tensor.shape[0], 1)
    return row * (sum(splits) - splits[rank])


def _all_to_all_lists(given: dict[str, Any], rank: int, world: int) -> int:
    return _every_block_but(given["input_tensors"], rank)


_Rule = Callable[[dict[str, Any], int, int], int]
_SENT: dict[str, _Rule] = {
    "alltoall_base": _all_to_all,
    "all_to_all_single": _all_to_all,
    "shard_dim_alltoall": _reduce_scatter,
    "alltoall": _all_to_all_lists,
    "allgather_base": _all_gather,
    "allgather_into_tensor_coalesced": _all_gather,
    "all_gather_into_tensor": _all_gather,
    "all_gather_into_tensor_coalesced": _all_gather,
    "allgather": _all_gather_lists,
    "allgather_coalesced": _all_gather_lists,
    "reduce_scatter_base": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter,
    "reduce_scatter_tensor_coalesced": _reduce_scatter,
    "reduce_scatter": _reduce_scatter_lists,
    "allreduce": _all_reduce,
    "allreduce_coalesced": _all_reduce,
    "all_reduce": _all_reduce,
    "all_reduce_coalesced": _all_reduce,
    "broadcast": _broadcast,
    "reduce": _to_root,
    "gather": _to_root,
    "scatter": _scatter,
    "send": _whole,
    "isend": _whole,
    "recv": _nothing,
    "recv_any_source": _nothing,
    "irecv": _nothing,
    "barrier": _nothing,
    "monitored_barrier": _nothing,
}
