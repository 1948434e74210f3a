"""The example optimizer runs, and takes the same steps on any mesh."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from examples.custom_optimizer import SpectralDescent
from hsdp_cases import Shape
from hsdp_workers import get_mesh
from pool import Pool

SHAPES = [(7, 5), (4, 6), (1, 3)]


def steps_on_mesh(mesh_shape: Shape, placements: list[Placement], lr: float) -> list[Tensor]:
    """Three steps on weights and gradients that every rank makes alike; the whole weights afterwards."""
    torch.manual_seed(1)
    weights = [torch.randn(shape) for shape in SHAPES]
    grads = [[torch.randn(shape) for shape in SHAPES] for _ in range(3)]

    def place(tensor: Tensor) -> Tensor:
        if not mesh_shape:
            return tensor
        return distribute_tensor(tensor, get_mesh(mesh_shape), placements, src_data_rank=None)

    params = [torch.nn.Parameter(place(weight)) for weight in weights]
    optimizer = SpectralDescent(params, lr=lr)
    for of_step in grads:
        for param, grad in zip(params, of_step, strict=True):
            param.grad = place(grad)
        optimizer.step()
    return [param.detach().full_tensor() if mesh_shape else param.detach() for param in params]


@pytest.mark.parametrize(
    ("mesh_shape", "placements"),
    [
        ((3,), [Shard(0)]),
        ((2, 2), [Replicate(), Shard(1)]),
        ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    ],
)
def test_the_example_takes_the_same_steps_on_any_mesh(
    pool: Pool, mesh_shape: Shape, placements: list[Placement]
) -> None:
    alone = steps_on_mesh((), [], 0.1)
    for weights in pool.run(torch.Size(mesh_shape).numel(), steps_on_mesh, mesh_shape, placements, 0.1):
        assert all(torch.equal(found, expected) for found, expected in zip(weights, alone, strict=True))


def test_the_example_moves_each_matrix_by_lr_in_spectral_norm() -> None:
    before, after = steps_on_mesh((), [], 0.0), steps_on_mesh((), [], 0.1)
    torch.manual_seed(1)
    weights = [torch.randn(shape).double() for shape in SHAPES]
    momentum = [torch.zeros(shape).double() for shape in SHAPES]
    for _ in range(3):
        momentum = [
            0.9 * average + torch.randn(shape).double() for average, shape in zip(momentum, SHAPES, strict=True)
        ]
        weights = [w - 0.1 * m / torch.linalg.svdvals(m)[0] for w, m in zip(weights, momentum, strict=True)]
    for found, start, expected in zip(after, before, weights, strict=True):
        assert not torch.equal(found, start)
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6)


def test_the_example_runs_as_a_script_and_the_loss_falls() -> None:
    one_process = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
        "OMP_NUM_THREADS": "1",
    }
    script = Path(__file__).parents[1] / "examples" / "custom_optimizer.py"
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=os.environ | one_process, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    assert len(losses) == 20
    assert losses[-1] < 0.8 * losses[0]
