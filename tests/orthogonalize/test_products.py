"""Symmetric products cut into blocks are the products, for the FLOPs that they say; buffers are as few as is said."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.counting import PeakMemory
from muonshard.orthogonalize import CUBIC, JORDAN, NewtonSchulz, polar_express
from muonshard.orthogonalize import products as products_module
from muonshard.orthogonalize.newton_schulz import CHUNK_ELEMENTS
from muonshard.orthogonalize.products import gram, product, symmetric_product

DTYPES = st.sampled_from([torch.bfloat16, torch.float32, torch.float64])


@settings(max_examples=40)
@given(st.integers(1, 150), st.integers(1, 60), st.integers(1, 3), DTYPES, st.sampled_from([16, 32, 64]))
def test_a_gram_matrix_in_blocks_is_the_product_with_its_transpose(
    m: int, n: int, count: int, dtype: torch.dtype, leaf: int
) -> None:
    x = torch.randn(count, m, n, generator=torch.Generator().manual_seed(m + n)).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(products_module.LEAF_ROWS, dtype, leaf)
        result = gram(x, out=torch.full((count, m, m), torch.nan, dtype=dtype)).double()
    expected = x.double() @ x.double().mT
    scale = x.double().norm(dim=-1)
    assert ((result - expected).abs() <= 4 * torch.finfo(dtype).eps * scale[:, :, None] * scale[:, None]).all()


@settings(max_examples=40)
@given(st.integers(1, 100), st.integers(1, 3), DTYPES, st.booleans())
def test_a_symmetric_product_adds_its_terms_whether_their_factors_are_floats_or_tensors(
    m: int, count: int, dtype: torch.dtype, as_tensors: bool
) -> None:
    x = torch.randn(count, m, m, generator=torch.Generator().manual_seed(m), dtype=torch.float64) / m**0.5
    a = (x + x.mT).to(dtype)
    b = (a.double() @ a.double()).to(dtype)  # commutes with a up to rounding, so that a b is symmetric up to rounding
    factors = [torch.full((count, 1, 1), factor) if as_tensors else factor for factor in (1.5, -0.25)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(products_module.LEAF_ROWS, dtype, 16)
        out = torch.empty(count, m, m, dtype=dtype)
        result = symmetric_product(a, b, out, alpha=2.0, terms=[(factors[0], a), (factors[1], b)])
    expected = 2.0 * a.double() @ b.double() + 1.5 * a.double() - 0.25 * b.double()
    bound = torch.finfo(dtype).eps * 16 * max(1.0, float(expected.abs().max()))
    assert float((result.double() - expected).abs().max()) <= bound


def test_a_product_without_terms_does_not_read_what_was_in_its_result() -> None:
    a = torch.eye(4)[None]
    assert torch.equal(product(a, a, out=torch.full((1, 4, 4), torch.nan)), a)


@pytest.mark.parametrize(
    "coefficients", [(JORDAN,) * 5, polar_express(4), (CUBIC,) * 6], ids=["jordan", "polar", "cubic"]
)
@pytest.mark.parametrize("shape", [(8, 8), (1, 40), (33, 70), (200, 90), (264, 700), (150, 300)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_flops_are_what_torch_counts(
    coefficients: tuple[tuple[float, float, float], ...], shape: tuple[int, int], dtype: torch.dtype
) -> None:
    form = NewtonSchulz(coefficients, dtype=dtype)
    padded = 64 * math.ceil(shape[0] / 8) * math.ceil(shape[1] / 8)
    count = max(1, CHUNK_ELEMENTS[dtype] // padded)  # small matrices go in chunks of this many, filled up with zeros
    with FlopCounterMode(display=False) as counter:
        form(torch.randn(count, *shape))
    assert counter.get_total_flops() == count * form.flops(*shape)


def test_plain_flops_are_the_formula_of_segments() -> None:
    m, n, steps = 512, 2048, 5
    for dtype, count in ((torch.bfloat16, 3), (torch.float32, 2)):
        formula = 4 * count * m * m * n + 2 * (4 * steps - 3 * count) * m**3
        assert NewtonSchulz(dtype=dtype).flops(m, n, "meta") == formula


def test_one_matrix_at_a_time_needs_memory_for_one_matrix() -> None:
    m, n, count = 256, 1024, 6
    stack = torch.randn(count, m, n, generator=torch.Generator().manual_seed(0)).bfloat16()
    form = NewtonSchulz(dtype=torch.bfloat16)
    with PeakMemory() as memory:
        form(stack, out=stack)
    bound = 2 * (2 * m * n + 4 * m * m) + 4 * 64 * n  # and 64 rows in float32
    bound += 2 * m // 2 * n  # and the half of a matrix that oneDNN copies on CPUs with AMX
    assert memory.peak_bytes <= bound + (1 << 16)
    assert memory.held_bytes == 0
