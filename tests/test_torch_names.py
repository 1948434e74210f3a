"""Names that torch does not promise to keep: each does here what our name for it says."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

from muonshard import _torch
from pool import GROUP_TIMEOUT, Pool

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def tensors(seed: int, dtype: torch.dtype) -> list[Tensor]:
    """Whole, strided and empty tensors, and one that fits no vector register."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((16, 24), (3, 5), (0, 4), (1,))
    drawn = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return [*drawn, torch.randn(8, 6, generator=generator).to(dtype).t(), drawn[0].clone()[:, 3:20]]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lerp_of_many_is_lerp_of_each(dtype: torch.dtype) -> None:
    starts, ends = tensors(0, dtype), tensors(1, dtype)
    expected = [start.lerp(end, 0.05) for start, end in zip(starts, ends, strict=True)]
    assert same(_torch.foreach_lerp(starts, ends, 0.05), expected)
    assert same(starts, tensors(0, dtype))
    _torch.foreach_lerp_(starts, ends, 0.05)
    assert same(starts, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_multiplication_of_many_rounds_once(dtype: torch.dtype) -> None:
    """The factor is not representable in half precision: it must not be rounded before it is used."""
    values = tensors(0, dtype)
    expected = [(value.double() * 0.998).to(dtype) for value in values]
    _torch.foreach_mul_(values, 0.998)
    if dtype == torch.float32:
        expected = [value.mul(0.998) for value in tensors(0, dtype)]
    assert same(values, expected)


def test_tensors_of_several_dtypes_are_multiplied_together() -> None:
    values = [torch.full((2,), 3.0, dtype=dtype) for dtype in DTYPES]
    _torch.foreach_mul_(values, 0.5)
    assert [value.tolist() for value in values] == [[1.5, 1.5]] * len(DTYPES)
    assert [value.dtype for value in values] == DTYPES


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("other", DTYPES, ids=str)
def test_addition_to_many_is_addition_to_each(dtype: torch.dtype, other: torch.dtype) -> None:
    values, others = tensors(0, dtype), tensors(1, other)
    expected = [value.clone().add_(more, alpha=-0.03) for value, more in zip(values, others, strict=True)]
    _torch.foreach_add_(values, others, -0.03)
    assert same(values, expected)


@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.parametrize("target", DTYPES, ids=str)
def test_many_are_copied_to_other_dtypes_and_strides(target: torch.dtype, source: torch.dtype) -> None:
    targets, sources = tensors(0, target), tensors(1, source)
    _torch.foreach_copy_(targets, sources)
    assert same(targets, [value.to(target) for value in sources])


@pytest.mark.parametrize(
    "call",
    [
        lambda: _torch.foreach_lerp([], [], 0.5),
        lambda: _torch.foreach_lerp_([], [], 0.5),
        lambda: _torch.foreach_mul_([], 0.5),
        lambda: _torch.foreach_add_([], [], 0.5),
        lambda: _torch.foreach_copy_([], []),
    ],
)
def test_nothing_is_done_to_no_tensors(call: Callable[[], Any]) -> None:
    assert not call()


def test_a_strided_shard_says_how_often_its_dim_was_split_before() -> None:
    assert _torch.split_factor(_StridedShard(0, split_factor=4)) == 4
    assert _torch.split_factor(Shard(0)) == 1


def timeouts() -> list[timedelta | None]:
    """Of the world, of a group made with one of its own, and of something that is no group."""
    own = dist.new_group([dist.get_rank()], timeout=timedelta(seconds=7), use_local_synchronization=True)
    return [_torch.group_timeout(group) for group in (dist.group.WORLD, own, object())]


def test_a_group_says_the_timeout_it_was_made_with(pool: Pool) -> None:
    assert pool.run(2, timeouts) == [[GROUP_TIMEOUT, timedelta(seconds=7), None]] * 2


def groups_joined() -> int:
    """How many more groups this process is in after it has made one of its own."""
    before = _torch.memberships()
    dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return _torch.memberships() - before


def test_groups_that_a_process_joins_are_counted(pool: Pool) -> None:
    assert pool.run(2, groups_joined) == [1, 1]
    assert _torch.memberships() == 0


def test_hooks_of_a_load_are_found_in_the_order_of_their_registration() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)])
    hooks: list[Callable[..., None]] = [lambda *_: None for _ in range(3)]
    optimizer.register_load_state_dict_pre_hook(hooks[0])
    optimizer.register_load_state_dict_pre_hook(hooks[1])
    optimizer.register_load_state_dict_post_hook(hooks[2])
    assert _torch.load_hooks(optimizer) == (hooks[:2], hooks[2:])
