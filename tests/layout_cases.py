"""One drawn run: parameters on meshes, their gradients, and what one process makes of the same matrices.

A `Case` is plain data, small enough to print and to paste back. `run_cases` steps it on every rank of a world;
`mismatches` steps, in one process, every matrix of it as a plain 2-D parameter of its own, and compares bit for bit.
Where shards and matrices lie is worked out here once more, with torch.chunk and torch.split on whole tensors.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import muonshard
from benchmarks.counting import count_traffic
from same_bits import local

WORLD = 8
STEPS = 3


@dataclass(frozen=True)
class Mesh:
    """A mesh of some ranks of the world, in row-major order."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Param:
    """A parameter and what happens to it.

    Attributes:
        shape: its global shape.
        mesh: which of the case's meshes it lives on; None for a plain tensor that the whole world holds.
        cuts: the dim that each mesh axis cuts, None where it replicates.
        inner_first: where several axes cut one dim, the first of them cuts last, as FSDP2 does over tensor parallel.
        dtype: of the parameter, its momentum and its gradients.
        options: of its group: how it is read as matrices, learning rate and so on.
        absent: for each step, the shards that have no gradient.
        poison: (step, element, value): values put into gradients.
    """

    shape: tuple[int, ...]
    mesh: int | None = 0
    cuts: tuple[int | None, ...] = ()
    inner_first: bool = False
    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)
    absent: tuple[frozenset[int], ...] = (frozenset(),) * STEPS
    poison: tuple[tuple[int, int, float], ...] = ()


@dataclass(frozen=True)
class Case:
    """Parameters in one optimizer, each in a group of its own."""

    meshes: tuple[Mesh, ...]
    params: tuple[Param, ...]
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0


@dataclass(frozen=True)
class RankResult:
    """What one rank has and sent: shards are None for parameters on meshes that the rank is not on.

    `errors` has the text of each step's FloatingPointError, "" where there was none.
    """

    weights: list[Tensor | None]
    momenta: list[Tensor | None]
    errors: list[str]
    bytes_sent: int
    collectives: int
    planned_bytes: int
    planned_collectives: int
    sends: int
    planned_sends: int
    payload: int
    bound: float


def unit_rows(stack: Tensor) -> Tensor:
    """An orthogonaliser of the plainest kind: each neuron's weights scaled to norm one."""
    return stack / stack.norm(dim=2, keepdim=True).clamp(min=1e-7)


def polar(stack: Tensor) -> Tensor:
    """The exact orthogonal factor, of one matrix at a time."""
    factors = [torch.linalg.svd(matrix.nan_to_num().float(), full_matrices=False) for matrix in stack]
    return torch.stack([u @ vh for u, _, vh in factors]).to(stack.dtype)


def draw(case: Case, step: int) -> list[Tensor]:
    """Whole weights (step 0) or whole gradients (steps from 1 on), by the case's seed."""
    generator = torch.Generator().manual_seed(1000 * case.seed + step)
    drawn = [torch.randn(param.shape, generator=generator).to(param.dtype) for param in case.params]
    for value, param in zip(drawn, case.params, strict=True):
        for when, element, poison in param.poison:
            if when + 1 == step and value.numel():
                value.view(-1)[element % value.numel()] = poison
    return drawn


def placements(param: Param, mesh: Mesh) -> list[Placement]:
    """The cuts as DTensor says them."""
    first = [cut is not None and param.inner_first and cut not in param.cuts[:i] for i, cut in enumerate(param.cuts)]
    result: list[Placement] = []
    for axis, cut in enumerate(param.cuts):
        inner = math.prod(size for a, size in enumerate(mesh.shape) if a > axis and param.cuts[a] == cut)
        if cut is None:
            result.append(Replicate())
        elif first[axis] and cut in param.cuts[axis + 1 :]:
            result.append(_StridedShard(cut, split_factor=inner))
        else:
            result.append(Shard(cut))
    return result


def shard_at(whole: Tensor, param: Param, mesh: Mesh, coordinates: Sequence[int]) -> Tensor:
    """The part of a whole tensor at these mesh coordinates: one chunk after the other."""
    axes = list(range(len(param.cuts)))
    if param.inner_first:
        axes.sort(key=lambda axis: param.cuts[axis] not in param.cuts[:axis])
    for axis in axes:
        cut = param.cuts[axis]
        if cut is not None:
            chunks = torch.chunk(whole, mesh.shape[axis], dim=cut)
            place = coordinates[axis]
            whole = chunks[place] if place < len(chunks) else whole.narrow(cut, 0, 0)
    return whole


def coordinates_of(mesh: Mesh) -> list[tuple[int, ...]]:
    """All coordinates, in the order of `mesh.ranks`."""
    return list(product(*map(range, mesh.shape)))


def shard_number(param: Param, mesh: Mesh, coordinates: Sequence[int]) -> int:
    """Which shard sits there: row-major over the axes that cut."""
    number = 0
    for axis, cut in enumerate(param.cuts):
        if cut is not None:
            number = number * mesh.shape[axis] + coordinates[axis]
    return number


def matrices_of(param: Param) -> list[Tensor]:
    """The parameter's matrices, each as the flat indices of its elements, (rows, cols)."""
    whole = torch.arange(math.prod(param.shape)).view(param.shape)
    rule = param.options
    stack = [whole.flatten(1)] if whole.ndim == 2 or rule.get("flatten") else list(whole)
    dim = rule.get("split_dim", 0)
    splits = list(rule.get("splits") or [])
    heads = rule.get("num_heads") or 1
    found: list[Tensor] = []
    for matrix in stack:
        blocks = matrix.split(splits or matrix.shape[dim], dim) if matrix.numel() else []
        counts = [heads] * len(blocks) if isinstance(heads, int) else heads
        for block, count in zip(blocks, counts, strict=True):
            found += block.split(block.shape[dim] // count, dim)
    return found


ORTHOGONALIZERS = {"unit_rows": unit_rows, "polar": polar}
"""By the names that cases have for them."""


def options_of(case: Case) -> dict[str, Any]:
    """The optimizer's arguments."""
    named = case.options.get("orthogonalize", "newton_schulz")
    return {**case.options, "orthogonalize": ORTHOGONALIZERS.get(named, named)}


_MESHES: dict[Any, dict[Mesh, DeviceMesh]] = {}


def device_mesh(mesh: Mesh) -> DeviceMesh:
    """The mesh in this process, made once for each world."""
    world = dist.group.WORLD
    if world not in _MESHES:
        _MESHES.clear()
    known = _MESHES.setdefault(world, {})
    if mesh not in known:
        known[mesh] = DeviceMesh("cpu", torch.tensor(mesh.ranks).view(mesh.shape))
    return known[mesh]


def run_cases(cases: Sequence[Case]) -> list[RankResult]:
    """Step every case on this rank, one after the other."""
    return [_run(case) for case in cases]


def _run(case: Case) -> RankResult:
    for mesh in case.meshes:
        device_mesh(mesh)
    values = [_part(value, param, case) for value, param in zip(draw(case, 0), case.params, strict=True)]
    params = [nn.Parameter(value) for value in values]
    groups = [
        {"params": [(_name(i), param)], **spec.options}
        for i, (param, spec) in enumerate(zip(params, case.params, strict=True))
    ]
    plain = any(spec.mesh is None for spec in case.params)
    optimizer = muonshard.Muon(groups, **options_of(case), process_group=dist.group.WORLD if plain else None)
    errors = []
    for step in range(1, STEPS + 1):
        for param, grad, spec in zip(params, draw(case, step), case.params, strict=True):
            absent = _number_here(spec, case) in spec.absent[step - 1]
            param.grad = None if absent else _part(grad, spec, case)
        with count_traffic() as traffic:
            errors.append(_error_of(optimizer.step))
    plan = optimizer.plan
    here = [_number_here(spec, case) is not None for spec in case.params]
    momenta = [optimizer.state.get(param, {}).get("momentum_buffer") for param in params]
    return RankResult(
        weights=[_plain(param) if on else None for param, on in zip(params, here, strict=True)],
        momenta=[_plain(momentum) if on else None for momentum, on in zip(momenta, here, strict=True)],
        errors=errors,
        bytes_sent=traffic.bytes_sent,
        collectives=traffic.collectives,
        planned_bytes=plan.bytes_sent,
        planned_collectives=plan.collectives,
        sends=traffic.calls_by_name.get("send", 0),
        planned_sends=plan.sends,
        payload=plan.payload_bytes,
        bound=plan.bound_bytes,
    )


def _error_of(step: Callable[[], object]) -> str:
    try:
        step()
    except FloatingPointError as error:
        return str(error)
    return ""


def _part(whole: Tensor, param: Param, case: Case) -> Tensor:
    """This rank's part of a whole tensor, as the DTensor or plain tensor that the parameter is."""
    if param.mesh is None:
        return whole.clone()
    mesh = case.meshes[param.mesh]
    here = _coordinates_here(mesh)
    part = whole.new_empty(0) if here is None else shard_at(whole, param, mesh, here).contiguous().clone()
    return DTensor.from_local(
        part, device_mesh(mesh), placements(param, mesh), run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _coordinates_here(mesh: Mesh) -> tuple[int, ...] | None:
    rank = dist.get_rank()
    return coordinates_of(mesh)[mesh.ranks.index(rank)] if rank in mesh.ranks else None


def _number_here(param: Param, case: Case) -> int | None:
    """The shard that this rank holds, None if it is not on the mesh."""
    if param.mesh is None:
        return 0
    here = _coordinates_here(case.meshes[param.mesh])
    return None if here is None else shard_number(param, case.meshes[param.mesh], here)


def _plain(tensor: Tensor) -> Tensor:
    return local(tensor).clone()


def one_process(case: Case) -> tuple[list[Tensor], list[Tensor], list[set[int]]]:
    """Whole weights and momenta when every matrix is a plain parameter of one process.

    And for each step the parameters that have a matrix which was not finite and was left out.
    """
    whole = draw(case, 0)
    places = [(i, matrix) for i, spec in enumerate(case.params) for matrix in matrices_of(spec)]
    params = [nn.Parameter(whole[i].view(-1)[matrix]) for i, matrix in places]
    splitting = {"splits", "num_heads", "split_dim", "flatten"}
    groups = []
    for param, (i, _) in zip(params, places, strict=True):
        options = {key: value for key, value in case.params[i].options.items() if key not in splitting}
        groups.append({"params": [(_name(i), param)], **options})
    momenta = [torch.zeros_like(value) for value in whole]
    if not groups:
        return whole, momenta, [set()] * STEPS
    optimizer = muonshard.Muon(groups, **options_of(case))
    dropped: list[set[int]] = []
    for step in range(1, STEPS + 1):
        grads = draw(case, step)
        present = [_present(spec, case, step) for spec in case.params]
        for param, (i, matrix) in zip(params, places, strict=True):
            has = present[i].view(-1)[matrix]
            param.grad = torch.where(has, grads[i].view(-1)[matrix], 0) if has.any() else None
        before = Counter(optimizer.skipped)
        _error_of(optimizer.step)
        dropped.append({i for i in range(len(whole)) if optimizer.skipped[_name(i)] > before[_name(i)]})
    for param, (i, matrix) in zip(params, places, strict=True):
        whole[i].view(-1)[matrix] = param.detach()
        momenta[i].view(-1)[matrix] = optimizer.state[param]["momentum_buffer"]
    return whole, momenta, dropped


def _name(index: int) -> str:
    return f"layer{index}.weight"


def _present(param: Param, case: Case, step: int) -> Tensor:
    """Which elements of the whole gradient some rank has in this step."""
    index = torch.arange(math.prod(param.shape)).view(param.shape)
    present = torch.ones(param.shape, dtype=torch.bool)
    if param.mesh is None:
        return present.fill_(0 not in param.absent[step - 1])
    mesh = case.meshes[param.mesh]
    for coordinates in coordinates_of(mesh):
        if shard_number(param, mesh, coordinates) in param.absent[step - 1]:
            present.view(-1)[shard_at(index, param, mesh, coordinates).flatten()] = False
    return present


def mismatches(case: Case, results: Sequence[RankResult]) -> list[str]:
    """What is not as it should be, as sentences; empty when all is well."""
    weights, momenta, dropped = one_process(case)
    found = []
    for rank, result in enumerate(results):
        found += _wrong_errors(case, rank, result.errors, dropped)
        for i, param in enumerate(case.params):
            held = (("weight", weights[i], result.weights[i]), ("momentum", momenta[i], result.momenta[i]))
            for what, whole, part in held:
                expected = _expected(whole, param, case, rank)
                if (part is None) != (expected is None):
                    found.append(f"rank {rank} holds parameter {i}, or does not")
                elif part is not None and expected is not None and not same_bits(part, expected):
                    found.append(f"{what} {i} differs on rank {rank} by {_difference(part, expected)}")
        sent = result.bytes_sent, result.collectives, result.sends
        planned = result.planned_bytes, result.planned_collectives, result.planned_sends
        if sent != planned:
            found.append(f"rank {rank} sent {sent} (bytes, collectives, sends) where the plan says {planned}")
    payload, bound = sum(result.payload for result in results), sum(result.bound for result in results)
    if case.options.get("exchange") == "owner" and payload > bound + 1e-6:
        found.append(f"{payload} bytes travel, more than the bound {bound}")
    return found


def _wrong_errors(case: Case, rank: int, errors: list[str], dropped: list[set[int]]) -> list[str]:
    """Under nonfinite="raise", a rank raises when a parameter of its meshes is not finite, and names one that is."""
    found = []
    here = {i for i, spec in enumerate(case.params) if spec.mesh is None or rank in case.meshes[spec.mesh].ranks}
    for step, (error, bad) in enumerate(zip(errors, dropped, strict=True)):
        named = {i for i in range(len(case.params)) if _name(i) in error}
        if case.options.get("nonfinite") != "raise":
            bad = set()
        if not named <= bad & here or bool(bad & here) != bool(named) or (error and not bad):
            found.append(f"rank {rank} raised {error!r} in step {step}, where {bad} of its {here} are not finite")
    return found


def _expected(whole: Tensor, param: Param, case: Case, rank: int) -> Tensor | None:
    if param.mesh is None:
        return whole
    mesh = case.meshes[param.mesh]
    if rank not in mesh.ranks:
        return None
    return shard_at(whole, param, mesh, coordinates_of(mesh)[mesh.ranks.index(rank)])


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal, any NaN being equal to any other."""
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())


def _difference(a: Tensor, b: Tensor) -> str:
    return f"{(a.float() - b.float()).abs().max():.3g}" if a.shape == b.shape else f"shape {a.shape} for {b.shape}"
