"""Local processes that form one world, as torchrun would start them, of which none outlives the others' failure."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue
from threading import Thread
from types import FrameType


class RunError(RuntimeError):
    """A process ended with an error: what it printed, its rank and its exit code."""


def launch(command: Sequence[str], processes: int) -> None:
    """Run `command` as ranks 0 to `processes` - 1 on this machine, until all have ended.

    What they write to stderr is shown only when one fails: that of the first to fail.

    Raises:
        RunError: a process ended with an exit code other than 0; all the others have been ended then.
        KeyboardInterrupt: this process was told to stop, by Ctrl-C or a signal; all processes have been ended.
    """
    world = _environment(processes) | os.environ | _address() | {"WORLD_SIZE": str(processes)}
    ends: SimpleQueue[tuple[int, int]] = SimpleQueue()
    with ExitStack() as stack, _stopped_by_signals():
        errors = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(processes)]
        workers: list[subprocess.Popen[bytes]] = []
        try:
            for rank, error in enumerate(errors):
                place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                # a process group of its own: Ctrl-C then reaches this process alone, which ends all in one way
                workers.append(subprocess.Popen(command, env=world | place, stderr=error, process_group=0))
                Thread(target=lambda r=rank, w=workers[-1]: ends.put((r, w.wait())), daemon=True).start()
            for _ in workers:
                rank, code = ends.get()
                if code != 0:
                    errors[rank].seek(0)
                    said = errors[rank].read().decode(errors="replace")
                    raise RunError(f"{said}rank {rank} ended with exit code {code}")
        finally:
            _end(workers)


def _environment(processes: int) -> dict[str, str]:
    """What the user may set otherwise: processes share the cores, talk over the loopback device, and warn little."""
    import torch

    threads = max(1, (os.cpu_count() or 1) // processes)
    environment = {"OMP_NUM_THREADS": str(threads), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    if torch.cuda.device_count() < processes:  # each process needs a GPU of its own, or none
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment


def _address() -> dict[str, str]:
    """Where the processes meet: a port that nobody uses."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}


def _end(workers: Sequence[subprocess.Popen[bytes]]) -> None:
    for worker in workers:
        worker.terminate()
    for worker in workers:
        try:
            worker.wait(timeout=10)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Make a request to end, or the loss of the terminal, the same exception as Ctrl-C."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:  # as under nohup
            signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
