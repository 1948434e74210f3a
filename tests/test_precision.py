"""Weights and momentum in fewer or more bits: what float32 would give, on any mesh, saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import checkpoint_cases as cases
import muonshard
import same_bits
from checkpoint_cases import Layout
from pool import Pool
from test_checkpoint_meshes import BREAK, END, state_of, take_up

HALF = torch.bfloat16
MASTERS: dict[str, Any] = {"master_weights": True, "momentum_dtype": torch.float32}
DITHERED: dict[str, Any] = {"stochastic_rounding": True, "seed": 7}
MIXED: dict[str, Any] = {"momentum_dtype": torch.float32}


def wide_grads(step: int) -> list[Tensor]:
    """Gradients in float32 whose values bfloat16 has too."""
    return [grad.float() for grad in same_bits.draw(cases.SHAPES, seed=step + 1, dtype=HALF)]


def in_float32(steps: int) -> list[Tensor]:
    """Weights of a float32 run that starts from the bfloat16 values and sees the bfloat16 gradients."""
    model, optimizer = cases.make_run(cases.whole, dtype=HALF)
    model.float()
    for step in range(steps):
        for param, grad in zip(model.parameters(), wide_grads(step), strict=True):
            param.grad = grad
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def test_master_weights_are_those_of_a_float32_run_and_weights_are_these_rounded() -> None:
    model, optimizer = cases.make_run(cases.whole, dtype=HALF, **MASTERS)
    for step in range(4):
        cases.train(model, optimizer, [step])
        for param, expected in zip(model.parameters(), in_float32(step + 1), strict=True):
            assert torch.equal(optimizer.state[param]["master_weight"], expected)
            assert torch.equal(param, expected.bfloat16())


def test_float32_weights_need_no_masters_and_no_rounding() -> None:
    plain = cases.unbroken(3)
    for options in (MASTERS, DITHERED):
        model, optimizer = cases.make_run(cases.whole, **options)
        cases.train(model, optimizer, range(3))
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain, strict=True))
        assert not any("master_weight" in state for state in optimizer.state.values())


def test_stochastically_rounded_weights_are_right_on_average() -> None:
    """The mean over seeds of a step of 3 hundredths of a unit, which rounding to nearest would lose."""
    seeds, unit = 64, 2.0**-7
    moved = torch.zeros(len(cases.SHAPES), dtype=torch.float64)
    for seed in range(seeds):
        model, optimizer = cases.make_run(cases.whole, dtype=HALF, stochastic_rounding=True, seed=seed)
        for group in optimizer.param_groups:
            group |= {"lr": 0.03 * unit, "weight_decay": 1.0}  # from weights of 1, decay alone moves by lr
        for param in model.parameters():
            param.data.fill_(1.0)
            param.grad = torch.zeros_like(param)
        optimizer.step()
        # below 1 the unit is half as large
        moved += torch.stack([(1.0 - param.detach().double()).mean() for param in model.parameters()])
    for mean, shape in zip(moved / seeds, cases.SHAPES, strict=True):
        deviation = (unit / 2) * (0.06 * 0.94 / (seeds * torch.tensor(shape).prod().item())) ** 0.5
        assert abs(float(mean) - 0.03 * unit) < 5 * deviation


def test_seeds_differ_and_one_seed_repeats() -> None:
    def run(seed: int) -> list[Tensor]:
        model, optimizer = cases.make_run(cases.whole, dtype=HALF, stochastic_rounding=True, seed=seed)
        cases.train(model, optimizer, range(3))
        return [param.detach() for param in model.parameters()]

    first, again, other = run(1), run(1), run(2)
    assert all(map(torch.equal, first, again))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True) if a.numel() > 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, HALF], ids=str)
def test_momentum_is_kept_in_its_own_dtype(dtype: torch.dtype) -> None:
    """B <- 0.95 B + 0.05 G, in float64."""
    model, optimizer = cases.make_run(cases.whole, dtype=HALF, momentum_dtype=dtype)
    expected = [torch.zeros(shape, dtype=torch.float64) for shape in cases.MATRICES]
    for step in range(20):
        cases.train(model, optimizer, [step])
        expected = [0.95 * b + 0.05 * g.double() for b, g in zip(expected, wide_grads(step), strict=False)]
    for param, value in zip(model.matrices, expected, strict=True):
        momentum = optimizer.state[param]["momentum_buffer"]
        assert momentum.dtype == dtype
        torch.testing.assert_close(momentum.double(), value, rtol=0, atol=8 * torch.finfo(dtype).eps)


def on_a_mesh(layout: Layout, options: dict[str, Any]) -> list[int]:
    model, optimizer = cases.make_run(layout, dtype=HALF, bucket_bytes=1 << 8, **options)
    cases.train(model, optimizer, range(4))
    return same_bits.differing(model.parameters(), cases.unbroken(4, dtype=HALF, **options))


@pytest.mark.parametrize("layout", [cases.fsdp, cases.hsdp, cases.fsdp_tp, cases.data_parallel])
@pytest.mark.parametrize("options", [MASTERS, DITHERED, MIXED], ids=["masters", "dithered", "mixed"])
def test_every_mesh_gives_the_bits_of_one_process(pool: Pool, layout: Layout, options: dict[str, Any]) -> None:
    assert pool.run(4, on_a_mesh, layout, options) == [[]] * 4


def break_and_go_on(
    folder: Path, before: Layout, after: Layout, options: dict[str, Any]
) -> tuple[list[int], list[int]]:
    """Saved on one mesh and loaded on another: weights that differ, and masters."""
    model, optimizer = cases.make_run(before, dtype=HALF, **options)
    cases.train(model, optimizer, range(BREAK))
    dcp.save(state_of(model, optimizer), checkpoint_id=folder)
    model, optimizer = cases.make_run(after, start=99, dtype=HALF, **options)
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    take_up(model, optimizer, state)
    cases.train(model, optimizer, range(BREAK, END))
    expected, reference = cases.make_run(cases.whole, dtype=HALF, **options)
    cases.train(expected, reference, range(END))
    masters, whole = (
        [o.state[p].get("master_weight", p) for p in m.parameters()]
        for m, o in [(model, optimizer), (expected, reference)]
    )
    return same_bits.differing(model.parameters(), whole_of(expected)), same_bits.differing(masters, whole)


def whole_of(model: nn.Module) -> list[Tensor]:
    return [param.detach() for param in model.parameters()]


@pytest.mark.parametrize("options", [MASTERS, DITHERED, MIXED], ids=["masters", "dithered", "mixed"])
def test_a_run_goes_on_after_a_checkpoint_with_the_same_bits(
    pool: Pool, tmp_path: Path, options: dict[str, Any]
) -> None:
    assert pool.run(4, break_and_go_on, tmp_path, cases.fsdp_tp, cases.hsdp, options) == [([], [])] * 4


def test_masters_that_were_not_saved_are_made_and_masters_without_use_are_dropped() -> None:
    model, plain = cases.make_run(cases.whole, dtype=HALF)
    cases.train(model, plain, range(2))
    mastered = muonshard.Muon(cases.groups(model), **cases.OPTIONS, **MASTERS)
    saved = plain.state_dict()
    with pytest.warns(UserWarning, match=r"matrices\.0, .* have no saved float32 weights: they are made of the param"):
        mastered.load_state_dict(saved)
    cases.train(model, mastered, range(2, 4))
    saved = mastered.state_dict()
    with pytest.warns(UserWarning, match=r"have saved float32 weights, which are not used without master_weights"):
        plain.load_state_dict(saved)
    assert not any("master_weight" in state for state in plain.state.values())
    cases.train(model, plain, range(4, 5))


@pytest.mark.parametrize(
    ("options", "dtype", "message"),
    [
        ({"momentum_dtype": torch.int32}, HALF, "momentum_dtype must be a floating point dtype, got torch.int32"),
        ({"master_weights": True, "stochastic_rounding": True}, HALF, "choose one"),
        (
            {"stochastic_rounding": True},
            torch.float16,
            r"matrices\.0 has dtype torch.float16: stochastic_roun",
        ),
    ],
)
def test_what_does_not_go_together_is_an_error(options: dict[str, Any], dtype: torch.dtype, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cases.make_run(cases.whole, dtype=dtype, **options)


def polar(stack: Tensor) -> Tensor:
    """The nearest orthogonal matrix, in float64 by SVD."""
    u, _, v = torch.linalg.svd(stack.double(), full_matrices=False)
    return (u @ v).to(stack.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, HALF], ids=str)
@pytest.mark.parametrize("shape", [(32, 48), (96, 24)], ids=str)
def test_the_exchange_dtype_brings_two_roundings_and_no_more(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Singular values are at least 1, so the polar factor moves by no more than the momentum; then it is rounded."""
    generator = torch.Generator().manual_seed(0)
    u, _, v = torch.linalg.svd(torch.randn(shape, generator=generator, dtype=torch.float64), full_matrices=False)
    grad = u @ torch.diag(torch.linspace(1, 2, min(shape), dtype=torch.float64)) @ v
    param = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    param.grad = grad
    options: dict[str, Any] = {"lr": 1.0, "momentum": 0.0, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"}
    muonshard.Muon([param], orthogonalize=polar, exchange_dtype=dtype, **options).step()
    update = -param.detach() / (0.2 * max(shape) ** 0.5)
    unit = torch.finfo(dtype).eps / 2
    bound = unit * (torch.linalg.norm(grad) + torch.linalg.norm(u @ v))
    error = torch.linalg.norm(update - u @ v)
    assert bound / 10 < error < bound


def other_dtypes(dtype: torch.dtype) -> list[int]:
    model, optimizer = cases.make_run(cases.hsdp, exchange_dtype=dtype)
    cases.train(model, optimizer, range(3))
    return same_bits.differing(model.parameters(), cases.unbroken(3, exchange_dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_any_exchange_dtype_gives_the_bits_of_one_process(pool: Pool, dtype: torch.dtype) -> None:
    assert pool.run(4, other_dtypes, dtype) == [[]] * 4
