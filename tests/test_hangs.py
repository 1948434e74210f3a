"""A rank that stops inside a step ends the others too: with an error that names the bucket, in the group's timeout.

Each case has processes of its own, since some are killed: one step in which all is well, then one in which a rank
stops. The optimizer is the only one to communicate in between.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import muonshard
import same_bits
from muonshard.wires import Transfer
from same_bits import Shape

TIMEOUT_S = 5
MARGIN_S = 10
"""What a busy machine may take beyond the timeout."""
PATIENCE_S = 30
BUCKETS, MIDDLE = 8, 3
WEIGHTS = tuple((f"weight {index}", (12, 8)) for index in range(BUCKETS))

Stop = Callable[[], None]
"""Ends this rank, in its way."""


def kill() -> None:
    """Be gone at once, as when the machine runs out of memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    """Be there, and take no more part."""
    raise ArithmeticError


@dataclass
class Fuse:
    """An orthogonaliser that stops this rank at its n-th call once it is lit: one call is one bucket's matrices."""

    stop: Stop
    lit: bool = False
    where: int = 0
    calls: int = 0

    def __call__(self, stack: Tensor) -> Tensor:
        self.calls += self.lit
        if self.lit and self.calls == self.where:
            self.stop()
        return stack


def stop_before(fuse: Fuse) -> None:
    """Before the step."""
    fuse.stop()


def stop_while_orthogonalising(fuse: Fuse) -> None:
    """After its second bucket has come to this owner, before it goes back."""
    fuse.where = 2


def stop_between_replicas(fuse: Fuse) -> None:
    """When the middle bucket is about to cross the replicas."""
    spread, crossings = Transfer.spread, []

    def stop_at_the_middle(*args: Any) -> None:
        crossings.append(args)
        if len(crossings) == MIDDLE + 1:
            fuse.stop()
        spread(*args)

    Transfer.spread = stop_at_the_middle


@dataclass(frozen=True)
class Case:
    """A mesh, options, where rank 0 stops and how, and the first bucket that cannot arrive."""

    mesh: Shape
    where: Callable[[Fuse], None]
    stop: Stop
    bucket: int = 0
    options: dict[str, Any] = field(default_factory=dict)


def work(rank: int, case: Case, rendezvous: str, pipe: Connection) -> None:
    """A rank's life. Sends its error and the seconds that the second step took."""
    torch.set_num_threads(1)
    world, timeout = int(torch.tensor(case.mesh).prod()), timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world, timeout=timeout)
    mesh = same_bits.mesh_of(case.mesh)
    placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    values = same_bits.draw([shape for _, shape in WEIGHTS], seed=0)
    params = [nn.Parameter(distribute_tensor(value, mesh, placements, src_data_rank=None)) for value in values]
    fuse, named = Fuse(case.stop), [(name, param) for (name, _), param in zip(WEIGHTS, params, strict=True)]
    # one matrix to a bucket, and as large as all: every rank but the owner waits for it
    optimizer = muonshard.Muon(named, lr=0.1, bucket_bytes=1, orthogonalize=fuse, **case.options)
    take_step(optimizer, params)
    dist.barrier()
    start = time.monotonic()
    try:
        if rank == 0:
            fuse.lit = True
            case.where(fuse)
        take_step(optimizer, params)
        said = "no error"
    except RuntimeError as error:
        said = str(error)
    except ArithmeticError:
        time.sleep(3 * PATIENCE_S)
        return
    pipe.send((said, time.monotonic() - start))


def take_step(optimizer: muonshard.Muon, params: list[nn.Parameter]) -> None:
    optimizer.zero_grad()
    for param in reversed(params):
        param.to_local().square().sum().backward()
    optimizer.step()


def play(case: Case, folder: Path) -> list[tuple[str, float]]:
    """What the ranks other than 0 say, once they have ended by themselves."""
    context, world = multiprocessing.get_context("forkserver"), int(torch.tensor(case.mesh).prod())
    pipes = [context.Pipe(duplex=False) for _ in range(world)]
    rendezvous = f"file://{folder}/rendezvous"
    ranks = [
        context.Process(target=work, args=(rank, case, rendezvous, theirs), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    try:
        for process in ranks:
            process.start()
        said = [ours.recv() for ours, _ in pipes[1:] if ours.poll(PATIENCE_S)]
        for process in ranks[1:]:
            process.join(PATIENCE_S)
        assert [process.exitcode for process in ranks[1:]] == [0] * (world - 1)
        return said
    finally:
        for process in ranks:
            process.kill()
            process.join()


CASES = {
    "FSDP, killed before the step": Case((3,), stop_before, kill, 0),
    "FSDP, killed in the middle": Case((3,), stop_while_orthogonalising, kill, 1),
    "FSDP, fails in the middle": Case((3,), stop_while_orthogonalising, fail, 1),
    "FSDP, gathers, killed before the step": Case((3,), stop_before, kill, 0, {"exchange": "allgather"}),
    "HSDP, killed in the middle": Case((2, 2), stop_while_orthogonalising, kill, 1),
    "HSDP, killed between replicas": Case((2, 2), stop_between_replicas, kill, 1),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_when_a_rank_stops_the_others_end_in_time_and_name_the_bucket(case: Case, tmp_path: Path) -> None:
    said = play(case, tmp_path)
    assert len(said) == int(torch.tensor(case.mesh).prod()) - 1
    for text, seconds in said:
        found = re.match(r"the exchange of bucket (\d) \(1 matrices, weight \d to weight \d\) failed", text)
        assert found, text
        assert case.bucket <= int(found[1]) < BUCKETS
        assert seconds < TIMEOUT_S + MARGIN_S
