"""What goes wrong, or merely differently, on some days of a run: on several ranks it is what one process would do."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import muonshard
import same_bits
from pool import Pool
from same_bits import Shape, draw, local, shard_like

SHAPES: tuple[Shape, ...] = ((12, 8), (7, 5), (3, 10), (1, 9), (6, 1))
LR = {"lr": 0.1}
WORLD = 4

Scenario = Callable[[list[Tensor]], None]
"""Some steps with these parameters, plain or sharded."""


def sharded(mesh: DeviceMesh, values: Sequence[Tensor]) -> list[Tensor]:
    """Parameters cut along the last mesh axis and replicated over the others, as HSDP has them."""
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    return [nn.Parameter(distribute_tensor(value, mesh, placements, src_data_rank=None)) for value in values]


def give(params: Sequence[Tensor], step: int, without: Sequence[int] = ()) -> None:
    """Gradients of a step to all but some parameters."""
    for index, (param, grad) in enumerate(zip(params, draw(SHAPES, seed=step + 1), strict=True)):
        param.grad = None if index in without else shard_like(grad, param)


def play(scenario: Scenario, mesh_shape: Shape) -> list[int]:
    """The parameters that end otherwise on this rank than in one process."""
    alone: list[Tensor] = [nn.Parameter(value) for value in draw(SHAPES, seed=0)]
    scenario(alone)
    params = sharded(same_bits.mesh_of(mesh_shape), draw(SHAPES, seed=0))
    scenario(params)
    return same_bits.differing(params, [param.detach() for param in alone])


def missing_for_one_step(params: list[Tensor]) -> None:
    optimizer = muonshard.Muon(params, **LR)
    for step, without in enumerate([(), (1, 3), (), tuple(range(len(params))), ()]):
        give(params, step, without)
        optimizer.step()


def never_there(params: list[Tensor]) -> None:
    optimizer = muonshard.Muon(params, **LR)
    before = [local(param).clone() for param in params]
    for step in range(3):
        give(params, step, without=(0, 2))
        optimizer.step()
    assert all(torch.equal(before[index], local(params[index])) for index in (0, 2))


def frozen_in_mid_run(params: list[Tensor]) -> None:
    optimizer = muonshard.Muon(params, **LR)
    for step in range(4):
        if step == 2:
            params[0].requires_grad_(False)
        give(params, step)
        if not params[0].requires_grad:
            params[0].grad = None
            before = local(params[0]).clone()
        optimizer.step()
    assert torch.equal(before, local(params[0]))


def group_added_in_mid_run(params: list[Tensor]) -> None:
    optimizer = muonshard.Muon(params[:3], **LR)
    give(params, 0)
    optimizer.step()
    momentum = [local(optimizer.state[param]["momentum_buffer"]).clone() for param in params[:3]]
    optimizer.add_param_group({"params": params[3:], "lr": 0.3, "num_heads": 1})
    kept = [local(optimizer.state[param]["momentum_buffer"]) for param in params[:3]]
    assert all(map(torch.equal, momentum, kept))
    for step in range(1, 3):
        give(params, step)
        optimizer.step()


def nothing_but_zeros(params: list[Tensor]) -> None:
    optimizer = muonshard.Muon(params, **LR)
    for param in params:
        param.grad = torch.zeros_like(param)
    before = [local(param).clone() for param in params]
    optimizer.step()
    decay = 1 - LR["lr"] * 0.1
    assert all(torch.equal(local(param), value * decay) for param, value in zip(params, before, strict=True))


def gradients_in_bfloat16(params: list[Tensor]) -> None:
    optimizer = muonshard.Muon(params, **LR)
    for step in range(3):
        give(params, step)
        for param in params:
            grad, param.grad = param.grad, None
            param.grad_dtype = None
            param.grad = grad.to(torch.bfloat16)
        optimizer.step()


def not_finite_now_and_then(params: list[Tensor]) -> None:
    names = [f"weight {index}" for index in range(len(params))]
    optimizer = muonshard.Muon(list(zip(names, params, strict=True)), **LR, nonfinite="skip")
    for step in range(4):
        give(params, step)
        if step in (1, 2):
            spoil(params, [1, 4] if step == 1 else [1])
        before = local(params[1]).clone(), local(optimizer.state[params[1]].get("momentum_buffer", params[1])).clone()
        optimizer.step()
        if step in (1, 2):
            after = local(params[1]), local(optimizer.state[params[1]]["momentum_buffer"])
            assert all(map(torch.equal, before, after))
    counted = {name: count for name, count in optimizer.skipped.items() if count}
    held = [2 * (local(params[1]).numel() > 0), 0, 0, 1 * (local(params[4]).numel() > 0)]
    assert counted == {name: count for name, count in zip(names[1:], held, strict=True) if count}


def spoil(params: Sequence[Tensor], indices: Sequence[int]) -> None:
    """Put a NaN into the last element of the last shard that has one: of the whole gradient's last row."""
    for index in indices:
        value = draw(SHAPES, seed=99)[index]
        value.view(-1)[-1] = torch.nan
        params[index].grad = shard_like(value, params[index])


SCENARIOS = [
    missing_for_one_step,
    never_there,
    frozen_in_mid_run,
    group_added_in_mid_run,
    nothing_but_zeros,
    gradients_in_bfloat16,
    not_finite_now_and_then,
]


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__.replace("_", " "))
def test_on_every_mesh_it_ends_as_in_one_process(pool: Pool, scenario: Scenario, mesh_shape: Shape) -> None:
    assert pool.run(WORLD, play, scenario, mesh_shape) == [[]] * WORLD


def bfloat16_weights_with_wider_gradients() -> list[int]:
    def scenario(params: list[Tensor]) -> None:
        optimizer = muonshard.Muon(params, **LR)
        for step in range(3):
            for param, grad in zip(params, draw(SHAPES, seed=step + 1), strict=True):
                param.grad_dtype = None
                param.grad = shard_like(grad, param)
            optimizer.step()

    alone: list[Tensor] = [nn.Parameter(value) for value in draw(SHAPES, seed=0, dtype=torch.bfloat16)]
    scenario(alone)
    params = sharded(same_bits.mesh_of((WORLD,)), draw(SHAPES, seed=0, dtype=torch.bfloat16))
    scenario(params)
    return same_bits.differing(params, [param.detach() for param in alone])


def test_weights_in_bfloat16_take_gradients_in_float32(pool: Pool) -> None:
    assert pool.run(WORLD, bfloat16_weights_with_wider_gradients) == [[]] * WORLD


def raise_where_not_finite(mesh_shape: Shape) -> tuple[str, bool, list[int]]:
    """The error's text, whether the matrix at fault stayed as it was, and which others differ from skipping it."""
    mesh = same_bits.mesh_of(mesh_shape)
    rows = ((1, 6), (12, 8), (8, 4))
    params = sharded(mesh, draw(rows, seed=0))
    optimizer = muonshard.Muon([(f"weight {i}", param) for i, param in enumerate(params)], **LR, nonfinite="raise")
    grads = draw(rows, seed=1)
    grads[0][0, 0] = torch.inf
    for param, grad in zip(params, grads, strict=True):
        param.grad = shard_like(grad, param)
    with pytest.raises(FloatingPointError) as caught:
        optimizer.step()
    others = [nn.Parameter(value) for value in draw(rows, seed=0)]
    skipping = muonshard.Muon(others, **LR)
    for index, (param, grad) in enumerate(zip(others, grads, strict=True)):
        param.grad = grad if index else None
    skipping.step()
    untouched = torch.equal(local(params[0]), local(shard_like(draw(rows, seed=0)[0], params[0])))
    for param, grad in zip(params, draw(rows, seed=2), strict=True):
        param.grad = shard_like(grad, param)
    for param, grad in zip(others, draw(rows, seed=2), strict=True):
        param.grad = grad
    optimizer.step()
    skipping.step()
    return str(caught.value), untouched, same_bits.differing(params, [param.detach() for param in others])


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2), (2, 2, 2)], ids=str)
def test_all_ranks_raise_for_a_matrix_that_is_not_finite_also_those_that_hold_none_of_it(
    pool: Pool, mesh_shape: Shape
) -> None:
    world = int(torch.tensor(mesh_shape).prod())
    for text, untouched, differing in pool.run(world, raise_where_not_finite, mesh_shape):
        assert text.startswith("weight 0 became infinite or NaN")
        assert untouched
        assert differing == []


def spread_not_a_number() -> list[bool]:
    params = sharded(same_bits.mesh_of((WORLD,)), draw(SHAPES, seed=0))
    optimizer = muonshard.Muon(params, **LR)
    give(params, 0)
    spoil(params, [0])
    optimizer.step()
    return [bool(local(param).isfinite().all()) for param in params]


def test_by_default_what_is_not_finite_spreads_over_its_own_matrix_alone(pool: Pool) -> None:
    assert pool.run(WORLD, spread_not_a_number) == [[False, True, True, True, True]] * WORLD


def tied_weights() -> list[int]:
    """A tied weight in two modules is one parameter, and takes part once."""
    values = draw(SHAPES[:2], seed=0)
    expected = same_bits.reference(SHAPES[:2], 2, **LR)
    model = nn.ModuleDict({"one": nn.Linear(8, 12, bias=False), "other": nn.Linear(8, 12, bias=False)})
    model["one"].weight = sharded(same_bits.mesh_of((WORLD,)), values)[0]
    model["other"].weight = model["one"].weight
    params = list(model.parameters())
    optimizer = muonshard.Muon(params, **LR)
    same_bits.train(params, SHAPES[:1], 2, optimizer)
    return same_bits.differing(params, expected[:1]) + [0] * (len(params) - 1)


def test_tied_weights_take_part_once(pool: Pool) -> None:
    assert pool.run(WORLD, tied_weights) == [[]] * WORLD


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
