"""The methods that are compared. Each is a small object that makes, from parameters, something with a `step()`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.problem import Recipe

Parameters = Sequence[torch.nn.Parameter]


class Steps(Protocol):
    """What is measured: an optimizer, or anything that steps like one."""

    @property
    def state(self) -> Mapping[Any, Any]:
        """What lives from step to step by the method's nature (momentum): its bytes are not "extra" memory."""

    def step(self) -> Any:
        """One step on the parameters' gradients."""


class Method(Protocol):
    """One way to step. A method that cannot run here raises from `prepare` or from its first steps, and is reported."""

    @property
    def name(self) -> str:
        """Its name in the tables and on the command line."""

    @property
    def is_muon(self) -> bool:
        """Whether its weights are those of Muon with the recipe's numbers."""

    @property
    def reference(self) -> Method | None:
        """What, in one process on whole tensors, must give the same weights; None where weights are not the point."""

    def prepare(self, params: Parameters, mesh: DeviceMesh | None, recipe: Recipe) -> Steps:
        """The steps for these parameters; `mesh` is None in one process, where they are plain tensors."""
