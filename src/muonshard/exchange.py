"""Carries out a plan: momentum pieces to the owners, update pieces back, and across replicas.

A bucket travels as a `Shipment`. Its buffers are views of a slot of the arena, made once; a step only copies and calls
collectives. Every chunk on the wire is a run of presence flags, one per piece, followed by the pieces themselves:
on the way out a flag says whether this rank has a gradient, on the way back whether the update is to be applied.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
import torch.distributed as dist
from torch import Tensor

from muonshard._torch import foreach_copy_
from muonshard.meshes import Link, Links
from muonshard.plan import Bucket, Domain, Piece, Plan

ALIGNMENT = 512
"""Bytes to which buffers in the arena are aligned."""

Carve = Callable[[int], Tensor]
"""Takes a number of elements, gives a flat buffer of them."""


@dataclass(frozen=True)
class Lag:
    """How many buckets after it is sent one is turned round, brought level and applied: 0 where nothing travels."""

    turn: int
    level: int
    apply: int


@dataclass(frozen=True)
class Stack:
    """Owned matrices of one kind and shape, (count, rows, cols) in the exchange dtype."""

    kind: Hashable
    jobs: tuple[int, ...]
    tensor: Tensor


class _Wire:
    """A flat buffer of chunks, one per peer, in the order of the link's ranks; views of all pieces, of all flags.

    `pieces` and `flags` are in the order of `chunks`: by place in the grid.
    """

    def __init__(self, chunks: Sequence[Sequence[Piece]], link: Link | None, carve: Carve) -> None:
        sizes = [len(pieces) + sum(piece.where.numel for piece in pieces) for pieces in chunks]
        order = link.order if link else range(len(chunks))
        self.splits = [sizes[place] for place in order]
        self.flat = carve(sum(sizes))
        starts = dict(zip(order, accumulate(self.splits, initial=0), strict=False))
        self.pieces: list[Tensor] = []
        self.flags: list[Tensor] = []
        for place, pieces in enumerate(chunks):
            offset = starts[place] + len(pieces)
            self.flags.append(self.flat[starts[place] : offset])
            for piece in pieces:
                shape = [part.stop - part.start for part in piece.where.local]
                self.pieces.append(self.flat[offset : offset + piece.where.numel].view(shape))
                offset += piece.where.numel

    def write_flags(self, values: Sequence[bool]) -> None:
        """Set the flags of all pieces, in order."""
        if all(values):
            for chunk in self.flags:
                chunk.fill_(1)
            return
        row = torch.tensor(values, dtype=self.flat.dtype).to(self.flat.device)
        foreach_copy_(self.flags, row.split([len(chunk) for chunk in self.flags]))

    def read_flags(self) -> list[bool]:
        """The flags of all pieces, in order; waits for the device."""
        return [bool(flag) for flag in torch.cat(self.flags).tolist()] if self.flags else []


class Shipment:
    """One bucket on its way. Call `send`, `receive`, `give_back`, `level`, `updates` in this order, once per step."""

    def __init__(self, bucket: Bucket, domain: Domain, links: Links, label: str, carve: Carve) -> None:
        me, replica = domain.seat.shard, domain.seat.replica
        self.mine = bucket.across[replica]
        self.theirs = tuple(chain.from_iterable(p for r, p in enumerate(bucket.across) if r != replica))
        self.pieces = (*self.mine, *self.theirs)
        self.tenants = [domain.jobs[piece.job].tenant for piece in self.pieces]
        self._owned, self._me = frozenset(bucket.owned), me
        self._label = label
        self._shard_link = links.shard if bucket.travels else None
        self._replica_link = links.replica
        self._work: dist.Work | None = None
        self._there = _Wire([() if f == me else p for f, p in enumerate(bucket.outgoing)], links.shard, carve)
        self._here = _Wire([() if f == me else p for f, p in enumerate(bucket.incoming)], links.shard, carve)
        copies = [() if r == replica else self.mine for r in range(domain.grid.replicas)]
        self._level_out = _Wire(copies, links.replica, carve)
        self._level_in = _Wire([() if r == replica else p for r, p in enumerate(bucket.across)], links.replica, carve)
        self.stacks, boxes = _make_stacks(bucket.owned, domain, carve)
        self._here_jobs = [p.job for f, chunk in enumerate(bucket.incoming) if f != me for p in chunk]
        self._here_boxes = [
            boxes[p.job][p.where.inner] for f, chunk in enumerate(bucket.incoming) if f != me for p in chunk
        ]
        there = iter(self._there.pieces)
        self._stays = [domain.jobs[piece.job].owner == domain.seat for piece in self.mine]
        self._mine_views = [
            boxes[piece.job][piece.where.inner] if stays else next(there)
            for piece, stays in zip(self.mine, self._stays, strict=True)
        ]
        self._keep: dict[int, bool] = {}

    def send(self, updates: list[Tensor], present: Sequence[bool]) -> None:
        """Start this rank's pieces on their way: one update, and whether it comes of a gradient, for each of `mine`."""
        foreach_copy_(self._mine_views, updates)
        self._there.write_flags([has for has, stays in zip(present, self._stays, strict=True) if not stays])
        self._keep = dict.fromkeys(self._owned, False)
        for piece, stays, has in zip(self.mine, self._stays, present, strict=True):
            if stays and has:
                self._keep[piece.job] = True
        self._start(self._here, self._there, self._shard_link)

    def receive(self) -> list[int]:
        """Wait for the owned matrices. Returns the jobs for which some rank has a gradient."""
        self._wait()
        foreach_copy_(self._here_boxes, self._here.pieces)
        if not all(self._keep.values()):
            for job, flag in zip(self._here_jobs, self._here.read_flags(), strict=True):
                self._keep[job] |= flag
        return [job for job, keep in self._keep.items() if keep]

    def give_back(self, dropped: Sequence[int] = ()) -> None:
        """Start the updates in `stacks` on their way back; those of `dropped` jobs are not to be applied."""
        self._keep.update(dict.fromkeys(dropped, False))
        foreach_copy_(self._here.pieces, self._here_boxes)
        self._here.write_flags([self._keep[job] for job in self._here_jobs])
        self._start(self._there, self._here, self._shard_link)

    def level(self) -> None:
        """Wait for the updates of `mine`, and start them on their way to the other replicas."""
        self._wait()
        copies = len(self._level_out.pieces) // max(1, len(self.mine))
        foreach_copy_(self._level_out.pieces, self._mine_views * copies)
        if copies:
            stays = torch.tensor(self._stay_keeps(), dtype=self._there.flat.dtype).to(self._there.flat.device)
            flags = [stays if f == self._me else flags for f, flags in enumerate(self._there.flags)]
            foreach_copy_([chunk for chunk in self._level_out.flags if len(chunk)], [torch.cat(flags)] * copies)
        self._start(self._level_in, self._level_out, self._replica_link)

    def updates(self) -> list[Tensor]:
        """Wait for the other replicas. Returns an update for each of `mine`, then `theirs`, in the exchange dtype."""
        self._wait()
        return self._mine_views + self._level_in.pieces

    def kept(self) -> list[bool]:
        """Whether each of `updates` is to be applied; waits for the device."""
        return self._mine_kept() + self._level_in.read_flags()

    def _stay_keeps(self) -> list[bool]:
        return [self._keep[piece.job] for piece, stays in zip(self.mine, self._stays, strict=True) if stays]

    def _mine_kept(self) -> list[bool]:
        travelled = iter(self._there.read_flags())
        return [
            self._keep[piece.job] if stays else next(travelled)
            for piece, stays in zip(self.mine, self._stays, strict=True)
        ]

    def _start(self, target: _Wire, source: _Wire, link: Link | None) -> None:
        if link is not None:
            self._work = dist.all_to_all_single(
                target.flat, source.flat, target.splits, source.splits, group=link.group, async_op=True
            )

    def _wait(self) -> None:
        if self._work is None:
            return
        try:
            self._work.wait()
        except RuntimeError as error:
            raise RuntimeError(f"the exchange of {self._label} failed; did another rank stop? {error}") from error
        finally:
            self._work = None


def _make_stacks(owned: Sequence[int], domain: Domain, carve: Carve) -> tuple[list[Stack], dict[int, Tensor]]:
    """Room for the owned matrices, stacked by kind and shape; and each matrix as its box in the parameter's dims."""
    alike: dict[tuple[Hashable, int, int], list[int]] = {}
    for index in owned:
        job = domain.jobs[index]
        alike.setdefault((job.kind, job.matrix.rows, job.matrix.cols), []).append(index)
    stacks: list[Stack] = []
    boxes: dict[int, Tensor] = {}
    for (kind, rows, cols), members in alike.items():
        stack = carve(len(members) * rows * cols).view(len(members), rows, cols)
        stacks.append(Stack(kind, tuple(members), stack))
        boxes |= {job: row.view(domain.jobs[job].matrix.box_shape) for job, row in zip(members, stack, strict=True)}
    return stacks, boxes


class _Slot:
    """A bump allocator over one flat buffer, or, without a buffer, a ruler that only measures."""

    def __init__(self, dtype: torch.dtype, buffer: Tensor | None = None) -> None:
        self._buffer = torch.empty(0, dtype=dtype, device="meta") if buffer is None else buffer
        self._step = ALIGNMENT // dtype.itemsize
        self.used = 0

    def carve(self, numel: int) -> Tensor:
        """The next `numel` elements, aligned."""
        start = self.used
        self.used += -(-numel // self._step) * self._step
        if self._buffer.is_meta:
            return self._buffer.new_empty(numel)
        return self._buffer[start : start + numel]


def lag_of(domain: Domain) -> Lag:
    """How far a domain's buckets overlap."""
    turn = int(domain.grid.shards > 1)
    return Lag(turn, 2 * turn, 2 * turn + int(domain.grid.replicas > 1))


def make_shipments(
    plan: Plan, links: Sequence[Links], dtype: torch.dtype, device: torch.device
) -> tuple[list[list[Shipment]], Tensor]:
    """Shipments for each domain of `plan`, and the arena that holds the buffers of all of them.

    A domain's shipments take turns in as many slots as are on their way at once (`lag_of`); domains follow one another.
    """
    slots, room = 0, 0
    for domain, link in zip(plan.domains, links, strict=True):
        slots = max(slots, min(lag_of(domain).apply + 1, len(domain.buckets)))
        for bucket in domain.buckets:
            ruler = _Slot(dtype)
            Shipment(bucket, domain, link, "", ruler.carve)
            room = max(room, ruler.used)
    arena = torch.empty(slots, room, dtype=dtype, device=device)
    shipments = [
        [
            Shipment(bucket, domain, link, _label(n, bucket, domain, plan), _Slot(dtype, arena[n % slots]).carve)
            for n, bucket in enumerate(domain.buckets)
        ]
        for domain, link in zip(plan.domains, links, strict=True)
    ]
    return shipments, arena


def _label(number: int, bucket: Bucket, domain: Domain, plan: Plan) -> str:
    """What an error calls a bucket."""
    first, last = (plan.tenants[domain.jobs[job].tenant].name for job in (bucket.jobs[0], bucket.jobs[-1]))
    return f"bucket {number} ({len(bucket.jobs)} matrices, {first} to {last})"
