"""torch's AdamW over the groups that ask for it, also where their weights are updated in float32."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muonshard.layout import Overlap
from muonshard.meshes import find_residence, local_part, this_rank
from muonshard.precision import MASTER, Precision, State, make_weights, master_of
from muonshard.survey import Group, names_of

States = defaultdict[Tensor, State]


@dataclass(frozen=True)
class StandIn:
    """What AdamW steps in place of a parameter of few bits: its values in float32."""

    name: str
    param: Tensor
    wide: Tensor


class AdamWGroups:
    """`torch.optim.AdamW` on this optimizer's own groups and state."""

    def __init__(self, precision: Precision, process_group: dist.ProcessGroup | None) -> None:
        self._adamw = torch.optim.AdamW([torch.zeros(1)])
        self._precision, self._process_group = precision, process_group
        self._pieces: dict[Tensor, list[Overlap]] = {}
        self.defaults: dict[str, Any] = self._adamw.defaults

    def step(self, groups: Sequence[Group], state: States) -> None:
        """Step the groups whose algorithm is "adamw"."""
        chosen = [(index, group) for index, group in enumerate(groups) if group["algorithm"] == "adamw"]
        stand_ins = [found for index, group in chosen for found in self._find(group, f"group {index}", state)]
        if stand_ins:
            self._step_wide([group for _, group in chosen], state, stand_ins)
        elif chosen:
            self._adamw.param_groups, self._adamw.state = [group for _, group in chosen], state
            self._adamw.step()

    def _find(self, group: Group, title: str, state: States) -> Iterator[StandIn]:
        for name, param in zip(names_of(group, title), group["params"], strict=True):
            if param.grad is not None and self._precision.widens(param):
                has_master = self._precision.has_master(param)
                yield StandIn(name, param, master_of(param, state[param]) if has_master else param.detach().float())

    def _step_wide(self, groups: Sequence[Group], state: States, stand_ins: Sequence[StandIn]) -> None:
        wide = {stand_in.param: stand_in.wide for stand_in in stand_ins}
        before = {
            found.param: make_weights(found.param, found.name, state[found.param], self._precision)
            for found in stand_ins
        }
        self._adamw.param_groups = [
            {**group, "params": [wide.get(param, param) for param in group["params"] if param.grad is not None]}
            for group in groups
        ]
        self._adamw.state = defaultdict(dict)
        for param in (param for group in groups for param in group["params"] if param.grad is not None):
            if param in wide:
                wide[param].grad = param.grad.to(torch.float32)
                self._adamw.state[wide[param]] = {key: kept for key, kept in state[param].items() if key != MASTER}
            else:
                self._adamw.state[param] = state[param]
        self._adamw.step()
        for param, stand_in in wide.items():
            stand_in.grad = None
            state[param].update(self._adamw.state[stand_in])
            for where in self._pieces_of(param):
                origin = tuple(part.start for part in where.inner)
                before[param].narrow(where, local_part(stand_in)[where.local], origin)

    def _pieces_of(self, param: Tensor) -> list[Overlap]:
        """Where this rank's shard lies in the whole tensor."""
        if param not in self._pieces:
            residence = find_residence(param, self._process_group)
            assert residence is not None  # it has a gradient, so it is here
            seat = residence.grid.seats[this_rank()]
            self._pieces[param] = residence.layout.overlaps(seat.shard, tuple((0, size) for size in param.shape))
        return self._pieces[param]
