"""Carries out a plan: momentum pieces to where matrices are whole, update pieces back, and across replicas.

A bucket travels as a `Shipment`: a trip within this rank's replica (see `trips.py`), then across the replicas. Its
buffers are views of a slot of the arena, made once; a step only copies and calls collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from muonshard._torch import foreach_copy_
from muonshard.meshes import Links
from muonshard.plan import Bucket, Domain, Plan
from muonshard.trips import GatherTrip, OwnerTrip, Trip
from muonshard.verdict import Verdict
from muonshard.wires import Carve, Slot, Stack, Transfer, Wire


@dataclass(frozen=True)
class Lag:
    """How many buckets after it is sent one is turned round, brought level and applied: 0 where nothing travels."""

    turn: int
    level: int
    apply: int


class Shipment:
    """One bucket on its way. Call `send`, `receive`, `give_back`, `level`, `updates` in this order, once per step."""

    def __init__(self, number: int, domain: Domain, plan: Plan, links: Links, verdict: Verdict, carve: Carve) -> None:
        bucket, replica = domain.buckets[number], domain.seat.replica
        label = _label(number, bucket, domain, plan)
        self.mine = bucket.across[replica]
        self.theirs = tuple(chain.from_iterable(p for r, p in enumerate(bucket.across) if r != replica))
        self.pieces = (*self.mine, *self.theirs)
        self.tenants = [domain.jobs[piece.job].tenant for piece in self.pieces]
        self.all_tenants = tuple(dict.fromkeys(domain.jobs[job].tenant for job in bucket.jobs))
        self._trip: Trip = (
            GatherTrip(bucket, domain, plan, links.shard, label, verdict, carve)
            if bucket.fused and links.shard is not None
            else OwnerTrip(number, domain, links, label, verdict, carve)
        )
        self.verdict, word = verdict, domain.word_across(number)
        self._out = Wire([self.mine if links.replica else None], None, carve, word)
        others = [None if r == replica else pieces for r, pieces in enumerate(bucket.across)]
        self._in = Wire(others, links.replica, carve, word)
        self._link, self._transfer = links.replica, Transfer(label)

    @property
    def stacks(self) -> list[Stack]:
        """The matrices that this rank orthogonalises, whole after `receive`; their updates are put in their place."""
        return self._trip.stacks

    def send(self, updates: list[Tensor], present: Sequence[bool]) -> None:
        """Start this rank's pieces on their way: what is to be orthogonalised, and whether it comes of a gradient."""
        foreach_copy_(self._trip.outbox, updates)
        self._trip.send(present)

    def has_arrived(self) -> bool:
        """Whether `receive` would not wait."""
        return self._trip.has_arrived()

    def receive(self) -> list[int]:
        """Wait for the matrices of `stacks`. Returns the jobs for which some rank has a gradient."""
        return self._trip.receive()

    def give_back(self, dropped: Sequence[int] = ()) -> None:
        """Start the updates in `stacks` on their way back; those of `dropped` jobs are not to be applied."""
        self._trip.give_back(dropped)

    def level(self) -> None:
        """Wait for the updates of `mine`, and start them on their way to the other replicas."""
        self._trip.settle()
        if self._link is not None:
            foreach_copy_(self._out.pieces, self._trip.inbox)
            foreach_copy_(self._out.flags, [self._trip.flags()])
            self._out.write_words(self.verdict.word)
            self._transfer.spread(self._in, self._out, self._link)

    def updates(self) -> list[Tensor]:
        """Wait for the other replicas. Returns an update for each of `pieces`, in the exchange dtype."""
        self._transfer.wait()
        self.verdict.hear(*self._in.read_words())
        return self._trip.inbox + self._in.pieces

    def kept(self) -> list[bool]:
        """Whether each of `updates` is to be applied; waits for the device."""
        return [bool(flag) for flag in self._trip.flags().tolist()] + self._in.read_flags()


def lag_of(domain: Domain) -> Lag:
    """How far a domain's buckets overlap."""
    turn = int(domain.grid.shards > 1)
    return Lag(turn, 2 * turn, 2 * turn + int(domain.grid.replicas > 1))


def make_shipments(
    plan: Plan, links: Sequence[Links], dtype: torch.dtype, device: torch.device, at_once: bool = False
) -> tuple[list[list[Shipment]], int]:
    """Shipments for each domain of `plan`, and the bytes of the arena that holds their buffers.

    A domain's shipments take turns in as many slots as are on their way at once (`lag_of`), and domains, which follow
    one another, share them; or, where all may be on their way `at_once`, each has a slot of its own.
    """
    slots: list[list[int]] = []
    sizes: dict[int, int] = {}
    for domain, link in zip(plan.domains, links, strict=True):
        turns, first, verdict = lag_of(domain).apply + 1, len(sizes), Verdict()
        slots.append([first + n if at_once else n % turns for n in range(len(domain.buckets))])
        for number, slot in enumerate(slots[-1]):
            ruler = Slot(dtype)
            Shipment(number, domain, plan, link, verdict, ruler.carve)
            sizes[slot] = max(sizes.get(slot, 0), ruler.used)
    arena = {slot: torch.empty(size, dtype=dtype, device=device) for slot, size in sizes.items()}
    shipments = [
        [Shipment(n, domain, plan, link, verdict, Slot(dtype, arena[slot]).carve) for n, slot in enumerate(numbers)]
        for domain, link, numbers in zip(plan.domains, links, slots, strict=True)
        for verdict in [Verdict()]
    ]
    return shipments, sum(buffer.nbytes for buffer in arena.values())


def _label(number: int, bucket: Bucket, domain: Domain, plan: Plan) -> str:
    """What an error calls a bucket."""
    first, last = (plan.tenants[domain.jobs[job].tenant].name for job in (bucket.jobs[0], bucket.jobs[-1]))
    return f"bucket {number} ({len(bucket.jobs)} matrices, {first} to {last})"
