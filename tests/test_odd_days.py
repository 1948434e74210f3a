"""What goes wrong, or merely differently, on some days of a run: on several ranks it is what one process would do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import muonshard
import same_bits
from few_matrices import LR, SHAPES, WORLD, give, sharded, spoil
from pool import Pool
from same_bits import Shape, draw, local, shard_like

Scenario = Callable[[list[Tensor]], None]
"""Some steps with these parameters, plain or sharded."""


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
