"""Parameters and gradients that no step can be made of: an error on all ranks, in time, and nothing has changed."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import muonshard
import same_bits
from few_matrices import LR, SHAPES, WORLD, give, sharded
from pool import Pool
from same_bits import draw, local, shard_like

Breaker = Callable[[Tensor], object]
"""What one rank does to the parameters it gives to the optimizer."""


def with_partial_placement(param: Tensor) -> list[Tensor]:
    assert isinstance(param, DTensor)
    return [nn.Parameter(DTensor.from_local(local(param).clone(), param.device_mesh, [Partial()]))]


def of_integers(param: Tensor) -> list[Tensor]:
    return [nn.Parameter(param.detach().int(), requires_grad=False)]


def of_complex_numbers(param: Tensor) -> list[Tensor]:
    assert isinstance(param, DTensor)
    whole = torch.zeros(param.shape, dtype=torch.complex64)
    return [nn.Parameter(distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None))]


def listed_twice(param: Tensor) -> list[Tensor]:
    return [param, param]


def of_one_dim(param: Tensor) -> list[Tensor]:
    assert isinstance(param, DTensor)
    return [nn.Parameter(distribute_tensor(torch.zeros(8), param.device_mesh, [Shard(0)], src_data_rank=None))]


def with_a_shard_of_another_shape(param: Tensor) -> list[Tensor]:
    assert isinstance(param, DTensor)
    shape, stride = param.shape, param.stride()
    part = torch.zeros(local(param).shape[0] + 1, param.shape[1])
    mesh, placements = param.device_mesh, param.placements
    return [nn.Parameter(DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride))]


BROKEN = [
    (with_partial_placement, "weight has placement P.*redistribute"),
    (of_integers, "weight has dtype torch.int32: Muon takes real floating point"),
    (of_complex_numbers, "weight has dtype torch.complex64: Muon takes real floating point"),
    (listed_twice, "weight is the same tensor as weight: list a tied weight once"),
    (of_one_dim, r"weight cannot be read as matrices: shape \(8,\).*AdamW"),
    (with_a_shard_of_another_shape, r"weight holds a shard of shape \(4, 8\).*give \(3, 8\)"),
]


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def construct_broken(breaker: Breaker, culprits: Sequence[int], late: bool) -> tuple[str, bool]:
    """The error's text, and whether all is as before: also an optimizer to which the group was to be added."""
    param = sharded(same_bits.mesh_of((WORLD,)), draw(((12, 8),), seed=0))[0]
    given = breaker(param) if dist.get_rank() in culprits else [param]
    group = {"params": [("weight", each) for each in given]}
    if not late:
        before = [local(each).clone() for each in given]
        with pytest.raises(ValueError, match="weight") as caught:
            muonshard.Muon([group], **LR)
        return str(caught.value), all(map(torch.equal, before, map(local, given)))
    first = sharded(same_bits.mesh_of((WORLD,)), draw(SHAPES, seed=0))
    optimizer = muonshard.Muon([(f"first {i}", each) for i, each in enumerate(first)], **LR)
    give(first, 0)
    optimizer.step()
    with pytest.raises(ValueError, match="weight") as caught:
        optimizer.add_param_group(group)
    give(first, 1)
    optimizer.step()
    return str(caught.value), not same_bits.differing(first, same_bits.reference(SHAPES, 2, **LR))


@pytest.mark.parametrize("culprits", [(0, 1, 2, 3), (2,)], ids=["on all ranks", "on one rank"])
@pytest.mark.parametrize(("breaker", "message"), BROKEN, ids=lambda value: getattr(value, "__name__", ""))
def test_parameters_that_cannot_be_trained_are_an_error_on_all_ranks(
    pool: Pool, breaker: Breaker, message: str, culprits: tuple[int, ...]
) -> None:
    for late in (False, True):
        for text, untouched in pool.run(WORLD, construct_broken, breaker, culprits, late):
            assert untouched
            assert re.search(message, text), text


def sparse(param: Tensor) -> Tensor:
    return torch.ones(param.shape).to_sparse()


def complex_numbers(param: Tensor) -> Tensor:
    param.grad_dtype = None
    return shard_like(torch.ones(param.shape, dtype=torch.complex64), param)


def partial_sums(param: Tensor) -> Tensor:
    assert isinstance(param, DTensor)
    return DTensor.from_local(torch.ones(param.shape), param.device_mesh, [Partial()])


def cut_along_another_dim(param: Tensor) -> Tensor:
    assert isinstance(param, DTensor)
    return distribute_tensor(torch.ones(param.shape), param.device_mesh, [Shard(1)], src_data_rank=None)


BAD_GRADIENTS = [
    ("plain", "weight", sparse, "weight has a gradient of layout torch.sparse_coo: make it dense"),
    ("plain", "bias", sparse, "bias has a gradient of layout torch.sparse_coo: make it dense"),
    ("plain", "weight", complex_numbers, "weight has a complex gradient, torch.complex64"),
    ("sharded", "weight", complex_numbers, "weight has a complex gradient, torch.complex64"),
    ("sharded", "weight", partial_sums, r"weight has placements \(Shard\(dim=0\),\).*Partial\(sum\).*redistribute"),
    ("replicated", "weight", partial_sums, r"weight has placements \(Replicate\(\),\).*Partial\(sum\).*redistribute"),
    (
        "sharded",
        "weight",
        cut_along_another_dim,
        r"weight has placements.*Shard\(dim=0\).*Shard\(dim=1\).*redistribute",
    ),
]


def bad_gradient(kind: str, culprit: str, spoiler: Callable[[Tensor], Tensor]) -> tuple[str, bool, list[int]]:
    """The error's text, whether nothing had changed, and what is wrong when training goes on."""
    shapes = ((12, 8), (9, 5), (6,))

    def make(value: Tensor) -> Tensor:
        mesh = same_bits.mesh_of((WORLD,))
        placements = [Shard(0) if kind == "sharded" else Replicate()]
        plain = kind == "plain"
        return nn.Parameter(value if plain else distribute_tensor(value, mesh, placements, src_data_rank=None))

    def optimizer_of(params: list[Tensor], group: dist.ProcessGroup | None) -> muonshard.Muon:
        names = ["weight", "other", "bias"]
        named = list(zip(names, params, strict=True))
        groups = [{"params": named[:2]}, {"params": named[2:], "algorithm": "adamw"}]
        return muonshard.Muon(groups, **LR, process_group=group)

    params = [make(value) for value in draw(shapes, seed=0)]
    alone: list[Tensor] = [nn.Parameter(value) for value in draw(shapes, seed=0)]
    optimizer = optimizer_of(params, dist.group.WORLD if kind == "plain" else None)
    reference = optimizer_of(alone, None)
    victim = params[0 if culprit == "weight" else 2]
    for param, grad in zip(params, draw(shapes, seed=1), strict=True):
        param.grad = shard_like(grad, param)
    good = victim.grad
    victim.grad = None
    victim.grad = spoiler(victim)
    before = [local(param).clone() for param in params]
    with pytest.raises(ValueError, match=culprit) as caught:
        optimizer.step()
    unchanged = all(map(torch.equal, before, map(local, params))) and not optimizer.state
    victim.grad = None
    victim.grad = good
    for step in (1, 2):
        for param, own, grad in zip(params, alone, draw(shapes, seed=step), strict=True):
            param.grad, own.grad = shard_like(grad, param), grad
        optimizer.step()
        reference.step()
    return str(caught.value), unchanged, same_bits.differing(params, [param.detach() for param in alone])


@pytest.mark.parametrize(
    ("kind", "culprit", "spoiler", "message"), BAD_GRADIENTS, ids=lambda value: getattr(value, "__name__", value)
)
def test_gradients_of_the_wrong_kind_are_an_error_on_all_ranks_and_change_nothing(
    pool: Pool, kind: str, culprit: str, spoiler: Callable[[Tensor], Tensor], message: str
) -> None:
    for text, unchanged, differing in pool.run(WORLD, bad_gradient, kind, culprit, spoiler):
        assert re.search(message, text), text
        assert unchanged
        assert differing == []
