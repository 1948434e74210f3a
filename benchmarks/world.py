"""Runs one case (a set on a mesh) in a world of gloo processes of its own, and outlives methods that break it.

Ranks tell the parent of each method's trial and wait for its verdict. Where a method fails on some ranks while others
wait inside a collective, or a process dies, the world is given up and a new one is started without that method.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

from benchmarks.measure import RankResult, measure
from benchmarks.methods.registry import find
from benchmarks.problem import MESHES, SETS, Problem, Recipe

TRIAL_TIMEOUT_S = 900.0  # a compiler may be at work
STRAGGLER_TIMEOUT_S = 30.0  # for the other ranks, once one has failed


@dataclass(frozen=True, slots=True)
class Case:
    """What to run: names of a set, a mesh and methods (or plugins), and how."""

    weights: str
    mesh: str
    methods: tuple[str, ...]
    rounds: int
    seed: int = 0
    compile: bool = False


@dataclass(frozen=True, slots=True)
class CaseResult:
    """For each method that ran, each rank's result in rank order; for each other method its error."""

    case: Case
    ran: dict[str, tuple[RankResult, ...]]
    failed: dict[str, str]


class _WorldLostError(Exception):
    """A world that cannot go on: the method that was at work, and what happened."""

    def __init__(self, method: str, reason: str) -> None:
        super().__init__(f"{method}: {reason}")
        self.method, self.reason = method, reason


def run_case(case: Case, progress: Callable[[str], None] = lambda text: None) -> CaseResult:
    """Measure a case, with as many worlds as it takes.

    Raises:
        RuntimeError: the world broke down after all methods had passed their trials.
    """
    failed: dict[str, str] = {}
    while True:
        world = _World(case, tuple(name for name in case.methods if name not in failed), progress)
        try:
            ran = world.results(failed)
        except _WorldLostError as lost:
            if not lost.method:
                raise RuntimeError(f"{case.weights} on {case.mesh}: {lost.reason}") from lost
            progress(f"{lost.method}: {lost.reason}; starting again without it")
            failed[lost.method] = lost.reason
            continue
        finally:
            world.close()
        return CaseResult(case, ran, failed)


class _World:
    """The processes of one world, seen from the parent."""

    def __init__(self, case: Case, methods: tuple[str, ...], progress: Callable[[str], None]) -> None:
        self.progress = progress
        self.folder = tempfile.TemporaryDirectory(prefix="muonshard-bench-")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.measure", "benchmarks.methods.registry"])
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []
        self.methods = methods
        for rank in range(MESHES[case.mesh].world):
            ours, theirs = context.Pipe()
            rendezvous = os.path.join(self.folder.name, "rendezvous")
            process = context.Process(target=_serve, args=(rank, rendezvous, case, methods, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def results(self, failed: dict[str, str]) -> dict[str, tuple[RankResult, ...]]:
        """Sit through the trials, adding to `failed`, then collect what the ranks measured."""
        for method in self.methods:
            self.progress(f"trying {method}")
            errors = self._answers(method)
            error = next((error for error in errors if error is not None), None)
            if error is not None:
                self.progress(f"{method}: {error}")
                failed[method] = error
                if None in errors:
                    raise _WorldLostError(method, f"{error} (on some ranks only)")
            for pipe in self.pipes:
                pipe.send(error is None)
        self.progress("counting and timing")
        by_rank = self._answers("")
        return {name: tuple(results[name] for results in by_rank) for name in by_rank[0]}

    def _answers(self, method: str) -> list[Any]:
        """One message from each rank. A rank that fails alone leaves the others waiting: they get little time."""
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + TRIAL_TIMEOUT_S
        while len(answers) < len(self.pipes):
            open_pipes = [pipe for rank, pipe in enumerate(self.pipes) if rank not in answers]
            ready = wait(open_pipes, timeout=max(0.0, deadline - time.monotonic()))
            error = next((answer for answer in answers.values() if isinstance(answer, str)), None)
            if not ready:
                nothing = f"no answer in {TRIAL_TIMEOUT_S:.0f} s"
                raise _WorldLostError(method, nothing if error is None else f"{error} (on some ranks only)")
            for pipe in ready:
                rank = self.pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    answers[rank] = self.pipes[rank].recv()
                except EOFError as ended:
                    self.processes[rank].join(timeout=5)
                    reason = f"rank {rank} ended with exit code {self.processes[rank].exitcode}"
                    raise _WorldLostError(method, error or reason) from ended
                if isinstance(answers[rank], str):
                    deadline = min(deadline, time.monotonic() + STRAGGLER_TIMEOUT_S)
        return [answers[rank] for rank in range(len(self.pipes))]

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        for process in self.processes:
            process.join(timeout=0.2)
            process.kill()
            process.join()
        self.folder.cleanup()


def _serve(rank: int, rendezvous: str, case: Case, methods: tuple[str, ...], pipe: Connection) -> None:
    """A rank's life."""
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if not case.compile:
        torch.compiler.set_stance("force_eager")
    store, world = f"file://{rendezvous}", MESHES[case.mesh].world
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=600))

    def verdict(name: str, error: str | None) -> bool:
        pipe.send(error)
        return bool(pipe.recv())

    problem = Problem(SETS[case.weights], MESHES[case.mesh], case.seed)
    methods_here = [find(name) for name in methods]
    pipe.send(measure(methods_here, problem, case.rounds, Recipe(), verdict))
    dist.barrier()
    dist.destroy_process_group()
