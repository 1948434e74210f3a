"""The test harness itself: ranks, worlds and errors are what they claim to be."""

from __future__ import annotations

import torch
import torch.distributed as dist

from pool import Pool


def _sum_of_ranks() -> tuple[int, float]:
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return dist.get_world_size(), total.item()


def _fail_on(rank: int) -> int:
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} was told to fail")
    return dist.get_rank()


def test_a_world_of_any_size_is_formed_from_the_same_workers(pool: Pool) -> None:
    for world in (2, 4, 3, 4, 8):
        assert pool.run(world, _sum_of_ranks) == [(world, world * (world - 1) / 2)] * world


def test_an_error_on_one_rank_is_reported_and_the_pool_goes_on(pool: Pool) -> None:
    errors = pool.failures(3, _fail_on, 1)
    assert errors[1] == "ValueError: rank 1 was told to fail"
    assert errors[0] is None
    assert errors[2] is None
    assert pool.run(3, _sum_of_ranks) == [(3, 3.0)] * 3
