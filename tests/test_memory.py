"""What a step needs beyond parameters, gradients and momentum: the arena, bounded and allocated once."""

from __future__ import annotations

import pytest
import torch

import muonshard
import same_bits
from benchmarks.counting import PeakMemory
from pool import Pool
from same_bits import Shape
from test_sharded_step import Layout, data_parallel, sharded

SHAPES = ((64, 64), (128, 32)) * 12
MATRIX = 64 * 64 * 2
"""Bytes of any of them in bfloat16, the exchange dtype."""
SLACK = 8 * 512
"""Bytes of flags, and of alignment, in a slot of these few buffers."""


def arena_and_growth(layout: Layout, mesh: Shape, bucket_bytes: int) -> tuple[int, int]:
    """Bytes of the arena, and bytes that three steps after the second left behind."""
    params, more = layout(mesh, SHAPES)
    optimizer = muonshard.Muon(
        params, lr=0.02, bucket_bytes=bucket_bytes, exchange="owner", exchange_dtype=torch.bfloat16, **more
    )
    for param, grad in zip(params, same_bits.draw(SHAPES, seed=1), strict=True):
        param.grad = same_bits.shard_like(grad, param)
    for _ in range(2):
        optimizer.step()
    with PeakMemory() as memory:
        for _ in range(3):
            optimizer.step()
    return optimizer.arena_bytes, memory.held_bytes


@pytest.mark.parametrize("bucket_bytes", [4 * MATRIX, 1], ids=["several matrices in a bucket", "one"])
@pytest.mark.parametrize(
    ("layout", "mesh", "slots"),
    [(sharded, (4,), 3), (sharded, (2, 2), 4), (data_parallel, (4,), 2), (data_parallel, (8,), 2)],
    ids=["FSDP 4", "HSDP 2x2", "DDP 4", "DDP 8"],
)
def test_the_arena_is_bounded_whatever_the_number_of_replicas_and_nothing_grows(
    pool: Pool, layout: Layout, mesh: Shape, slots: int, bucket_bytes: int
) -> None:
    world = int(torch.tensor(mesh).prod())
    for arena, grown in pool.run(world, arena_and_growth, layout, mesh, bucket_bytes):
        assert 0 < arena <= slots * (4 * max(bucket_bytes, MATRIX) + SLACK)
        assert grown == 0
