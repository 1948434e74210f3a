"""Products of stacks of matrices, symmetric ones among them.

A product whose result is known to be symmetric needs half the work: on a CPU it is cut into blocks of which those above
the diagonal are computed once and mirrored. On a GPU torch computes it in full.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# A factor of every matrix of a stack, or a float32 tensor (B, 1, 1) with one for each.
Scalar = float | Tensor
Term = tuple[Scalar, Tensor]

# Rows at or below which a CPU multiplies a symmetric block whole: halving it again measures slower.
LEAF_ROWS = {torch.bfloat16: 256, torch.float32: 128, torch.float64: 128}


def product(a: Tensor, b: Tensor, out: Tensor, *, alpha: float = 1.0, terms: Sequence[Term] = ()) -> Tensor:
    """`out <- alpha a b + sum of scalar * matrix over terms`, for `(m, k)`, `(k, n)` and `(m, n)` or stacks of such.

    Accumulated in float32 and rounded, once more for every term after the first. `out` may not overlap any input.
    """
    fused = torch.addmm if out.ndim == 2 else torch.baddbmm
    rest = list(terms)
    beta, first = rest[0] if rest else (0.0, out)
    if isinstance(beta, float):
        fused(first, a, b, beta=beta, alpha=alpha, out=out)
        rest = rest[1:]
    else:
        fused(out, a, b, beta=0, alpha=alpha, out=out)
    for factor, matrix in rest:
        if isinstance(factor, float):
            out.add_(matrix, alpha=factor)
        else:
            out.addcmul_(matrix, factor.to(out.dtype))
    return out


def gram(x: Tensor, out: Tensor) -> Tensor:
    """`out <- x x^T` for a stack `(B, m, n)`."""
    return _symmetric(x, x.mT, out, 1.0, ())


def symmetric_product(a: Tensor, b: Tensor, out: Tensor, *, alpha: float = 1.0, terms: Sequence[Term] = ()) -> Tensor:
    """As `product`, for square stacks whose product the caller knows to be symmetric, as is every matrix of `terms`."""
    return _symmetric(a, b, out, alpha, terms)


def symmetric_flops(rows: int, inner: int, dtype: torch.dtype, device: torch.device) -> int:
    """FLOPs of a symmetric `(rows, rows)` product over `inner`, as `device` executes it."""
    if device.type == "cpu":
        return 2 * inner * _blocked_entries(rows, LEAF_ROWS[dtype])
    return 2 * inner * rows * rows


def _symmetric(a: Tensor, b: Tensor, out: Tensor, alpha: float, terms: Sequence[Term]) -> Tensor:
    leaf = LEAF_ROWS[a.dtype]
    if a.device.type == "cpu" and out.size(-1) > leaf:
        for i in range(out.size(0)):
            ith = [(factor if isinstance(factor, float) else factor[i], matrix[i]) for factor, matrix in terms]
            _blocked(a[i], b[i], out[i], alpha, ith, leaf)
        return out
    return product(a, b, out, alpha=alpha, terms=terms)


def _blocked(a: Tensor, b: Tensor, out: Tensor, alpha: float, terms: Sequence[Term], leaf: int) -> None:
    """A symmetric product of matrices, not stacks: torch copies blocks of stacks before it multiplies them."""
    rows = out.size(-1)
    if rows <= leaf:
        product(a, b, out, alpha=alpha, terms=terms)
        return
    top, bottom = slice(0, _half(rows)), slice(_half(rows), rows)
    corner = [(factor, matrix[top, bottom]) for factor, matrix in terms]
    product(a[top], b[:, bottom], out[top, bottom], alpha=alpha, terms=corner)
    out[bottom, top].copy_(out[top, bottom].mT)
    for part in (top, bottom):
        inner = [(factor, matrix[part, part]) for factor, matrix in terms]
        _blocked(a[part], b[:, part], out[part, part], alpha, inner, leaf)


def _blocked_entries(rows: int, leaf: int) -> int:
    """How many entries of a `(rows, rows)` result `_blocked` computes."""
    if rows <= leaf:
        return rows * rows
    top = _half(rows)
    return top * (rows - top) + _blocked_entries(top, leaf) + _blocked_entries(rows - top, leaf)


def _half(rows: int) -> int:
    """Where rows are cut: in the middle, on a multiple of 16, which keeps blocks aligned to cache lines."""
    return -(-rows // 32) * 16
