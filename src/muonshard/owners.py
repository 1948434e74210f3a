"""What a matrix costs, and which rank orthogonalises it."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from muonshard.layout import Box, Layout
from muonshard.matrices import Matrix

CostModel = Callable[[int, int], int]
"""FLOPs to orthogonalise one (rows, cols) matrix."""


@dataclass(frozen=True, slots=True)
class Work:
    """A matrix to be dealt: what it costs (FLOPs), and how its tensor is cut over the shards."""

    matrix: Matrix
    layout: Layout
    cost: int


@dataclass(frozen=True, slots=True, order=True)
class Seat:
    """A rank's place in the grid of its parameters' mesh: (shard, replica)."""

    shard: int
    replica: int


def deal(works: Sequence[Work], shards: int, replicas: int) -> list[Seat]:
    """An owner for each work, on a grid of `shards` x `replicas` ranks.

    Longest first: each matrix goes to the least loaded rank (Graham 1969), except that

    * a matrix that lies whole in one shard stays there, on one of its replicas: nothing travels;
    * where the largest part of a matrix in any shard is at least twice the average part, a holder of such a part gets
      it if that does not raise the peak load;
    * owners together hold at least 1/shards of what they own, so that what travels never exceeds
      S (1 - 1/shards) for S elements in all matrices, however uneven the shards.

    Deterministic: the same on every rank.
    """
    table = _Table(works, shards, replicas)
    owners: dict[int, Seat] = {}
    for index in longest_first(works):
        owners[index] = table.place(works[index])
    return [owners[index] for index in range(len(works))]


def longest_first(works: Sequence[Work]) -> list[int]:
    """Indices of `works` by falling cost; equals keep their order."""
    return sorted(range(len(works)), key=lambda index: -works[index].cost)


class _Table:
    """The loads while matrices are dealt out."""

    def __init__(self, works: Sequence[Work], shards: int, replicas: int) -> None:
        self.shards, self.replicas = shards, replicas
        self.loads = {Seat(shard, replica): 0 for shard in range(shards) for replica in range(replicas)}
        self.everyone = [(0, seat) for seat in self.loads]
        self.holders: dict[tuple[Layout, Box], list[tuple[int, Seat]]] = {}
        average = sum(work.cost for work in works) // len(self.loads)
        self.fair = max(average, max((work.cost for work in works), default=0))
        self.credit = 0  # elements held by owners beyond 1/shards of what they own, times `shards`

    def place(self, work: Work) -> Seat:
        """The seat for the next matrix; its load and the credit are booked."""
        layout, box, numel = work.layout, work.matrix.box, work.matrix.numel
        holders = self._largest_holders(layout, box)
        home, idlest = self._least_loaded(holders), self._least_loaded(self.everyone)
        held = layout.held(home.shard, box)
        allowed = self.loads[home] + work.cost <= max(self.fair, self.loads[idlest] + work.cost)
        if held == numel or (held * self.shards >= 2 * numel and allowed):
            seat = home
        else:
            surplus = layout.held(idlest.shard, box) * self.shards - numel
            seat = idlest if self.credit + surplus >= 0 else home
        self.credit += layout.held(seat.shard, box) * self.shards - numel
        self.loads[seat] += work.cost
        return seat

    def _largest_holders(self, layout: Layout, box: Box) -> list[tuple[int, Seat]]:
        """A queue of the seats that hold a largest part of `box`."""
        queue = self.holders.get((layout, box))
        if queue is None:
            seats = (Seat(f, r) for f in layout.largest_holders(box) for r in range(self.replicas))
            queue = self.holders[layout, box] = [(self.loads[seat], seat) for seat in seats]
            heapq.heapify(queue)
        return queue

    def _least_loaded(self, queue: list[tuple[int, Seat]]) -> Seat:
        """The first seat of a queue; its entries are brought up to date as they come to the front: loads only grow."""
        while queue[0][0] != self.loads[queue[0][1]]:
            seat = queue[0][1]
            heapq.heapreplace(queue, (self.loads[seat], seat))
        return queue[0][1]
