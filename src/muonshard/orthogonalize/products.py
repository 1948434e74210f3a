"""Products of stacks of matrices, and the choice of who computes a symmetric one.

A product whose result is known to be symmetric needs half the work: on a CPU it is cut into blocks of which those above
the diagonal are computed once and mirrored, on a GPU a Triton kernel does the same by tiles.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from muonshard.orthogonalize.devices import has_triton

# A factor of every matrix of a stack, or a float32 tensor (B, 1, 1) with one for each.
Scalar = float | Tensor
Term = tuple[Scalar, Tensor]

# Rows at or below which a CPU multiplies a symmetric block whole: where halving it again measures slower, for the
# product of a long matrix with its own transpose and for that of two square ones.
LEAF_ROWS = {"gram": {torch.bfloat16: 128}, "square": {torch.bfloat16: 256}}
LEAF_ROWS_ELSE = 128

# Side of the kernel's square tiles. Chosen for Ampere's and Hopper's shared memory, not measured.
TILE = 128
# Fewer rows do not fill the kernel's grid.
FEWEST_TRITON_ROWS = 256

_logger = logging.getLogger(__name__)


def product(a: Tensor, b: Tensor, out: Tensor, *, alpha: float = 1.0, terms: Sequence[Term] = ()) -> Tensor:
    """`out <- alpha a b + sum of scalar * matrix over terms`, for stacks `(B, m, k)`, `(B, k, n)` and `(B, m, n)`.

    Each result is accumulated in float32 and rounded once per term after the first. `out` may not overlap any input.
    """
    rest = list(terms)
    beta, first = rest[0] if rest else (0.0, out)
    if isinstance(beta, float):
        torch.baddbmm(first, a, b, beta=beta, alpha=alpha, out=out)
        rest = rest[1:]
    else:
        torch.baddbmm(out, a, b, beta=0, alpha=alpha, out=out)
    for factor, matrix in rest:
        if isinstance(factor, float):
            out.add_(matrix, alpha=factor)
        else:
            out.addcmul_(matrix, factor.to(out.dtype))
    return out


def gram(x: Tensor, out: Tensor) -> Tensor:
    """`out <- x x^T` for a stack `(B, m, n)`."""
    return _symmetric(x, x.mT, out, 1.0, (), _leaf_rows("gram", x.dtype))


def symmetric_product(a: Tensor, b: Tensor, out: Tensor, *, alpha: float = 1.0, terms: Sequence[Term] = ()) -> Tensor:
    """As `product`, for square stacks whose product the caller knows to be symmetric, as is every matrix of `terms`."""
    return _symmetric(a, b, out, alpha, terms, _leaf_rows("square", a.dtype))


def symmetric_flops(kind: str, rows: int, inner: int, dtype: torch.dtype, device: torch.device) -> int:
    """FLOPs of a symmetric `(rows, rows)` product over `inner`, as `device` executes it; `kind`: "gram" or "square"."""
    if device.type == "cpu":
        return 2 * inner * _blocked_entries(rows, _leaf_rows(kind, dtype))
    if _kernel_fits(rows, dtype, device):
        tiles = -(-rows // TILE)
        return inner * tiles * (tiles + 1) * TILE * TILE
    return 2 * inner * rows * rows


def _symmetric(a: Tensor, b: Tensor, out: Tensor, alpha: float, terms: Sequence[Term], leaf: int) -> Tensor:
    if a.device.type == "cpu":
        return _blocked(a, b, out, alpha, terms, leaf)
    if _kernel_fits(out.size(-1), a.dtype, a.device):
        from muonshard.orthogonalize.kernels.symmetric import symmetric_product as kernel

        return kernel(a, b, out, alpha=alpha, terms=terms)
    return product(a, b, out, alpha=alpha, terms=terms)


def _blocked(a: Tensor, b: Tensor, out: Tensor, alpha: float, terms: Sequence[Term], leaf: int) -> Tensor:
    rows = out.size(-1)
    if rows <= leaf:
        return product(a, b, out, alpha=alpha, terms=terms)
    top, bottom = slice(0, _half(rows)), slice(_half(rows), rows)
    corner = [(factor, matrix[:, top, bottom]) for factor, matrix in terms]
    product(a[:, top], b[:, :, bottom], out[:, top, bottom], alpha=alpha, terms=corner)
    out[:, bottom, top].copy_(out[:, top, bottom].mT)
    for part in (top, bottom):
        inner = [(factor, matrix[:, part, part]) for factor, matrix in terms]
        _blocked(a[:, part], b[:, :, part], out[:, part, part], alpha, inner, leaf)
    return out


def _blocked_entries(rows: int, leaf: int) -> int:
    """How many entries of a `(rows, rows)` result `_blocked` computes."""
    if rows <= leaf:
        return rows * rows
    top = _half(rows)
    return top * (rows - top) + _blocked_entries(top, leaf) + _blocked_entries(rows - top, leaf)


def _half(rows: int) -> int:
    """Where rows are cut: in the middle, on a multiple of 16, which keeps blocks aligned to cache lines."""
    return -(-rows // 32) * 16


def _leaf_rows(kind: str, dtype: torch.dtype) -> int:
    return LEAF_ROWS[kind].get(dtype, LEAF_ROWS_ELSE)


def _kernel_fits(rows: int, dtype: torch.dtype, device: torch.device) -> bool:
    if device.type != "cuda" or rows < FEWEST_TRITON_ROWS or dtype not in (torch.bfloat16, torch.float16):
        return False
    if not has_triton():
        _say_once("Triton is not installed: symmetric products are computed in full by torch, at twice the FLOPs")
        return False
    return True


@functools.cache
def _say_once(message: str) -> None:
    _logger.info(message)
