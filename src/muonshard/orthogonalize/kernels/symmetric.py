"""A Triton kernel for products that are known to be symmetric: it computes the tiles on and above the diagonal only.

Needs Triton. Nothing imports this module until such a product is wanted on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
from torch import Tensor

from muonshard.orthogonalize.products import TILE, Term

# Depth of a tile, warps and pipeline stages by compute capability. Two tiles of 16-bit numbers in all stages take
# 128 KiB and 48 KiB: within Hopper's 227 KiB of shared memory, and Ampere's 99 KiB on consumer cards. Not measured.
_SCHEDULES = {9: (64, 8, 4), 8: (32, 8, 3)}
_ELSE = (32, 4, 2)


def symmetric_product(
    a: Tensor, b: Tensor, out: Tensor, *, alpha: float = 1.0, terms: Sequence[Term] = (), tile: int = TILE
) -> Tensor:
    """`out <- alpha a b + sum of scalar * matrix over terms`, for stacks `(B, m, k)`, `(B, k, m)` and `(B, m, m)`.

    The result and the matrices of `terms`, at most two, must be symmetric: one triangle is computed, both are written.
    Any strides; bfloat16 or float16, accumulated in float32 and rounded once. `out` may not overlap any input.
    """
    count, m, k = a.shape
    matrices = [matrix for _, matrix in terms] + [out] * (2 - len(terms))
    factors = [_per_matrix(factor, a) for factor, _ in terms] + [_per_matrix(0.0, a)] * (2 - len(terms))
    depth, warps, stages = _SCHEDULES.get(_capability(a.device), _ELSE)
    side = triton.cdiv(m, tile)
    widen = a.device.type == "cpu"  # Triton's interpreter multiplies bfloat16 as if it were integers
    _kernel[(side * (side + 1) // 2, count)](
        a, b, out, *matrices, *factors, alpha, m, k,
        *a.stride(), *b.stride(), *out.stride(), *matrices[0].stride(), *matrices[1].stride(),
        TERMS=len(terms), TILE=tile, DEPTH=depth, WIDEN=widen, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]
    a, b, out, first, second, first_factor, second_factor, alpha, m, k,
    a_stack, a_row, a_column, b_stack, b_row, b_column, out_stack, out_row, out_column,
    first_stack, first_row, first_column, second_stack, second_row, second_column,
    TERMS: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    # The pair (above, right) with above <= right that is the index-th, counting down the columns of the triangle.
    index = tl.program_id(0)
    right = ((tl.sqrt(8.0 * index + 1.0) - 1.0) / 2.0).to(tl.int32)
    right = tl.where(right * (right + 1) // 2 > index, right - 1, right)
    right = tl.where((right + 1) * (right + 2) // 2 <= index, right + 1, right)
    above = index - right * (right + 1) // 2
    matrix = tl.program_id(1).to(tl.int64)

    rows = above * TILE + tl.arange(0, TILE)
    columns = right * TILE + tl.arange(0, TILE)
    inner = tl.arange(0, DEPTH)
    a_tile = a + matrix * a_stack + rows[:, None] * a_row + inner[None, :] * a_column
    b_tile = b + matrix * b_stack + inner[:, None] * b_row + columns[None, :] * b_column
    total = tl.zeros((TILE, TILE), dtype=tl.float32)
    for start in range(0, k, DEPTH):
        left = tl.load(a_tile, mask=(rows[:, None] < m) & (inner[None, :] < k - start), other=0.0)
        under = tl.load(b_tile, mask=(inner[:, None] < k - start) & (columns[None, :] < m), other=0.0)
        if WIDEN:
            left, under = left.to(tl.float32), under.to(tl.float32)
        total = tl.dot(left, under, total)
        a_tile += DEPTH * a_column
        b_tile += DEPTH * b_row

    inside = (rows[:, None] < m) & (columns[None, :] < m)
    total = total * alpha
    if TERMS > 0:
        tile = first + matrix * first_stack + rows[:, None] * first_row + columns[None, :] * first_column
        total += tl.load(first_factor + matrix) * tl.load(tile, mask=inside, other=0.0).to(tl.float32)
    if TERMS > 1:
        tile = second + matrix * second_stack + rows[:, None] * second_row + columns[None, :] * second_column
        total += tl.load(second_factor + matrix) * tl.load(tile, mask=inside, other=0.0).to(tl.float32)
    result = total.to(out.dtype.element_ty)
    out_matrix = out + matrix * out_stack
    tl.store(out_matrix + rows[:, None] * out_row + columns[None, :] * out_column, result, mask=inside)
    if above != right:
        mirrored = out_matrix + columns[:, None] * out_row + rows[None, :] * out_column
        tl.store(mirrored, tl.trans(result), mask=(columns[:, None] < m) & (rows[None, :] < m))


def _per_matrix(factor: float | Tensor, like: Tensor) -> Tensor:
    """`(B,)` in float32, on the device."""
    if isinstance(factor, float):
        return torch.full((like.size(0),), factor, dtype=torch.float32, device=like.device)
    return factor.reshape(-1).to(torch.float32)


def _capability(device: torch.device) -> int:
    """Major compute capability; 0 where there is none, as in Triton's interpreter."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0
