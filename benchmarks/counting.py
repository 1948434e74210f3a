"""Counts what a piece of code really did: collectives and bytes sent, FLOPs, and the peak of memory allocated.

Nothing here asks the code under test: traffic and FLOPs are read off the operators that reach torch's dispatcher
(so collectives that DTensor issues are seen too), and memory off the allocator's own events.

    with count_traffic() as traffic, count_flops() as flops:
        optimizer.step()
    traffic.bytes_sent, traffic.collectives, flops.total

    with PeakMemory() as memory:
        optimizer.step()
    memory.peak_bytes

What "sent" means for each collective stands in `benchmarks/wire.py`. The counters see the thread that entered them.
Calls that a compiler has taken out of the dispatcher are not seen: count the eager form.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from benchmarks.wire import POINT_TO_POINT, traffic_of


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a collective or point-to-point operator: its name, the group's size, and the bytes this rank sent."""

    name: str
    world: int
    sent: int


class _LocalOperators(TorchDispatchMode):
    """Shows a subclass every operator on local tensors, those inside DTensor's own among them."""

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor answers next, and its local operators come back here
        if not isinstance(func, torch._ops.OpOverload) or any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **kwargs)  # shape inference computes nothing
        if func is not torch.ops.prim.device.default:
            with self:  # inference mode leaves composites whole: what they are made of is what counts
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        out = func(*args, **kwargs)
        self.seen(func, args, kwargs, out)
        return out

    def seen(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Called after each operator with its arguments and its result."""
        raise NotImplementedError


class count_traffic(_LocalOperators):  # noqa: N801, it is used as a function
    """A context manager that records every collective and point-to-point call made inside it.

    Raises:
        NotImplementedError: an operator of torch's collective namespaces for which no rule of bytes is known.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sent, by the rules of `benchmarks/wire.py`."""
        return sum(call.sent for call in self.calls)

    @property
    def collectives(self) -> int:
        """Calls that involve a whole group: barriers are among them, sends and receives are not."""
        return sum(call.name not in POINT_TO_POINT for call in self.calls)

    @property
    def calls_by_name(self) -> dict[str, int]:
        """How often each operator was called, by its name without underscores at its ends."""
        return dict(Counter(call.name for call in self.calls))

    def seen(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        found = traffic_of(func, args, kwargs)
        if found is not None:
            self.calls.append(Call(*found))


class count_flops(_LocalOperators):  # noqa: N801, it is used as a function
    """A context manager that adds up the FLOPs of local operators, by the formulas of torch's own flop counter.

    A multiply-add counts 2. `FlopCounterMode` would count a DTensor's product by its global shape on every rank; this
    counts what the rank computes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def seen(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.total += formula(*args, **kwargs, out_val=out)


class PeakMemory:
    """A context manager that finds the most bytes allocated inside it and alive at one time.

    On a CPU the allocator's events are replayed: `peak_bytes` is the largest total of blocks that were allocated
    inside and not yet freed, and `held_bytes` what of them was left at the end. Blocks from before do not count,
    whether kept or freed. Memory that does not come from torch's allocator (a library's scratch space, gloo's staging)
    is not seen. On CUDA they are the growth of the caching allocator's peak and of its current bytes.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.peak_bytes = 0
        self.held_bytes = 0

    def __enter__(self) -> Self:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
        else:
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the profiler announces itself on stderr, each time
            activities = [torch.profiler.ProfilerActivity.CPU]
            self._profile = torch.profiler.profile(activities=activities, profile_memory=True)
            self._profile.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.device.type == "cuda":
            self.peak_bytes = torch.cuda.max_memory_allocated(self.device) - self._before
            self.held_bytes = torch.cuda.memory_allocated(self.device) - self._before
            return
        self._profile.__exit__(kind, error, trace)
        if error is None:
            self.peak_bytes, self.held_bytes = _replay(_allocations(self._profile))


def _allocations(profile: torch.profiler.profile) -> list[tuple[int, int]]:
    """`(address, bytes)` of each event of the CPU allocator, in order; a free has negative bytes."""
    with tempfile.TemporaryDirectory(prefix="muonshard-memory-") as folder:
        path = os.path.join(folder, "trace.json")
        profile.export_chrome_trace(path)
        with open(path) as file:
            events = json.load(file)["traceEvents"]
    events = [event for event in events if event.get("name") == "[memory]" and event["args"]["Device Type"] == 0]
    events.sort(key=lambda event: float(event["ts"]))  # stable: events of one instant keep the trace's order
    return [(event["args"]["Addr"], event["args"]["Bytes"]) for event in events]


def _replay(events: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The peak and the final total of the blocks that these events allocate."""
    alive: dict[int, int] = {}
    total = peak = 0
    for address, size in events:
        if size > 0:
            alive[address] = size
            total += size
            peak = max(peak, total)
        else:
            total -= alive.pop(address, 0)
    return peak, total
