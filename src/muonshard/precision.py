"""In how many bits weights and momentum are kept, and how weights of few bits are updated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from muonshard.layout import Overlap
from muonshard.meshes import local_part
from muonshard.rounding import make_key, round_into

State = dict[str, Any]
"""What an optimizer keeps of one parameter."""

MASTER = "master_weight"
"""Where float32 copies are found in the state."""


@dataclass(frozen=True)
class Precision:
    """See `muonshard.Muon`, whose arguments these are."""

    momentum_dtype: torch.dtype | None = None
    master_weights: bool = False
    stochastic_rounding: bool = False
    seed: int = 0

    def widens(self, param: Tensor) -> bool:
        """Whether a parameter is updated in float32 and rounded: one of fewer bits, if asked for."""
        return (self.master_weights or self.stochastic_rounding) and param.dtype.itemsize < 4

    def has_master(self, param: Tensor) -> bool:
        """Whether a float32 copy of it is kept."""
        return self.master_weights and self.widens(param)

    def dtype_of(self, key: str, param: Tensor) -> torch.dtype:
        """The dtype of a tensor in the state of a parameter."""
        if key == "momentum_buffer":
            return self.momentum_dtype or param.dtype
        return torch.float32 if self.widens(param) else param.dtype

    def count_step(self, states: Iterable[tuple[Tensor, State]]) -> None:
        """Count a step in the states of Muon parameters, where random bits depend on it."""
        for param, state in states:
            if self.stochastic_rounding and self.widens(param):
                state["step"] = state.get("step", torch.tensor(0)) + 1

    def problems(self, params: Iterable[tuple[int, str, Tensor]]) -> Iterator[str]:
        """What does not go together, for parameters with their group and name."""
        if self.momentum_dtype is not None and not self.momentum_dtype.is_floating_point:
            yield f"momentum_dtype must be a floating point dtype, got {self.momentum_dtype}"
        if self.master_weights and self.stochastic_rounding:
            yield "master_weights and stochastic_rounding are two ways to the same: choose one"
        elif self.stochastic_rounding:
            for _, name, param in params:
                if self.widens(param) and param.dtype != torch.bfloat16:
                    yield f"{name} has dtype {param.dtype}: stochastic_rounding is for bfloat16, master_weights for any"


class Weights(Protocol):
    """A rank's shard of a parameter, updated piece by piece."""

    def widen(self, where: Overlap) -> Tensor:
        """The piece at `where`, to be updated in place."""

    def narrow(self, where: Overlap, wide: Tensor, origin: tuple[int, ...]) -> None:
        """Bring the updated piece, whose first element is at `origin` of the whole tensor, to the parameter."""


@dataclass(frozen=True)
class Plain:
    """Weights that are updated as they are."""

    param: Tensor

    def widen(self, where: Overlap) -> Tensor:
        return view(self.param, where)

    def narrow(self, where: Overlap, wide: Tensor, origin: tuple[int, ...]) -> None:
        """They are where they belong."""


@dataclass(frozen=True)
class Mastered:
    """Weights that are copies, in fewer bits, of what is updated."""

    param: Tensor
    master: Tensor

    def widen(self, where: Overlap) -> Tensor:
        return view(self.master, where)

    def narrow(self, where: Overlap, wide: Tensor, origin: tuple[int, ...]) -> None:
        view(self.param, where).copy_(wide)


@dataclass(frozen=True)
class Dithered:
    """bfloat16 weights, updated in float32 and rounded at random, by `key`; of a tensor of `shape`."""

    param: Tensor
    key: int
    shape: tuple[int, ...]

    def widen(self, where: Overlap) -> Tensor:
        return view(self.param, where).float()

    def narrow(self, where: Overlap, wide: Tensor, origin: tuple[int, ...]) -> None:
        round_into(view(self.param, where), wide, self.key, origin, self.shape)


def make_weights(param: Tensor, name: str, state: State, precision: Precision) -> Weights:
    """This rank's shard of a parameter; a master copy is made if there is none yet.

    Random bits depend on the name and on the steps that `state` has seen.
    """
    local = local_part(param)
    if precision.has_master(param):
        return Mastered(local, local_part(master_of(param, state)))
    if precision.widens(param):
        return Dithered(local, make_key(precision.seed, int(state.get("step", 0)), name), tuple(param.shape))
    return Plain(local)


def master_of(param: Tensor, state: State) -> Tensor:
    """The float32 copy in `state`, with the parameter's mesh and placements; made if there is none yet."""
    if MASTER not in state:
        state[MASTER] = param.detach().to(torch.float32, copy=True)
    master: Tensor = state[MASTER]
    return master


def view(tensor: Tensor, where: Overlap) -> Tensor:
    """The piece of a local tensor; most often that is the whole of it."""
    return tensor if where.numel == tensor.numel() else tensor[where.local]
