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

from muonshard.agreement import Circle, check, text_of
from muonshard.matrices import MatrixRule, find_matrices
from muonshard.meshes import Residence, find_residence, is_distributed, work_device
from muonshard.owners import CostModel
from muonshard.plan import Grid, Tenant

Group = dict[str, Any]
"""A parameter group, as torch.optim keeps them."""

Kind = tuple[tuple[float, float, float], int, float]
"""What decides how a matrix is orthogonalised: ns_coefficients, ns_steps, eps."""

UNSPLIT: Group = {"num_heads": None, "splits": None, "split_dim": 0, "flatten": False, "transposed": False}
"""How the parameters of a group are read as matrices, where it does not say: as one, or as a stack of them."""

CLAIMED = ("lr", "weight_decay", "momentum", "nesterov", "adjust_lr_fn")
"""Options that do not change the plan, but that shards of one parameter must share."""

ADAMW_OPTIONS = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")
"""Options of AdamW that decide its numbers."""


@dataclass
class Survey:
    """The Muon parameters of this rank: `params[i]`, in parameter group `group_of[i]`, is tenant i of the plan.

    `groups` has the process groups that together reach all ranks of a grid; `adamw` this rank's other parameters, with
    their names.
    """

    params: list[Tensor] = field(default_factory=list)
    group_of: list[int] = field(default_factory=list)
    tenants: list[Tenant] = field(default_factory=list)
    groups: dict[Grid, tuple[dist.ProcessGroup, ...]] = field(default_factory=dict)
    adamw: list[tuple[Tensor, str]] = field(default_factory=list)


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
    faults: Sequence[str] = (),
) -> Survey:
    """Look at every parameter, and let all ranks that share some compare what they found.

    Args:
        groups: the optimizer's parameter groups.
        process_group: the ranks that plain tensors are replicated over, if any.
        costs: the cost model for matrices of a kind.
        settings: the optimizer's own options, as text, for the comparison.
        faults: what is wrong with them on this rank.

    Raises:
        ValueError: on every rank that shares parameters with the one where something is wrong or different; it names
            the parameter, what was found and what to do.
    """
    survey = Survey()
    circles: dict[tuple[int, ...], Circle] = {(): Circle([])}
    if process_group is not None:
        circles[tuple(sorted(dist.get_process_group_ranks(process_group)))] = Circle([process_group])
    broken = {index: problems for index, group in enumerate(groups) if (problems := list(option_problems(group)))}
    everywhere = [*faults, *(f"parameter group {index}: {text}" for index, texts in broken.items() for text in texts)]
    seen: dict[int, str] = {}
    for index, name, param in named_parameters(groups):
        group = groups[index]
        circle = _circle_of(param, circles, process_group)
        if circle is None or faults or index in broken:
            continue
        if id(param) in seen:
            circle.problems.append(f"{name} is the same tensor as {seen[id(param)]}: list a tied weight once")
            continue
        seen[id(param)] = name
        if group["algorithm"] == "adamw":
            circle.claims.append((name, _adamw_claim(param, group)))
            survey.adamw.append((param, name))
            continue
        try:
            residence, cost = find_residence(param, process_group), costs(kind_of(group))
        except ValueError as error:
            circle.problems.append(f"{name} {error}")
            continue
        assert residence is not None  # this rank is in the parameter's circle
        if problems := [f"{name} {problem}" for problem in _problems(param, group, survey)]:
            circle.problems += problems
            continue
        circle.claims.append((name, _claim(param, group, residence, cost)))
        survey.params.append(param)
        survey.group_of.append(index)
        survey.groups[residence.grid] = residence.groups
        kind, family = kind_of(group), (residence.placements, param.ndim)
        survey.tenants.append(Tenant(name, residence.layout, residence.grid, rule_of(group), cost, kind, family))
    for ranks, circle in circles.items():
        circle.claims.insert(0, ("the optimizer", settings))
        if ranks or len(circles) == 1:
            circle.problems += everywhere
    check([circle for _, circle in sorted(circles.items())])
    return survey


def option_problems(group: Group) -> Iterator[str]:
    """What is wrong with the options of a group, as torch's own optimizers would say."""
    if group["algorithm"] == "adamw":
        try:
            torch.optim.AdamW([torch.zeros(1)], **{key: group[key] for key in ADAMW_OPTIONS})
        except (ValueError, RuntimeError) as error:
            yield str(error)
        return
    if group["algorithm"] != "muon":
        yield f"algorithm must be 'muon' or 'adamw', got {group['algorithm']!r}"
        return
    if isinstance(group["lr"], Tensor) and group["lr"].numel() != 1:
        yield "a tensor lr must have one element"
    else:
        for key in ("lr", "momentum", "weight_decay"):
            if not group[key] >= 0.0:
                yield f"{key} must be >= 0, got {text_of(group[key])}"
    if group["adjust_lr_fn"] not in (None, "original", "match_rms_adamw"):
        yield f"adjust_lr_fn must be None, 'original' or 'match_rms_adamw', got {group['adjust_lr_fn']!r}"
    if not 0 <= group["ns_steps"] < 100:
        yield f"ns_steps must be at least 0 and below 100, got {group['ns_steps']}"
    if len(group["ns_coefficients"]) != 3:
        yield f"ns_coefficients must be three numbers, got {group['ns_coefficients']}"


def names_of(group: Group, title: str) -> list[str]:
    """What messages call the parameters of a group; those without a name are called by their place."""
    return group.get("param_names") or [f"parameter {index} of {title}" for index in range(len(group["params"]))]


def named_parameters(groups: Sequence[Group]) -> Iterator[tuple[int, str, Tensor]]:
    """(group index, name, parameter) of each."""
    for index, group in enumerate(groups):
        for name, param in zip(names_of(group, f"group {index}"), group["params"], strict=True):
            yield index, name, param


def _problems(param: Tensor, group: Group, survey: Survey) -> Iterator[str]:
    here, others = work_device(param), work_device(survey.params[0] if survey.params else param)
    if here != others:
        yield f"is on {here}, other parameters on {others}: give it an optimizer of its own"
    if param.is_complex() or not param.is_floating_point():
        yield f"has dtype {param.dtype}: Muon takes real floating point parameters (algorithm='adamw' takes others)"
    if param.layout != torch.strided:
        yield f"has layout {param.layout}: Muon takes dense parameters"
    try:
        find_matrices(tuple(param.shape), rule_of(group))
    except ValueError as error:
        yield f"cannot be read as matrices: {error}"


def _circle_of(
    param: Tensor, circles: dict[tuple[int, ...], Circle], process_group: dist.ProcessGroup | None
) -> Circle | None:
    """The circle of the ranks that share a parameter: of this process alone if no other does, None if it does not."""
    groups: Sequence[dist.ProcessGroup]
    if is_distributed(param):
        mesh = param.device_mesh
        if mesh.get_coordinate() is None:
            return None
        ranks, groups = mesh.mesh.flatten().tolist(), [mesh.get_group(axis) for axis in range(mesh.ndim)]
    elif process_group is not None:
        ranks, groups = dist.get_process_group_ranks(process_group), [process_group]
    else:
        return circles[()]
    world = dist.group.WORLD
    if world is not None and len(ranks) == dist.get_world_size():
        groups = [world]  # ranks that disagree about the shape of their mesh still meet
    return circles.setdefault(tuple(sorted(ranks)), Circle(groups))


def _adamw_claim(param: Tensor, group: Group) -> str:
    options = ", ".join(f"{key}={text_of(group[key])}" for key in ADAMW_OPTIONS)
    placements = tuple(param.placements) if is_distributed(param) else "whole"
    return f"of shape {tuple(param.shape)}, {param.dtype}, {placements}, for AdamW, {options}"


def _claim(param: Tensor, group: Group, residence: Residence, cost: CostModel) -> str:
    flops = sum(cost(matrix.rows, matrix.cols) for matrix in find_matrices(tuple(param.shape), rule_of(group)))
    options = ", ".join(f"{key}={text_of(group[key])}" for key in CLAIMED)
    return (
        f"of shape {tuple(param.shape)}, {param.dtype} on {param.device.type}, {residence.placements} on ranks "
        f"{_grid_text(residence.grid)}, {rule_of(group)}, {kind_of(group)}, {flops} FLOPs, {options}"
    )


@lru_cache(maxsize=256)
def _grid_text(grid: Grid) -> str:
    text = repr(grid.ranks)
    return text if len(text) < 100 else f"{text[:40]}... #{hashlib.sha256(text.encode()).hexdigest()[:12]}"
