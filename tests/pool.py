"""Real process groups for the tests: workers that stay up, and form a gloo world of any size on request.

A test says `pool.run(4, some_function, *args)`. `some_function` is an importable function of a test module; it runs on
ranks 0 to 3 of a world of 4, and the call returns what each rank returned, in rank order. An exception on any rank
fails the test with every rank's traceback; `pool.failures(...)` returns the exceptions' texts instead, for tests
of errors.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

GROUP_TIMEOUT = timedelta(seconds=60)
CALL_TIMEOUT_S = 180.0


@dataclass(frozen=True)
class Outcome:
    """What one rank brought back: its value, or the text of its exception with the traceback."""

    value: Any = None
    error: str | None = None
    trace: str = ""


class WorkerDiedError(RuntimeError):
    """A worker process ended or did not answer in time."""


class Pool:
    """Up to `size` worker processes, started when first needed and kept until `close`."""

    def __init__(self, size: int = 8) -> None:
        self.size = size
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "torch.distributed.tensor", "torch.distributed.fsdp"])
        self._workers: list[tuple[Any, Connection]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="muonshard-tests-")
        self._worlds = 0
        self._formed: tuple[int, timedelta] | None = None

    def outcomes(
        self, world: int, function: Callable[..., Any], *args: Any, group_timeout: timedelta = GROUP_TIMEOUT
    ) -> list[Outcome]:
        """Run `function(*args)` on every rank of a gloo world of `world` processes."""
        self._start(world)
        if (world, group_timeout) != self._formed:
            self._worlds += 1
            self._formed = (world, group_timeout)
        job = (world, self._rendezvous(), group_timeout, function.__module__, function.__qualname__, args)
        for _, pipe in self._workers[:world]:
            pipe.send(job)
        outcomes = [self._receive(rank) for rank in range(world)]
        if any(outcome.error is not None for outcome in outcomes):
            self._formed = None  # collectives may be out of step after an error: the next call gets fresh groups
        return outcomes

    def run(self, world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`outcomes`, where every rank must succeed; returns the values in rank order."""
        outcomes = self.outcomes(world, function, *args)
        failed = [f"--- rank {rank} ---\n{o.trace}" for rank, o in enumerate(outcomes) if o.error is not None]
        if failed:
            raise AssertionError("\n".join(failed))
        return [outcome.value for outcome in outcomes]

    def failures(self, world: int, function: Callable[..., Any], *args: Any) -> list[str | None]:
        """`outcomes`, where errors are expected: each rank's error as text, None where a rank succeeded."""
        return [outcome.error for outcome in self.outcomes(world, function, *args)]

    def close(self) -> None:
        """End all workers."""
        for process, pipe in self._workers:
            pipe.close()
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
        self._workers.clear()
        self._formed = None

    def _rendezvous(self) -> str:
        return os.path.join(self._folder.name, f"world-{self._worlds}")

    def _start(self, world: int) -> None:
        if world > self.size:
            raise ValueError(f"a world of {world} needs more than the pool's {self.size} workers")
        while len(self._workers) < world:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(len(self._workers), theirs), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def _receive(self, rank: int) -> Outcome:
        process, pipe = self._workers[rank]
        try:
            if pipe.poll(CALL_TIMEOUT_S):
                return pipe.recv()
            reason = f"rank {rank} gave no answer in {CALL_TIMEOUT_S:.0f} s"
        except (EOFError, ConnectionResetError):
            process.join(timeout=5)
            reason = f"rank {rank} ended with exit code {process.exitcode}"
        for worker, _ in self._workers:
            worker.kill()
        self.close()
        raise WorkerDiedError(reason)


def _serve(rank: int, pipe: Connection) -> None:
    """A worker's life: take a job, join the world it names, run it, send the outcome."""
    import torch

    torch.set_num_threads(1)
    joined = ""
    while True:
        try:
            world, rendezvous, timeout, module, name, args = pipe.recv()
        except EOFError:
            return
        try:
            if rendezvous != joined:
                joined = ""
                _join(rank, world, rendezvous, timeout)
                joined = rendezvous
            function: Any = importlib.import_module(module)
            for part in name.split("."):
                function = getattr(function, part)
            outcome = Outcome(value=function(*args))
        except BaseException as error:  # every outcome must reach the test, or it would wait for ever
            outcome = Outcome(error=f"{type(error).__name__}: {error}", trace=traceback.format_exc())
        pipe.send(outcome)


def _join(rank: int, world: int, rendezvous: str, timeout: timedelta) -> None:
    import torch.distributed as dist
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    if dist.is_initialized():
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # it would give new DTensors the mesh, and so the groups, of the world before
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world, timeout=timeout)
