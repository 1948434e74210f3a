"""Two ways for momentum to become whole matrices and for updates to come back to the shards of one replica.

`OwnerTrip` sends every piece to its matrix's owner and the update back. `GatherTrip` gathers everything everywhere in
one collective and repeats the work on every rank: for matrices so small that a second trip costs more. Both give
the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from muonshard._torch import foreach_copy_
from muonshard.hsdp import ParamLayoutSpec, ParamShardMeta, fused_allgather_dtensor_params
from muonshard.hsdp.types import make_stage
from muonshard.hsdp.wire import BufferCache
from muonshard.layout import Layout
from muonshard.meshes import Link, Links
from muonshard.plan import Bucket, Domain, Plan
from muonshard.verdict import ELSEWHERE, Verdict
from muonshard.wires import Carve, Stack, Transfer, Wire, make_stacks, naming


class Trip(Protocol):
    """One replica's part of a bucket's way. Called in the order of the methods, once per step.

    Attributes:
        stacks: the matrices that this rank orthogonalises, whole after `receive`.
        outbox: a view for each of the rank's pieces, where what is to be orthogonalised is put before `send`.
        inbox: likewise, where its update is found after `settle`.
    """

    stacks: list[Stack]
    outbox: list[Tensor]
    inbox: list[Tensor]

    def send(self, present: Sequence[bool]) -> None:
        """Start the pieces in `outbox` on their way; `present` says which of them come of a gradient."""

    def has_arrived(self) -> bool:
        """Whether `receive` would not wait."""

    def receive(self) -> list[int]:
        """Wait for the matrices in `stacks`. Returns the jobs for which some rank has a gradient."""

    def give_back(self, dropped: Sequence[int]) -> None:
        """Start the updates in `stacks` on their way; those of `dropped` jobs are not to be applied."""

    def settle(self) -> None:
        """Wait for the updates in `inbox`."""

    def flags(self) -> Tensor:
        """For each piece, 1 where the update is to be applied, else 0; in the exchange dtype, on its device."""


class OwnerTrip:
    """There and back: two all-to-alls."""

    def __init__(self, number: int, domain: Domain, links: Links, label: str, verdict: Verdict, carve: Carve) -> None:
        bucket, word = domain.buckets[number], domain.word_back(number)
        self._me, self._verdict = domain.seat.shard, verdict
        self._link_there = links.shard if bucket.travels else None
        self._link_back = links.back if bucket.travels or word else None
        self._transfer = Transfer(label)
        leaving_by = [None if f == self._me else p for f, p in enumerate(bucket.outgoing)]
        arriving_by = [None if f == self._me else p for f, p in enumerate(bucket.incoming)]
        self._there = Wire(leaving_by, links.shard, carve, word)
        self._here = Wire(arriving_by, links.shard, carve, word)
        self.stacks, boxes = make_stacks(bucket.owned, domain, carve)
        arriving = [piece for pieces in arriving_by for piece in pieces or ()]
        self._here_jobs = [piece.job for piece in arriving]
        self._here_boxes = [boxes[piece.job][piece.where.inner] for piece in arriving]
        self._stay_jobs = [piece.job for piece in bucket.outgoing[self._me]]
        leaving = iter(self._there.pieces)
        self.outbox = self.inbox = [
            boxes[piece.job][piece.where.inner] if f == self._me else next(leaving)
            for f, pieces in enumerate(bucket.outgoing)
            for piece in pieces
        ]
        before = sum(map(len, bucket.outgoing[: self._me]))
        self._stays = slice(before, before + len(self._stay_jobs))
        self._keep = dict.fromkeys(bucket.owned, False)

    def send(self, present: Sequence[bool]) -> None:
        self._there.write_flags([*present[: self._stays.start], *present[self._stays.stop :]])
        self._keep = dict.fromkeys(self._keep, False)
        for job, has in zip(self._stay_jobs, present[self._stays], strict=True):
            self._keep[job] |= has
        self._transfer.deal(self._here, self._there, self._link_there)

    def has_arrived(self) -> bool:
        return self._transfer.is_done()

    def receive(self) -> list[int]:
        self._transfer.wait()
        foreach_copy_(self._here_boxes, self._here.pieces)
        if not all(self._keep.values()):
            for job, flag in zip(self._here_jobs, self._here.read_flags(), strict=True):
                self._keep[job] |= flag
        return [job for job, keep in self._keep.items() if keep]

    def give_back(self, dropped: Sequence[int]) -> None:
        self._keep.update(dict.fromkeys(dropped, False))
        foreach_copy_(self._here.pieces, self._here_boxes)
        self._here.write_flags([self._keep[job] for job in self._here_jobs])
        self._here.write_words(self._verdict.word)
        self._transfer.deal(self._there, self._here, self._link_back)

    def settle(self) -> None:
        self._transfer.wait()
        self._verdict.hear(*self._there.read_words())

    def flags(self) -> Tensor:
        flat = self._there.flat
        stays = torch.tensor([self._keep[job] for job in self._stay_jobs], dtype=flat.dtype).to(flat.device)
        return torch.cat([stays if f == self._me else chunk for f, chunk in enumerate(self._there.flags)])


class GatherTrip:
    """One fused all-gather, after which every rank has every matrix of its replica, and its own part of each update.

    Flags travel with it, as one more tensor: one for each parameter's presence, one for a fault that was heard of.
    """

    def __init__(
        self, bucket: Bucket, domain: Domain, plan: Plan, link: Link, label: str, verdict: Verdict, carve: Carve
    ) -> None:
        shard = domain.seat.shard
        layouts = [plan.tenants[tenant].layout for tenant in bucket.gathers]
        pieces = [piece for by_shard in bucket.outgoing for piece in by_shard]
        places = {tenant: place for place, tenant in enumerate(bucket.gathers)}
        shards = [_carve_like(layout.local_shape(shard), carve) for layout in layouts]
        self.stacks, boxes = make_stacks(bucket.owned, domain, carve)
        self._jobs = [piece.job for piece in pieces]
        self._places = [places[domain.jobs[job].tenant] for job in self._jobs]
        self.outbox = [shards[place][p.where.local] for place, p in zip(self._places, pieces, strict=True)]
        self.inbox = [boxes[piece.job][piece.where.inner] for piece in pieces]
        self._boxes = [(boxes[job], places[domain.jobs[job].tenant], domain.jobs[job].matrix.box) for job in boxes]
        self._holders = {
            job: [(holder, places[domain.jobs[job].tenant]) for holder in layouts[place].holders(box)]
            for job, (_, place, box) in zip(boxes, self._boxes, strict=True)
        }
        self._keep = dict.fromkeys(boxes, False)
        self._flags, self._label, self._verdict = carve(len(layouts) + 1), label, verdict
        self._gather = _FusedGather(shards, self._flags, layouts, shard, link) if layouts else None

    def send(self, present: Sequence[bool]) -> None:
        self._flags.zero_()
        for place in {place for place, has in zip(self._places, present, strict=True) if has}:
            self._flags[place] = 1
        if self._verdict.word:
            self._flags[-1] = 1

    def has_arrived(self) -> bool:
        return self._gather is None

    def receive(self) -> list[int]:
        if self._gather is not None:
            with naming(self._label):
                *whole, flags = self._gather()
            foreach_copy_(
                [box for box, _, _ in self._boxes],
                [whole[place][tuple(slice(*span) for span in box)] for _, place, box in self._boxes],
            )
            table = flags.view(-1, len(self._flags)).tolist()
            if any(row[-1] for row in table):
                self._verdict.hear(ELSEWHERE)
            for job, holders in self._holders.items():
                self._keep[job] = any(table[shard][place] for shard, place in holders)
        return [job for job, keep in self._keep.items() if keep]

    def give_back(self, dropped: Sequence[int]) -> None:
        self._keep.update(dict.fromkeys(dropped, False))

    def settle(self) -> None:
        """Nothing has travelled."""

    def flags(self) -> Tensor:
        keeps = [self._keep[job] for job in self._jobs]
        return torch.tensor(keeps, dtype=self._flags.dtype).to(self._flags.device)


class _FusedGather:
    """The shard layer's gather of parameters that one mesh axis cuts, and of a row of flags from each rank."""

    def __init__(self, shards: list[Tensor], flags: Tensor, layouts: Sequence[Layout], shard: int, link: Link) -> None:
        ((dim, size, _),) = layouts[0].axes
        row = tuple(len(flags) if d == dim else 1 for d in range(len(layouts[0].shape)))
        self._tensors, self._groups = [*shards, flags.view(row)], [link.group]
        self._spec = ParamLayoutSpec(len(layouts[0].shape), ((0, dim),), ())
        self._buffers: BufferCache = {}
        shapes = [[layout.local_shape(f) for f in range(size)] for layout in layouts]
        self._metas = [
            ParamShardMeta(layout.shape, prod(layout.shape), by_rank[shard], prod(by_rank[shard]), (stage,))
            for layout, by_rank in zip(layouts, shapes, strict=True)
            for stage in [make_stage(dim, shard, by_rank, 1)]
        ]
        rows = tuple(length * size if d == dim else 1 for d, length in enumerate(row))
        stage = make_stage(dim, shard, [row] * size, 1)
        self._metas.append(ParamShardMeta(rows, prod(rows), row, prod(row), (stage,)))

    def __call__(self) -> list[Tensor]:
        whole = fused_allgather_dtensor_params(
            self._tensors, self._groups, self._spec, self._metas, buffer_cache=self._buffers
        )
        return [tensor for tensor in whole if tensor is not None]


def _carve_like(shape: tuple[int, ...], carve: Carve) -> Tensor:
    return carve(prod(shape)).view(shape)
