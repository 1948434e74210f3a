"""Groups of one optimizer: AdamW bit for bit, options of their own, rules of their own."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import muonshard
from muonshard.shards import lr_ratio
from pool import Pool

pytestmark = pytest.mark.usefixtures("iterates_as_torch_does")

SHAPES = ((6, 4), (5,), (3, 2, 2), (), (1, 7))


def draw(seed: int, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], grads: list[list[Tensor]]) -> None:
    for step in grads:
        for param, grad in zip(params, step, strict=True):
            param.grad = grad.clone()
        optimizer.step()


def same(ours: list[Any], theirs: list[Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.2},
        {"amsgrad": True},
        {"maximize": True},
        {"foreach": True},
        {"fused": True},
        {"lr": torch.tensor(3e-3), "capturable": False},
    ],
    ids=str,
)
def test_a_group_for_adamw_is_stepped_by_torchs_adamw(options: dict[str, Any]) -> None:
    grads = [draw(seed) for seed in range(1, 8)]
    ours, theirs = ([nn.Parameter(value) for value in draw(0)] for _ in range(2))
    train(muonshard.Muon([{"params": ours, "algorithm": "adamw", **options}]), ours, grads)
    train(torch.optim.AdamW(theirs, **options), theirs, grads)
    assert same(ours, theirs)


def test_muon_and_adamw_groups_do_not_disturb_each_other() -> None:
    shapes = ((6, 4), (4, 4), (6,), (4,))
    grads = [draw(seed, shapes) for seed in range(1, 6)]
    params = [nn.Parameter(value) for value in draw(0, shapes)]
    both = copy.deepcopy(params)
    muon, adamw = torch.optim.Muon(params[:2], lr=0.05), torch.optim.AdamW(params[2:], lr=0.01)
    train(muon, params[:2], [step[:2] for step in grads])
    train(adamw, params[2:], [step[2:] for step in grads])
    groups = [{"params": both[2:], "algorithm": "adamw", "lr": 0.01}, {"params": both[:2], "lr": 0.05}]
    train(muonshard.Muon(groups), both, grads)
    assert same(both, params)


def test_a_group_has_the_options_of_its_own_algorithm_only() -> None:
    weight, bias = (nn.Parameter(value) for value in draw(0, ((4, 4), (4,))))
    optimizer = muonshard.Muon([{"params": [weight]}, {"params": [bias], "algorithm": "adamw"}], lr=0.5)
    muon, adamw = optimizer.param_groups
    assert muon["lr"] == 0.5
    assert "betas" not in muon
    theirs = torch.optim.AdamW([bias]).defaults
    assert {key: adamw[key] for key in theirs} == theirs
    assert "ns_steps" not in adamw


def test_both_states_are_saved_and_loaded() -> None:
    shapes = ((6, 4), (6,))
    grads = [draw(seed, shapes) for seed in range(1, 9)]

    def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [{"params": params[:1], "lr": 0.05}, {"params": params[1:], "algorithm": "adamw", "lr": 0.01}]

    unbroken = [nn.Parameter(value) for value in draw(0, shapes)]
    train(muonshard.Muon(groups(unbroken)), unbroken, grads)
    params = [nn.Parameter(value) for value in draw(0, shapes)]
    first = muonshard.Muon(groups(params))
    train(first, params, grads[:4])
    second = muonshard.Muon(groups(params))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(second, params, grads[4:])
    assert same(params, unbroken)


def test_an_adamw_group_can_join_mid_run() -> None:
    weight, bias = (nn.Parameter(value) for value in draw(0, ((4, 4), (4,))))
    optimizer = muonshard.Muon([weight])
    weight.grad = torch.ones(4, 4)
    optimizer.step()
    optimizer.add_param_group({"params": [bias], "algorithm": "adamw", "lr": 0.1})
    bias.grad = torch.ones(4)
    before = bias.detach().clone()
    optimizer.step()
    torch.testing.assert_close(bias.detach(), before * (1 - 0.1 * 0.01) - 0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "parameter group 0: Invalid learning rate"),
        ({"betas": (1.5, 0.9)}, "Invalid beta parameter"),
        ({"eps": -1.0}, "Invalid epsilon"),
        ({"algorithm": "sgd"}, "parameter group 0: algorithm must be 'muon' or 'adamw', got 'sgd'"),
    ],
    ids=str,
)
def test_an_option_of_a_group_out_of_range_is_an_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        muonshard.Muon([{"params": [nn.Parameter(torch.ones(4))], "algorithm": "adamw"} | options])


def test_every_group_follows_its_own_options() -> None:
    shapes = ((8, 4), (8, 4), (8, 4))
    options: list[dict[str, Any]] = [
        {"lr": 0.1, "momentum": 0.5},
        {"lr": 0.02, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"},
        {"lr": 0.05, "ns_steps": 2, "weight_decay": 0.5},
    ]
    grads = [draw(seed, shapes) for seed in range(1, 6)]
    together, apart = ([nn.Parameter(value) for value in draw(0, shapes)] for _ in range(2))
    train(muonshard.Muon([{"params": [p], **o} for p, o in zip(together, options, strict=True)]), together, grads)
    for index, group in enumerate(options):
        train(torch.optim.Muon([apart[index]], **group), [apart[index]], [[step[index]] for step in grads])
    assert same(together, apart)


RULES: list[tuple[tuple[int, ...], dict[str, Any], list[tuple[Any, ...]]]] = [
    ((12, 6), {"num_heads": 3}, [(slice(0, 4),), (slice(4, 8),), (slice(8, 12),)]),
    ((6, 12), {"num_heads": 2, "split_dim": 1}, [(slice(None), slice(0, 6)), (slice(None), slice(6, 12))]),
    ((12, 6), {"splits": (8, 2, 2)}, [(slice(0, 8),), (slice(8, 10),), (slice(10, 12),)]),
    ((8, 6), {"splits": [4, 4], "num_heads": [2, 1]}, [(slice(0, 2),), (slice(2, 4),), (slice(4, 8),)]),
    ((3, 4, 6), {}, [(0,), (1,), (2,)]),
]


@pytest.mark.parametrize(("shape", "rule", "parts"), RULES, ids=[str(rule) for _, rule, _ in RULES])
def test_the_matrices_of_a_parameter_are_stepped_as_if_each_were_a_parameter(
    shape: tuple[int, ...], rule: dict[str, Any], parts: list[tuple[Any, ...]]
) -> None:
    grads = [draw(seed, (shape,)) for seed in range(1, 6)]
    whole = nn.Parameter(draw(0, (shape,))[0])
    pieces = [nn.Parameter(whole.detach()[part].clone()) for part in parts]
    train(muonshard.Muon([{"params": [whole], **rule}], lr=0.05), [whole], grads)
    train(torch.optim.Muon(pieces, lr=0.05), pieces, [[step[0][part] for part in parts] for step in grads])
    assert all(torch.equal(whole[part], piece) for part, piece in zip(parts, pieces, strict=True))


def test_a_convolution_is_stepped_as_its_flattened_matrix() -> None:
    shape = (8, 3, 2, 2)
    grads = [draw(seed, (shape,)) for seed in range(1, 6)]
    kernel = nn.Parameter(draw(0, (shape,))[0])
    flat = nn.Parameter(kernel.detach().flatten(1).clone())
    train(muonshard.Muon([{"params": [kernel], "flatten": True}], lr=0.05), [kernel], grads)
    train(torch.optim.Muon([flat], lr=0.05), [flat], [[step[0].flatten(1)] for step in grads])
    assert torch.equal(kernel.flatten(1), flat)


@pytest.mark.parametrize("adjust_lr_fn", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", [(8, 4), (4, 8)], ids=str)
def test_a_transposed_parameter_has_the_learning_rate_of_the_matrix_as_it_is_meant(
    shape: tuple[int, int], adjust_lr_fn: str | None
) -> None:
    stored = nn.Parameter(torch.zeros(shape))
    meant = nn.Parameter(torch.zeros(shape[::-1]))
    stored.grad = draw(1, (shape,))[0]
    meant.grad = stored.grad.mT.contiguous()
    muonshard.Muon([{"params": [stored], "transposed": True}], lr=1.0, adjust_lr_fn=adjust_lr_fn).step()
    torch.optim.Muon([meant], lr=1.0, adjust_lr_fn=adjust_lr_fn).step()
    torch.testing.assert_close(stored.detach().norm(), meant.detach().norm(), rtol=0.02, atol=0)


@pytest.mark.parametrize(("rows", "cols"), [(64, 16), (16, 64), (16, 16)])
def test_the_learning_rate_follows_the_shape_as_published(rows: int, cols: int) -> None:
    for adjust_lr_fn in (None, "original"):
        assert lr_ratio(adjust_lr_fn, rows, cols, False) == math.sqrt(max(1, rows / cols))
    assert lr_ratio("match_rms_adamw", rows, cols, False) == 0.2 * math.sqrt(max(rows, cols))
    assert lr_ratio("original", rows, cols, True) == lr_ratio("original", cols, rows, False)


@functools.cache
def _mesh_in(world: dist.ProcessGroup, shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape)


def adamw_on_a_mesh(shape: tuple[int, ...]) -> list[bool]:
    """Whether this rank's shards are those of AdamW over DTensors, after some steps with a Muon group beside them."""
    assert dist.group.WORLD is not None
    mesh = _mesh_in(dist.group.WORLD, shape)
    placements = [Replicate()] * (len(shape) - 1) + [Shard(0)]

    def on_mesh(values: list[Tensor]) -> list[Tensor]:
        return [distribute_tensor(value, mesh, placements, src_data_rank=None) for value in values]

    shapes = ((7, 4), (5,), (8, 4))
    grads = [on_mesh(draw(seed, shapes)) for seed in range(1, 6)]
    ours, theirs = ([nn.Parameter(value) for value in on_mesh(draw(0, shapes))] for _ in range(2))
    groups = [{"params": ours[:2], "algorithm": "adamw", "lr": 0.01}, {"params": ours[2:], "lr": 0.05}]
    train(muonshard.Muon(groups), ours, grads)
    train(torch.optim.AdamW(theirs[:2], lr=0.01), theirs[:2], [step[:2] for step in grads])
    return [torch.equal(_local(a), _local(b)) for a, b in zip(ours[:2], theirs[:2], strict=True)]


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
def test_an_adamw_group_of_dtensors_is_stepped_by_torchs_adamw(pool: Pool, shape: tuple[int, ...]) -> None:
    assert pool.run(math.prod(shape), adamw_on_a_mesh, shape) == [[True, True]] * math.prod(shape)
