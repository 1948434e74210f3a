"""Where the Gram form restarts: never so seldom that rounding takes over, and never where it would cost more."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from muonshard.orthogonalize import CUBIC, JORDAN, NewtonSchulz, polar_express
from muonshard.orthogonalize.restarts import LIMITS, restarts, segments

SIZES = st.integers(1, 20_000)
COMPOSITIONS = st.integers(1, 12).flatmap(
    lambda steps: st.sampled_from([(JORDAN,) * steps, polar_express(steps), (CUBIC,) * steps])
)
FEW_ROWS_IN_USE = 16


def few_rows_in_use(seed: int) -> Tensor:
    """Two 8 x 8 blocks with one singular value of 1 and others of 0.006 to 0.06, (256, 1024) with the zeros around."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.linalg.qr(torch.randn(2, 8, 8, generator=generator, dtype=torch.float64)).Q
    s = 0.06 * 10 ** -torch.rand(2, 8, generator=generator, dtype=torch.float64)
    s[0, 0] = 1.0
    matrix = torch.zeros(256, 1024)
    matrix[:FEW_ROWS_IN_USE, :FEW_ROWS_IN_USE] = torch.block_diag(*(q * s[:, None] @ q.mT))
    return matrix


def largest_singular_value(form: NewtonSchulz, seed: int) -> float:
    result = form(few_rows_in_use(seed)[None])[0, :FEW_ROWS_IN_USE, :FEW_ROWS_IN_USE]
    return float(torch.linalg.matrix_norm(result, 2))


@given(SIZES, SIZES, COMPOSITIONS, st.sampled_from(list(LIMITS)), st.sampled_from(["frobenius", "schatten4"]))
def test_segments_tile_the_steps_and_do_not_depend_on_orientation(
    m: int, n: int, coefficients: tuple[tuple[float, float, float], ...], dtype: torch.dtype, normalize: str
) -> None:
    chosen = restarts(m, n, coefficients, dtype, normalize)
    steps = itertools.chain.from_iterable(segments(len(coefficients), chosen))
    assert list(steps) == list(range(len(coefficients)))
    assert chosen == restarts(n, m, coefficients, dtype, normalize)


@given(SIZES, SIZES, COMPOSITIONS, st.sampled_from(list(LIMITS)))
def test_the_chosen_restarts_never_cost_more_flops_than_the_standard_form(
    m: int, n: int, coefficients: tuple[tuple[float, float, float], ...], dtype: torch.dtype
) -> None:
    standard = NewtonSchulz(coefficients, dtype=dtype, restart=tuple(range(1, len(coefficients))))
    assert NewtonSchulz(coefficients, dtype=dtype).flops(m, n) <= standard.flops(m, n)


@pytest.mark.parametrize("seed", range(6))
def test_bfloat16_stays_bounded_where_rounding_does_not_average_out(seed: int) -> None:
    form = NewtonSchulz(dtype=torch.bfloat16)
    assert len(restarts(256, 1024, form.coefficients, torch.bfloat16)) < len(form.coefficients) - 1
    assert largest_singular_value(form, seed) < 1.264  # above this fixed point of Jordan's quintic it diverges


def test_one_restart_alone_would_let_bfloat16_diverge() -> None:
    form = NewtonSchulz(dtype=torch.bfloat16, restart=(3,))
    assert max(largest_singular_value(form, seed) for seed in range(6)) > 10


def test_float32_needs_one_restart_where_bfloat16_needs_two() -> None:
    jordan = (JORDAN,) * 5
    assert restarts(512, 2048, jordan, torch.float32) == (3,)
    assert restarts(512, 2048, jordan, torch.bfloat16) == (2, 4)


def test_coefficients_that_diverge_get_the_standard_form() -> None:
    wild = ((30.0, 40.0, 50.0),) * 5
    assert restarts(512, 2048, wild, torch.float32) == (1, 2, 3, 4)


@pytest.mark.parametrize("restart", [(0,), (5,), (3, 1), (2, 2)], ids=str)
def test_restarts_out_of_range_or_order_are_refused(restart: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="restart="):
        NewtonSchulz(restart=restart)
