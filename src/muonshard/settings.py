"""The optimizer's own options: those that parameter groups do not have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from muonshard.agreement import text_of
from muonshard.buckets import Exchange
from muonshard.orthogonalize import resolve
from muonshard.precision import Precision

Nonfinite = Literal["propagate", "skip", "raise"]
"""What happens to a matrix that is infinite or NaN."""


@dataclass(frozen=True)
class Settings:
    """See `muonshard.Muon`, whose arguments these are."""

    orthogonalize: str | Callable[[Tensor], Tensor]
    exchange_dtype: torch.dtype
    bucket_bytes: int
    exchange: Exchange
    overlap: Literal["backward"] | None
    process_group: dist.ProcessGroup | None
    nonfinite: Nonfinite
    precision: Precision

    def __str__(self) -> str:
        """What ranks must agree on, as text."""
        own = (field.name for field in fields(self) if field.name != "process_group")
        return ", ".join(f"{name}={text_of(getattr(self, name))}" for name in own)

    @property
    def way(self) -> Exchange:
        """How matrices become whole: during backward at their owners, since a fused all-gather would wait."""
        return "owner" if self.overlap else self.exchange

    @property
    def drops(self) -> bool:
        """Whether owners leave matrices out that are not finite."""
        return self.nonfinite != "propagate"

    def problems(self) -> Iterator[str]:
        """What is out of range, or does not go together."""
        try:
            resolve(self.orthogonalize)
        except ValueError as error:
            yield str(error)
        if not self.exchange_dtype.is_floating_point:
            yield f"exchange_dtype must be a floating point dtype, got {self.exchange_dtype}"
        if self.bucket_bytes < 1:
            yield f"bucket_bytes must be positive, got {self.bucket_bytes}"
        if self.nonfinite not in ("propagate", "skip", "raise"):
            yield f"nonfinite must be 'propagate', 'skip' or 'raise', got {self.nonfinite!r}"
        if self.exchange not in ("auto", "owner", "allgather"):
            yield f"exchange must be 'auto', 'owner' or 'allgather', got {self.exchange!r}"
        if self.overlap not in (None, "backward"):
            yield f"overlap must be None or 'backward', got {self.overlap!r}"
        if self.overlap and self.exchange == "allgather":
            yield "overlap='backward' needs exchange='owner': a fused all-gather would wait in backward"
        if self.overlap and self.process_group is not None:
            yield (
                "overlap='backward' cannot be used with process_group: under DistributedDataParallel gradients are not "
                "final when backward makes them, they are averaged afterwards"
            )
