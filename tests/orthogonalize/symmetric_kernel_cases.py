"""The Triton kernel against torch, for a process with TRITON_INTERPRET=1: prints a line for each case that is wrong."""

from __future__ import annotations

import torch
from torch import Tensor

from muonshard.orthogonalize.kernels.symmetric import symmetric_product

TILE = 16
# Rows and inner size: one tile, several, and sizes that fill no tile.
SIZES = ((16, 32), (64, 96), (40, 70), (7, 130))
TOLERANCE = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""One rounding of a result, with a little for sums in another order."""


def wrong(result: Tensor, expected: Tensor) -> str | None:
    """What is wrong with a result, given the same in float64."""
    if not torch.equal(result, result.mT):
        return "its triangles differ"
    error = float((result.double() - expected).abs().max() / expected.abs().max())
    return None if error <= TOLERANCE[result.dtype] else f"it is off by {error:.2g}"


def gram(m: int, k: int, dtype: torch.dtype) -> str | None:
    x = torch.randn(3, m, k, generator=torch.Generator().manual_seed(m)).to(dtype)
    out = torch.full((3, m, m), torch.nan, dtype=dtype)
    return wrong(symmetric_product(x, x.mT, out, tile=TILE), x.double() @ x.double().mT)


def square_with_terms(m: int, k: int, dtype: torch.dtype, terms: int) -> str | None:
    """A square of every second row and column of larger matrices, each with factors of its own."""
    x = torch.randn(2, 2 * m, 2 * m, generator=torch.Generator().manual_seed(k), dtype=torch.float64) / m**0.5
    a = (x + x.mT).to(dtype)[:, ::2, ::2]
    factors = [torch.tensor([0.5, -2.0]).view(2, 1, 1), 3.0]
    used = list(zip(factors, (a, a.mT), strict=True))[:terms]
    out = torch.full((2, m, 2 * m), torch.nan, dtype=dtype)[..., ::2]
    expected = 1.5 * a.double() @ a.double()
    for factor, matrix in used:
        expected = expected + factor * matrix.double()
    return wrong(symmetric_product(a, a, out, alpha=1.5, terms=used, tile=TILE), expected)


def main() -> None:
    cases = 0
    for dtype in TOLERANCE:
        for m, k in SIZES:
            outcomes = {"gram": gram(m, k, dtype)}
            outcomes |= {f"{n} terms": square_with_terms(m, k, dtype, n) for n in range(3)}
            cases += len(outcomes)
            for name, problem in outcomes.items():
                if problem is not None:
                    print(f"{name} of ({m}, {k}) in {dtype}: {problem}")
    print(f"{cases} cases")


if __name__ == "__main__":
    main()
