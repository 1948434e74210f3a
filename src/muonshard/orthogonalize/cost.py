"""FLOPs of the iteration as it is executed; a multiply-add counts 2."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from muonshard.orthogonalize.coefficients import Coefficients
from muonshard.orthogonalize.products import symmetric_flops


def flops(
    m: int,
    n: int,
    coefficients: Sequence[Coefficients],
    segments: Iterable[range],
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """FLOPs for one `(m, n)` matrix, `m <= n`.

    With s segments, K quintic steps and plain products it is `4 s m^2 n + 2 (4K - 3s) m^3`; with symmetric products at
    half the cost, `3 s m^2 n + (4K - 3s) m^3`. A symmetric product cut into blocks or tiles lies between.
    """
    gram = symmetric_flops(m, n, dtype, device)
    square = symmetric_flops(m, m, dtype, device)
    total = 0
    for segment in segments:
        squarings = sum(1 for step in segment if coefficients[step][2])
        total += gram + (squarings + 3 * (len(segment) - 1)) * square + 2 * m * m * n
    return total
