"""Products of stacks of matrices, and the choice of who computes a symmetric one.

A product whose result is known to be symmetric needs half the work: on a CPU it is cut into panels of rows that reach
from the diagonal to the right and are mirrored, on a GPU a Triton kernel does the same by tiles. Where neither can be
used, torch computes it in full.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from muonshard.orthogonalize.devices import why_no_triton

# A factor of every matrix of a stack, or a float32 tensor (B, 1, 1) with one for each.
Scalar = float | Tensor
Term = tuple[Scalar, Tensor]

# Rows of a CPU's panels, and rows up to which it multiplies whole: where narrower panels, or any, measure slower.
PANEL_ROWS = {torch.bfloat16: 128, torch.float32: 48, torch.float64: 48}
WHOLE_ROWS = {torch.bfloat16: 256, torch.float32: 128, torch.float64: 128}

# Side of the kernel's square tiles, and the fewest rows that fill its grid. Chosen by size, not measured.
TILE = 128
FEWEST_KERNEL_ROWS = 256
KERNEL_DTYPES = (torch.bfloat16, torch.float16)

_logger = logging.getLogger(__name__)


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
    return symmetric_product(x, x.mT, out)


def symmetric_product(a: Tensor, b: Tensor, out: Tensor, *, alpha: float = 1.0, terms: Sequence[Term] = ()) -> Tensor:
    """As `product`, for stacks whose product the caller knows to be symmetric, as is every matrix of `terms`."""
    rows = out.size(-1)
    if _in_panels(rows, a.dtype, a.device):
        for i in range(out.size(0)):
            ith = [(factor if isinstance(factor, float) else factor[i], matrix[i]) for factor, matrix in terms]
            _panels(a[i], b[i], out[i], alpha, ith)
        return out
    if _by_kernel(rows, a.dtype, a.device):
        from muonshard.orthogonalize.kernels.symmetric import symmetric_product as kernel

        return kernel(a, b, out, alpha=alpha, terms=terms)
    return product(a, b, out, alpha=alpha, terms=terms)


def symmetric_flops(rows: int, inner: int, dtype: torch.dtype, device: torch.device) -> int:
    """FLOPs of a symmetric `(rows, rows)` product over `inner`, as `device` executes it."""
    if _in_panels(rows, dtype, device):
        step = PANEL_ROWS[dtype]
        entries = sum(min(step, rows - top) * (rows - top) for top in range(0, rows, step))
    elif _by_kernel(rows, dtype, device):
        tiles = -(-rows // TILE)
        entries = tiles * (tiles + 1) // 2 * TILE * TILE
    else:
        entries = rows * rows
    return 2 * inner * entries


def _in_panels(rows: int, dtype: torch.dtype, device: torch.device) -> bool:
    return device.type == "cpu" and rows > WHOLE_ROWS[dtype]


def _by_kernel(rows: int, dtype: torch.dtype, device: torch.device) -> bool:
    if device.type != "cuda" or rows < FEWEST_KERNEL_ROWS or dtype not in KERNEL_DTYPES:
        return False
    return _kernel_is_there(device)


@functools.cache
def _kernel_is_there(device: torch.device) -> bool:
    """Whether `device` can run the kernel; why not is logged here, hence once."""
    reason = why_no_triton(device) or _failure(device)
    if reason is not None:
        _logger.warning("symmetric products on %s are computed in full by torch: %s", device, reason)
    return reason is None


def _failure(device: torch.device) -> str | None:
    """What goes wrong with the kernel on a small product, such as a missing compiler; None where nothing does."""
    try:
        from muonshard.orthogonalize.kernels.symmetric import symmetric_product as kernel

        identity = torch.eye(TILE, dtype=torch.bfloat16, device=device)[None]
        right = torch.equal(kernel(identity, identity, torch.empty_like(identity)), identity)
    except Exception as error:  # whatever it is, torch's own product takes over
        return f"the Triton kernel failed with {type(error).__name__}: {error}"
    return None if right else "the Triton kernel does not square the identity"


def _panels(a: Tensor, b: Tensor, out: Tensor, alpha: float, terms: Sequence[Term]) -> None:
    """A symmetric product of matrices, not stacks: torch copies parts of stacks before it multiplies them."""
    rows, step = out.size(-1), PANEL_ROWS[a.dtype]
    for top in range(0, rows, step):
        bottom = min(top + step, rows)
        panel = slice(top, bottom), slice(top, rows)
        parts = [(factor, matrix[panel]) for factor, matrix in terms]
        product(a[panel[0]], b[:, panel[1]], out[panel], alpha=alpha, terms=parts)
        out[bottom:, top:bottom].copy_(out[top:bottom, bottom:].mT)
