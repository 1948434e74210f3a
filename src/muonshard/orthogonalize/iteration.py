"""The iteration on a stack of normalised matrices `(B, m, n)`, `m <= n`, in work buffers that are used over and over.

Inside a segment, R and Q are held as a multiple of the identity plus the rest: `R = rho I + r` and `Q = q I + p`. Their
diagonals are much larger than what stands beside them, and all alike, so rounding them to bfloat16 would scale every
singular value by the same wrong factor; around their mean it is noise, and smaller. That is what keeps the error of
long segments below the standard form's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from muonshard.orthogonalize.coefficients import Coefficients
from muonshard.orthogonalize.products import Scalar, gram, product, symmetric_product

# Rows whose squares are summed in float32 at a time: their float32 copy is what that needs in memory.
ROWS_AT_A_TIME = 64

# Buffers (B, m, m) that the longest segment takes.
SQUARES = 4


@dataclass(slots=True)
class Workspace:
    """`x` holds the matrices `(B, m, n)`, `y` what they turn into; `squares` are `(B, m, m)` for the small side.

    Only the first `rows` rows of each matrix are in use, the others are zero. These buffers are all that an iteration
    needs, whatever its length.
    """

    x: Tensor
    y: Tensor
    squares: list[Tensor]
    rows: int
    gram_is_formed: bool = False

    @classmethod
    def over(cls, buffer: Tensor, shape: tuple[int, int, int], rows: int) -> Self:
        """Views of a flat `buffer` of at least `workspace_elements(shape)`, for a stack of `shape` `(B, m, n)`."""
        count, m, n = shape
        sides = [(m, n)] * 2 + [(m, m)] * SQUARES
        parts = buffer[: workspace_elements(shape)].split([count * rows * columns for rows, columns in sides])
        x, y, *squares = (part.view(count, *side) for part, side in zip(parts, sides, strict=True))
        return cls(x, y, squares, rows)

    def gram(self) -> Tensor:
        """`R = x x^T`, in the first square, unless it is there already."""
        r = self.squares[0]
        if not self.gram_is_formed:
            gram(self.x, out=r)
        self.gram_is_formed = False
        return r


def workspace_elements(shape: tuple[int, int, int]) -> int:
    """How many elements a workspace takes for a stack of `shape` `(B, m, n)`."""
    count, m, n = shape
    return count * (2 * m * n + SQUARES * m * m)


def iterate(work: Workspace, coefficients: Sequence[Coefficients], segments: Sequence[range]) -> Tensor:
    """Apply the steps to `work.x`; returns the buffer that holds the result, which is `work.x` again."""
    standard = all(len(segment) == 1 for segment in segments)
    for segment in segments:
        if standard:
            _standard_step(work, coefficients[segment.start])
        else:
            _gram_segment(work, [coefficients[step] for step in segment])
        work.x, work.y = work.y, work.x
    return work.x


def scale_to_schatten4(work: Workspace) -> None:
    """Divide each matrix of `work.x` by its Schatten-4 norm, `||x x^T||_F^(1/2)`, which costs no further product."""
    r = work.gram()
    square = torch.linalg.vector_norm(r, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    square.clamp_(min=torch.finfo(torch.float32).tiny)
    r.mul_(square.reciprocal().to(r.dtype))
    work.x.mul_(square.rsqrt().to(work.x.dtype))
    work.gram_is_formed = True


def _standard_step(work: Workspace, coefficients: Coefficients) -> None:
    """`y <- a x + (b R + c R^2) x`, operation for operation what `torch.optim.Muon` does."""
    a, b, c = coefficients
    r = work.gram()
    z = work.squares[1]
    _polynomial(r, b, c, out=z)
    product(z, work.x, out=work.y, terms=[(a, work.x)])


def _gram_segment(work: Workspace, steps: Sequence[Coefficients]) -> None:
    """`y <- Q x`, where Q collects `Z = a I + b R + c R^2` over the steps and R goes along by `R <- Z R Z`.

    With `Z = zeta I + z` that is `z = c r^2 + (b + 2 c rho) r` and `zeta = a + b rho + c rho^2`; so for the others.
    """
    rho, r = _centred_gram(work)
    free = work.squares[1:]
    q: Scalar = 1.0
    p: Tensor | None = None
    for index, (a, b, c) in enumerate(steps):
        z, t = free.pop(), free[0]
        zeta = a + b * rho + c * rho * rho
        _polynomial(r, b + 2 * c * rho, c, out=z)
        if index + 1 < len(steps):
            symmetric_product(r, z, out=t, terms=[(zeta, r), (rho, z)])
            symmetric_product(t, z, out=r, terms=[(zeta, t), (rho * zeta, z)])
            rho = _recentre(r, rho * zeta * zeta, work.rows)
        if p is None:
            p, q = z, zeta
        else:
            symmetric_product(z, p, out=t, terms=[(zeta, p), (q, z)])
            p, q, free = t, q * zeta, [p, z]
    assert p is not None
    product(p, work.x, out=work.y, terms=[(q, work.x)])


def _polynomial(r: Tensor, linear: Scalar, quadratic: float, out: Tensor) -> None:
    """`out <- linear r + quadratic r^2`."""
    if quadratic:
        symmetric_product(r, r, out=out, alpha=quadratic, terms=[(linear, r)])
    else:
        torch.mul(r, linear, out=out)


def _centred_gram(work: Workspace) -> tuple[Scalar, Tensor]:
    """`(rho, r)` with `x x^T = rho I + r`, whose diagonal comes from sums in float32 and is rounded around its mean."""
    r = work.gram()
    parts = work.x.split(ROWS_AT_A_TIME, dim=1)
    norms = [torch.linalg.vector_norm(part, dim=-1, dtype=_at_least_float32(r)) for part in parts]
    diagonal = torch.cat(norms, dim=1).square_()
    mean = diagonal[:, : work.rows].mean(dim=-1, keepdim=True)
    r.diagonal(dim1=-2, dim2=-1).copy_(diagonal - mean)
    return _scalar(mean), r


def _recentre(r: Tensor, rho: Scalar, rows: int) -> Scalar:
    """Move the mean of r's diagonal into rho, which is returned."""
    diagonal = r.diagonal(dim1=-2, dim2=-1)
    mean = diagonal[:, :rows].to(_at_least_float32(r)).mean(dim=-1, keepdim=True)
    diagonal.copy_(diagonal - mean)
    return rho + _scalar(mean)


def _at_least_float32(r: Tensor) -> torch.dtype:
    return torch.promote_types(r.dtype, torch.float32)


def _scalar(values: Tensor) -> Scalar:
    """`(B, 1)` as a float where that is free, for products fuse it; else as a tensor, not to wait for the device."""
    return values.item() if values.numel() == 1 and values.device.type == "cpu" else values.unsqueeze(-1)
