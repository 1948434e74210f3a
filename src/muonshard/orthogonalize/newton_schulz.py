"""Newton-Schulz: from a matrix to the nearest orthogonal one, by matrix products alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from muonshard.orthogonalize.coefficients import JORDAN, Coefficients
from muonshard.orthogonalize.cost import flops
from muonshard.orthogonalize.devices import iteration_dtype
from muonshard.orthogonalize.iteration import Workspace, iterate, scale_to_schatten4, workspace_elements
from muonshard.orthogonalize.restarts import LIMITS, restarts, segments
from muonshard.orthogonalize.spare import Spare

Normalization = Literal["frobenius", "schatten4"]

# Buffers have sides of a multiple of this, so that every matrix of a stack starts on a cache line wherever it stands in
# it: float32 kernels give other bits on other alignments.
ALIGNMENT = 8
# On a CPU, small matrices go through batched products in chunks of so many elements, filled up with zeros: the size is
# always the same, so that the kernel, hence the bits, is the same for one matrix and for a thousand. In bfloat16 a call
# costs more, so there larger matrices gain.
CHUNK_ELEMENTS = {torch.bfloat16: 1 << 15, torch.float32: 1 << 13, torch.float64: 1 << 13}
# On an accelerator, where chunks only bound the memory.
CHUNK_ELEMENTS_ACCELERATOR = 1 << 26


@dataclass(frozen=True)
class NewtonSchulz:
    """Orthogonalise stacks of matrices: `X <- a X + b (X X^T) X + c (X X^T)^2 X`, once for each `(a, b, c)`.

    `coefficients`: one triple per step; without any, matrices are only normalised, as in `torch.optim.Muon`.
    `eps`: the least norm to divide by, so that a matrix of zeros stays one.
    `normalize`: "frobenius", as `torch.optim.Muon`; or "schatten4", `||X X^T||_F^(1/2)`, which is never below the
        largest singular value either, but closer to it, so that small singular values start several times larger.
    `dtype`: of the iteration (bfloat16, float32 or float64); None is the fastest that the device has in hardware.
    `restart`: the steps before which `X X^T` is formed afresh; None is the fastest set for each shape that is as
        accurate as all of them, `range(1, steps)`, which is the standard form and `torch.optim.Muon`'s bits.

    On a CPU the result for a matrix is the same bits however it is stacked, strided and aligned.
    """

    coefficients: tuple[Coefficients, ...] = (JORDAN,) * 5
    eps: float = 1e-7
    normalize: Normalization = "frobenius"
    dtype: torch.dtype | None = None
    restart: tuple[int, ...] | None = None
    _spare: Spare = field(default_factory=Spare, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.normalize not in ("frobenius", "schatten4"):
            raise ValueError(f"normalize={self.normalize!r} is unknown: use 'frobenius' or 'schatten4'")
        if self.dtype is not None and self.dtype not in LIMITS:
            known = ", ".join(map(str, LIMITS))
            raise ValueError(f"dtype={self.dtype} is not one to iterate in: use None or one of {known}")
        if not self.eps > 0:
            raise ValueError(f"eps={self.eps} must be above 0, or a matrix of zeros becomes one of NaN")
        steps = len(self.coefficients)
        if self.restart is not None and list(self.restart) != [k for k in range(1, steps) if k in self.restart]:
            raise ValueError(f"restart={self.restart} must name steps after the first of {steps}, in rising order")

    @torch.no_grad()
    def __call__(self, stack: Tensor, /, *, out: Tensor | None = None) -> Tensor:
        """The stack `(B, m, n)` with each matrix orthogonalised, in its own dtype.

        The result is written to `out` if given, which may be `stack` itself. Zeros stay zeros. A matrix with a number
        that is not finite comes out not finite, and affects no other. Beside the result this needs `2 m n + 4 m^2`
        elements of the iteration's dtype, `m <= n`: a CPU takes matrices one at a time, or in chunks of 2^15 elements,
        and keeps the largest such buffer for later calls.

        Raises ValueError for a stack that is not floating point of three dims, and for an `out` that does not fit it.
        """
        _check(stack, out)
        result = torch.empty(stack.shape, dtype=stack.dtype, device=stack.device) if out is None else out
        if stack.numel() == 0:
            return result
        tall = stack.size(1) > stack.size(2)
        target = result.mT if tall else result
        count, m, n = target.shape
        dtype = self.dtype or iteration_dtype(stack.device)
        plan = segments(len(self.coefficients), self._restarts(m, n, dtype))
        shape = _work_shape(m, n, count, dtype, stack.device)
        buffer = self._spare.take(workspace_elements(shape), dtype, stack.device)
        work = Workspace.over(buffer, shape, m)
        for start in range(0, count, shape[0]):
            part = slice(start, min(start + shape[0], count))
            self._load(stack[part], work)
            x = iterate(work, self.coefficients, plan)
            target[part].copy_(x[: part.stop - start, :m, :n])
        self._spare.give_back(buffer)
        return result

    def flops(self, m: int, n: int, device: torch.device | str = "cpu") -> int:
        """FLOPs for one `(m, n)` matrix as `device` executes them, the padding of odd sizes included."""
        m, n = min(m, n), max(m, n)
        device = torch.device(device)
        dtype = self.dtype or iteration_dtype(device)
        plan = segments(len(self.coefficients), self._restarts(m, n, dtype))
        return flops(_align(m), _align(n), self.coefficients, plan, dtype, device)

    def _restarts(self, m: int, n: int, dtype: torch.dtype) -> tuple[int, ...]:
        return restarts(m, n, self.coefficients, dtype, self.normalize) if self.restart is None else self.restart

    def _load(self, part: Tensor, work: Workspace) -> None:
        """Fill `work.x` with the matrices of `part`, wide and normalised, and zeros around them."""
        # In the orientation they came in, so that the norm adds up in the order that torch.optim.Muon's does.
        source = work.y.view(-1)[: part.numel()].view(part.shape).copy_(part)
        norm = torch.linalg.vector_norm(source, dim=(1, 2), keepdim=True).clamp_(min=self.eps)
        if part.size(1) > part.size(2):
            source = source.mT
        count, m, n = source.shape
        if work.x.shape != source.shape:
            work.x.zero_()
        torch.div(source, norm, out=work.x[:count, :m, :n])
        if self.normalize == "schatten4":
            scale_to_schatten4(work)


def _work_shape(m: int, n: int, count: int, dtype: torch.dtype, device: torch.device) -> tuple[int, int, int]:
    """The shape of the buffers; on a CPU it does not depend on `count`."""
    m, n = _align(m), _align(n)
    if device.type != "cpu":
        return max(1, min(count, CHUNK_ELEMENTS_ACCELERATOR // (m * n))), m, n
    return max(1, CHUNK_ELEMENTS[dtype] // (m * n)), m, n


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _check(stack: Tensor, out: Tensor | None) -> None:
    if stack.ndim != 3 or not stack.is_floating_point():
        raise ValueError(f"stack must be floating point of shape (B, m, n), not {stack.dtype} of {tuple(stack.shape)}")
    if out is not None and (out.shape != stack.shape or out.device != stack.device):
        raise ValueError(
            f"out must have the stack's shape {tuple(stack.shape)} and device {stack.device}, "
            f"not {tuple(out.shape)} and {out.device}"
        )
