"""What each rank does with the methods: try each, count what it does, compare its weights, then time all in turn."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.counting import PeakMemory, count_flops, count_traffic
from benchmarks.methods import Method, Steps
from benchmarks.methods.standard import TorchMuonAlone
from benchmarks.problem import MESHES, Problem, Recipe, local_part

TRIAL_STEPS = 2


@dataclass(frozen=True, slots=True)
class RankResult:
    """One method on one rank. Differences are of the weights after `TRIAL_STEPS` steps, the largest by magnitude."""

    bytes_sent: int
    collectives: int
    calls: dict[str, int]
    flops: int
    peak_extra_bytes: int
    difference: float | None  # from the method's reference in one process
    torch_difference: float | None  # from torch.optim.Muon in one process
    seconds: tuple[float, ...]  # one per round
    cpu_seconds: tuple[float, ...]  # of all of the process's threads


@dataclass
class _Candidate:
    """A method that got through its trial."""

    method: Method
    params: list[torch.nn.Parameter]
    steps: Steps
    peak_extra_bytes: int
    taken: int = TRIAL_STEPS  # steps so far: which gradients are next
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)


Verdict = Callable[[str, str | None], bool]
"""Told a method's name and its error on this rank, or None; says whether all ranks keep it."""


def measure(
    methods: Sequence[Method], problem: Problem, rounds: int, recipe: Recipe, verdict: Verdict
) -> dict[str, RankResult]:
    """Results by name of the methods that every rank could run. A collective call."""
    kept = []
    for method in methods:
        candidate, error = _attempt(method, problem, recipe)
        if verdict(method.name, error) and candidate is not None:
            kept.append(candidate)
    references = _References(problem, recipe)
    results = {}
    for candidate in kept:
        differences = references.differences(candidate)
        results[candidate.method.name] = (candidate, differences, *_count(candidate, problem))
    for index in range(rounds):
        for place in range(len(kept)):
            candidate = kept[(index + place) % len(kept)]  # so that none always follows the same one
            _timed_step(candidate, problem)
    return {
        name: RankResult(
            bytes_sent=traffic.bytes_sent,
            collectives=traffic.collectives,
            calls=traffic.calls_by_name,
            flops=flops.total,
            peak_extra_bytes=candidate.peak_extra_bytes,
            difference=difference,
            torch_difference=torch_difference,
            seconds=tuple(candidate.seconds),
            cpu_seconds=tuple(candidate.cpu_seconds),
        )
        for name, (candidate, (difference, torch_difference), traffic, flops) in results.items()
    }


def _attempt(method: Method, problem: Problem, recipe: Recipe) -> tuple[_Candidate | None, str | None]:
    """Build it and take the first steps, watching memory: what it keeps beside its state counts as well."""
    try:
        params = problem.parameters()
        gradients = [problem.gradients(step) for step in range(TRIAL_STEPS)]
        with PeakMemory() as memory:
            steps = method.prepare(params, problem.mesh, recipe)
            for gradient in gradients:
                _set_gradients(params, gradient)
                steps.step()
        return _Candidate(method, params, steps, memory.peak_bytes - _state_bytes(steps.state)), None
    except Exception as error:  # whatever a method raises is its result
        return None, _described(error)


def _described(error: Exception) -> str:
    """Its type and text, or where it came from if it has none."""
    if str(error):
        return f"{type(error).__name__}: {error}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {frame.name}: {frame.line}"


def _set_gradients(params: Sequence[torch.nn.Parameter], gradients: Sequence[Tensor]) -> None:
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient


def _state_bytes(state: object) -> int:
    """Bytes of the tensors in nested mappings and sequences, each shard by its own elements."""
    if isinstance(state, Tensor):
        local = local_part(state)
        return local.numel() * local.element_size()
    if isinstance(state, Mapping):
        return sum(_state_bytes(value) for value in state.values())
    if isinstance(state, list | tuple):
        return sum(_state_bytes(value) for value in state)
    return 0


def _count(candidate: _Candidate, problem: Problem) -> tuple[count_traffic, count_flops]:
    """One more step, under the counters."""
    _set_gradients(candidate.params, problem.gradients(candidate.taken))
    candidate.taken += 1
    with count_traffic() as traffic, count_flops() as flops:
        candidate.steps.step()
    return traffic, flops


def _timed_step(candidate: _Candidate, problem: Problem) -> None:
    _set_gradients(candidate.params, problem.gradients(candidate.taken))
    candidate.taken += 1
    dist.barrier()
    start, cpu_start = time.perf_counter(), time.process_time()
    candidate.steps.step()
    candidate.seconds.append(time.perf_counter() - start)
    candidate.cpu_seconds.append(time.process_time() - cpu_start)


class _References:
    """Weights after the trial's steps as one process makes them on whole tensors; made once per reference."""

    def __init__(self, problem: Problem, recipe: Recipe) -> None:
        self.problem, self.recipe = problem, recipe
        self.known: dict[str, list[Tensor] | None] = {}

    def differences(self, candidate: _Candidate) -> tuple[float | None, float | None]:
        """The candidate's largest difference from its reference, and a Muon's from torch.optim.Muon."""
        reference = candidate.method.reference
        if reference is None:
            return None, None
        own = self._difference(candidate, reference)
        return own, self._difference(candidate, TorchMuonAlone()) if candidate.method.is_muon else None

    def _difference(self, candidate: _Candidate, reference: Method) -> float | None:
        if reference.name not in self.known:
            self.known[reference.name] = self._make(reference)
        expected = self.known[reference.name]
        if expected is None:
            return None
        pairs = zip(candidate.params, expected, strict=True)
        gaps = [(local_part(param.detach()) - want).abs().max().item() for param, want in pairs if want.numel() > 0]
        return max(gaps, default=0.0)

    def _make(self, reference: Method) -> list[Tensor] | None:
        """This rank's shards of the reference's weights: rank 0 computes them all, the others receive them whole."""
        problem = self.problem
        whole: list[Tensor] = []
        if dist.get_rank() == 0:
            alone = Problem(problem.weights, MESHES["alone"], problem.seed)
            candidate, error = _attempt(reference, alone, self.recipe)
            whole = [param.detach() for param in candidate.params] if candidate is not None else []
            if error is not None:
                print(f"{reference.name} in one process: {error}")
        known: list[Any] = [len(whole)]
        dist.broadcast_object_list(known)
        if known[0] == 0:
            return None
        expected = []
        for index, weight in enumerate(problem.weights):
            full = whole[index] if whole else torch.empty(weight.shape)
            dist.broadcast(full, 0)
            expected.append(problem.local(index, full).clone())
        return expected
