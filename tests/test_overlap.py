"""Exchange during backward: the same bits, really sent before `step`, and refused where it would be wrong."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import muonshard
import same_bits
from benchmarks.counting import count_traffic
from pool import Pool

STEPS = 3


class Perceptron(nn.Module):
    """Linear layers one after the other; layer 2 is left out where it is not wanted."""

    def __init__(self, widths: tuple[int, ...] = (24, 40, 33, 40, 16)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def _model(mesh: tuple[int, ...]) -> Perceptron:
    torch.manual_seed(0)
    model = Perceptron()
    device_mesh = same_bits.mesh_of(mesh)
    for layer in model.layers:
        fully_shard(layer, mesh=device_mesh)
    fully_shard(model, mesh=device_mesh)
    return model


def _train(mesh: tuple[int, ...], micro_batches: int, **options: Any) -> tuple[list[Tensor], list[int]]:
    """Weights after some steps, and the collectives that each `step` itself still issued."""
    model = _model(mesh)
    optimizer = muonshard.Muon(model.named_parameters(), lr=0.05, bucket_bytes=1 << 10, exchange="owner", **options)
    generator = torch.Generator().manual_seed(dist.get_rank())
    in_step = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        for micro in range(micro_batches):
            last = micro == micro_batches - 1
            waiting: AbstractContextManager[None] = nullcontext() if last else optimizer.accumulating()
            with waiting:
                model(torch.randn(8, 24, generator=generator)).square().mean().backward()
        with count_traffic() as traffic:
            optimizer.step()
        in_step.append(traffic.collectives)
    return [same_bits.local(param) for param in model.parameters()], in_step


def compare(mesh: tuple[int, ...], micro_batches: int) -> tuple[bool, list[int], list[int]]:
    plain, all_in_step = _train(mesh, micro_batches)
    overlapped, in_step = _train(mesh, micro_batches, overlap="backward")
    return all(map(torch.equal, plain, overlapped)), all_in_step, in_step


@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2)], ids=str)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_overlap_gives_the_same_bits_and_sends_before_the_step(
    pool: Pool, mesh: tuple[int, ...], micro_batches: int
) -> None:
    world = int(torch.tensor(mesh).prod())
    for same, all_in_step, in_step in pool.run(world, compare, mesh, micro_batches):
        assert same
        assert all(few < many for few, many in zip(in_step, all_in_step, strict=True))


def clip_then_step() -> str:
    model = _model((2,))
    optimizer = muonshard.Muon(model.named_parameters(), bucket_bytes=1 << 10, overlap="backward")
    before = copy.deepcopy([same_bits.local(param) for param in model.parameters()])
    model(torch.ones(8, 24)).square().sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(RuntimeError, match=r"gradient of layers\.\d\.weight changed.*clipping") as caught:
        optimizer.step()
    unchanged = all(map(torch.equal, before, (same_bits.local(param) for param in model.parameters())))
    _finish(optimizer)
    return f"{unchanged} {type(caught.value).__name__}"


def test_clipping_between_backward_and_step_is_an_error_and_changes_nothing(pool: Pool) -> None:
    assert pool.run(2, clip_then_step) == ["True RuntimeError"] * 2


def accumulate_unannounced() -> str:
    model = _model((2,))
    optimizer = muonshard.Muon(model.named_parameters(), bucket_bytes=1 << 10, overlap="backward")
    model(torch.ones(8, 24)).square().sum().backward()
    with pytest.raises(RuntimeError, match=r"another gradient.*accumulating"):
        model(torch.ones(8, 24)).square().sum().backward()
    _finish(optimizer)
    return "raised"


@torch.no_grad()
def _finish(optimizer: muonshard.Muon) -> None:
    """Let what is on its way arrive: process groups must not be taken down before."""
    for pipeline in optimizer._pipelines_here():
        pipeline.finish()


def test_a_second_backward_that_was_not_announced_is_an_error(pool: Pool) -> None:
    assert pool.run(2, accumulate_unannounced) == ["raised"] * 2


def one_rank_lacks_a_gradient() -> list[int]:
    shapes = ((24, 16), (16, 16), (8, 16))
    mesh = same_bits.mesh_of((2,))
    params = [nn.Parameter(cut_in_rows(value, mesh)) for value in same_bits.draw(shapes, seed=0)]
    optimizer = muonshard.Muon(params, lr=0.1, weight_decay=0.0, bucket_bytes=1, overlap="backward")
    weights = params if dist.get_rank() == 0 else params[:1] + params[2:]
    torch.stack([weight.to_local().sum() for weight in weights]).sum().backward()
    optimizer.step()
    plain = [nn.Parameter(value) for value in same_bits.draw(shapes, seed=0)]
    for index, param in enumerate(plain):
        param.grad = torch.ones_like(param)
        if index == 1:
            param.grad[8:] = 0
    muonshard.Muon(plain, lr=0.1, weight_decay=0.0).step()
    return same_bits.differing(params, [param.detach() for param in plain])


def cut_in_rows(value: Tensor, mesh: DeviceMesh) -> Tensor:
    return distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None)


def test_a_gradient_missing_on_one_rank_counts_as_zero_and_nobody_waits_in_backward(pool: Pool) -> None:
    assert pool.run(2, one_rank_lacks_a_gradient) == [[]] * 2


def overlap_under_data_parallel() -> None:
    muonshard.Muon([nn.Parameter(torch.ones(4, 4))], overlap="backward", process_group=dist.group.WORLD)


def test_data_parallel_gradients_are_refused(pool: Pool) -> None:
    assert all("DistributedDataParallel" in (error or "") for error in pool.failures(2, overlap_under_data_parallel))


def test_fused_gathers_are_refused() -> None:
    with pytest.raises(ValueError, match="all-gather"):
        muonshard.Muon([nn.Parameter(torch.ones(4, 4))], overlap="backward", exchange="allgather")
