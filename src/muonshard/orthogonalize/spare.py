"""A buffer that is kept from one call to the next."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor


class Spare:
    """At most one flat buffer on the CPU, as large as the largest asked for, whatever dtypes and shapes came by.

    Whoever takes it has it alone until it is given back: a call on another thread meanwhile gets one of its own. On an
    accelerator torch's caching allocator does this already, and knows about streams. Copies start out empty.
    """

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    def take(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer of at least `elements`, contents undefined."""
        if device.type != "cpu":
            return torch.empty(elements, dtype=dtype, device=device)
        try:
            kept = self._kept.pop()  # one atomic step, so that no two threads get the same
        except IndexError:
            kept = torch.empty(0, dtype=torch.uint8)
        if kept.numel() < elements * dtype.itemsize:
            del kept  # before its successor is allocated
            kept = torch.empty(elements * dtype.itemsize, dtype=torch.uint8)
        return kept[: kept.numel() // 8 * 8].view(dtype)

    def give_back(self, buffer: Tensor) -> None:
        """Keep a buffer that was taken, unless another is kept already."""
        if buffer.device.type == "cpu" and not self._kept:
            self._kept.append(buffer.view(torch.uint8))

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()
