"""From an optimizer's parameter groups to the tenants of a plan, with everything that can be wrong found on the way."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muonshard.agreement import Circle
from muonshard.matrices import MatrixRule, find_matrices
from muonshard.meshes import Residence, find_residence
from muonshard.owners import CostModel
from muonshard.plan import Grid, Tenant

Group = dict[str, Any]
"""A parameter group, as torch.optim keeps them."""

Kind = tuple[tuple[float, float, float], int, float]
"""What decides how a matrix is orthogonalised: ns_coefficients, ns_steps, eps."""

CLAIMED = ("lr", "weight_decay", "momentum", "nesterov", "adjust_lr_fn")
"""Options that do not change the plan, but that shards of one parameter must share."""


@dataclass
class Survey:
    """The Muon parameters of this rank: `params[i]`, in parameter group `group_of[i]`, is tenant i of the plan.

    `groups` has the process groups that together reach all ranks of a grid.
    """

    params: list[Tensor] = field(default_factory=list)
    group_of: list[int] = field(default_factory=list)
    tenants: list[Tenant] = field(default_factory=list)
    groups: dict[Grid, tuple[dist.ProcessGroup, ...]] = field(default_factory=dict)


def rule_of(group: Group) -> MatrixRule:
    """How the parameters of a group are read as matrices."""
    heads = group["num_heads"]
    return MatrixRule(
        splits=tuple(group["splits"] or ()),
        num_heads=1 if heads is None else heads if isinstance(heads, int) else tuple(heads),
        split_dim=group["split_dim"],
        flatten=group["flatten"],
        transposed=group["transposed"],
    )


def kind_of(group: Group) -> Kind:
    """How the matrices of a group are orthogonalised."""
    a, b, c = group["ns_coefficients"]
    return (a, b, c), group["ns_steps"], group["eps"]


def take_survey(
    groups: Sequence[Group],
    process_group: dist.ProcessGroup | None,
    costs: Callable[[Kind], CostModel],
    settings: str,
) -> Survey:
    """Look at every Muon parameter, and let all ranks that share some compare what they found.

    Args:
        groups: the optimizer's parameter groups.
        process_group: the ranks that plain tensors are replicated over, if any.
        costs: the cost model for matrices of a kind.
        settings: the optimizer's own options, as text, for the comparison.

    Raises:
        ValueError: on every rank that shares parameters with the one where something is wrong or different; it names
            the parameter, what was found and what to do.
    """
    survey = Survey()
    circles: dict[tuple[int, ...], Circle] = {}
    homeless: list[str] = []
    if process_group is not None:
        circles[tuple(sorted(dist.get_process_group_ranks(process_group)))] = Circle([process_group])
    for index, name, param in _muon_parameters(groups):
        group = groups[index]
        try:
            residence = find_residence(param, process_group)
        except ValueError as error:
            homeless.append(f"{name} {error}")
            continue
        if residence is None:
            continue
        problems = [f"{name} {problem}" for problem in _problems(param, group)]
        if not residence.groups:
            homeless += problems
        else:
            circle = circles.setdefault(_ranks(residence), Circle(_circle_groups(residence)))
            circle.claims.append((name, _claim(param, group, residence)))
            circle.problems += problems
        survey.params.append(param)
        survey.group_of.append(index)
        survey.groups[residence.grid] = residence.groups
        kind = kind_of(group)
        family = (residence.placements, param.ndim)
        survey.tenants.append(Tenant(name, residence.layout, residence.grid, rule_of(group), costs(kind), kind, family))
    for _, circle in sorted(circles.items()) or [((), Circle([]))]:
        circle.claims.insert(0, ("the optimizer", settings))
        circle.problems += homeless
        circle.check()
    return survey


def _muon_parameters(groups: Sequence[Group]) -> Iterator[tuple[int, str, Tensor]]:
    """(group index, name, parameter) of each; parameters without a name are called by their place."""
    for index, group in enumerate(groups):
        if group["algorithm"] == "muon":
            names = group.get("param_names") or [f"parameter {i} of group {index}" for i in range(len(group["params"]))]
            for name, param in zip(names, group["params"], strict=True):
                yield index, name, param


def _problems(param: Tensor, group: Group) -> Iterator[str]:
    if param.is_complex() or not param.is_floating_point():
        yield f"has dtype {param.dtype}: Muon takes real floating point parameters (algorithm='adamw' takes others)"
    if param.layout != torch.strided:
        yield f"has layout {param.layout}: Muon takes dense parameters"
    try:
        find_matrices(tuple(param.shape), rule_of(group))
    except ValueError as error:
        yield f"cannot be read as matrices: {error}"


def _ranks(residence: Residence) -> tuple[int, ...]:
    return tuple(sorted(rank for row in residence.grid.ranks for rank in row))


def _circle_groups(residence: Residence) -> Sequence[dist.ProcessGroup]:
    """The world's group where the circle is the world: then ranks that disagree about their meshes still meet."""
    world = dist.group.WORLD
    return [world] if world is not None and len(_ranks(residence)) == dist.get_world_size() else residence.groups


def _claim(param: Tensor, group: Group, residence: Residence) -> str:
    options = ", ".join(f"{key}={group[key]!r}" for key in CLAIMED)
    return (
        f"of shape {tuple(param.shape)}, {param.dtype}, {residence.placements} on ranks {_grid_text(residence.grid)}, "
        f"{rule_of(group)}, {kind_of(group)}, {options}"
    )


@lru_cache(maxsize=256)
def _grid_text(grid: Grid) -> str:
    text = repr(grid.ranks)
    return text if len(text) < 100 else f"{text[:40]}... #{hashlib.sha256(text.encode()).hexdigest()[:12]}"
