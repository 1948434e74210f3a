"""Newton-Schulz: the orthogonal factor of a matrix by matrix products alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

Coefficients = tuple[float, float, float]
JORDAN: Coefficients = (3.4445, -4.7750, 2.0315)


@runtime_checkable
class Orthogonalizer(Protocol):
    """Any callable that maps a stack of matrices `(B, m, n)` to a stack of the same shape and dtype."""

    def __call__(self, stack: Tensor, /) -> Tensor: ...


@dataclass(frozen=True)
class NewtonSchulz:
    """`X <- a X + (b R + c R^2) X` with `R = X X^T`, one `(a, b, c)` per step, on X scaled to norm one."""

    coefficients: tuple[Coefficients, ...] = (JORDAN,) * 5
    eps: float = 1e-7
    normalize: Literal["frobenius", "schatten4"] = "frobenius"
    dtype: torch.dtype | None = None

    @torch.no_grad()
    def __call__(self, stack: Tensor, /) -> Tensor:
        """Orthogonalise each matrix of `stack` `(B, m, n)`; a new tensor of the same shape and dtype."""
        result = torch.empty_like(stack, memory_format=torch.contiguous_format)
        for matrix, target in zip(stack, result, strict=True):
            tall = matrix.size(0) > matrix.size(1)
            x = torch.empty(matrix.mT.shape if tall else matrix.shape, dtype=torch.bfloat16, device=stack.device)
            x.copy_(matrix.mT if tall else matrix)
            x.div_(x.norm().clamp(min=self.eps))
            for a, b, c in self.coefficients:
                gram = x @ x.mT
                x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
            target.copy_(x.mT if tall else x)
        return result

    def flops(self, m: int, n: int) -> int:
        """FLOPs for one `(m, n)` matrix; a multiply-add counts 2."""
        m, n = min(m, n), max(m, n)
        return len(self.coefficients) * (4 * m * m * n + 2 * m**3)


def resolve(
    orthogonalize: str | Callable[[Tensor], Tensor],
    *,
    coefficients: Coefficients = JORDAN,
    steps: int = 5,
    eps: float = 1e-7,
    normalize: Literal["frobenius", "schatten4"] = "frobenius",
) -> Orthogonalizer:
    """The orthogonaliser that a name stands for; a callable is returned as it is."""
    if callable(orthogonalize):
        return orthogonalize
    if orthogonalize != "newton_schulz":
        raise ValueError(f"orthogonalize={orthogonalize!r} is unknown: use 'newton_schulz' or a callable")
    return NewtonSchulz((coefficients,) * steps, eps, normalize)


def flops(orthogonalizer: Orthogonalizer, m: int, n: int) -> int:
    """FLOPs of `orthogonalizer` for one `(m, n)` matrix; those of the standard form for a plain callable."""
    return orthogonalizer.flops(m, n) if isinstance(orthogonalizer, NewtonSchulz) else NewtonSchulz().flops(m, n)
