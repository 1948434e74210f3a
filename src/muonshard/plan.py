"""A step's whole communication, known before the first step.

From the parameters' layouts and matrices: which rank owns each matrix, which matrices travel together in a bucket, and
which pieces of which shard go where. A plan is made for one rank; ranks that agree on the inputs make plans that fit.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

from muonshard.layout import Layout, Overlap
from muonshard.matrices import Matrix, MatrixRule
from muonshard.owners import CostModel, Seat
from muonshard.report import render


@dataclass(frozen=True)
class Grid:
    """The ranks of a mesh as `ranks[replica][shard]`: along a row the tensor is cut, down a column it is the same."""

    ranks: tuple[tuple[int, ...], ...]

    @property
    def replicas(self) -> int:
        """How many ranks hold the same shard."""
        return len(self.ranks)

    @property
    def shards(self) -> int:
        """How many shards a tensor is cut into."""
        return len(self.ranks[0])

    @cached_property
    def seats(self) -> dict[int, Seat]:
        """Where each rank sits."""
        return {rank: Seat(f, r) for r, row in enumerate(self.ranks) for f, rank in enumerate(row)}

    def rank(self, seat: Seat) -> int:
        """The rank that sits there."""
        return self.ranks[seat.replica][seat.shard]


@dataclass(frozen=True)
class Tenant:
    """A parameter as the plan sees it.

    Attributes:
        name: for messages and the report.
        layout: how its tensor is cut; the same object for equal layouts.
        grid: the ranks that hold it.
        rule: how it is read as matrices.
        cost: FLOPs to orthogonalise one of them.
        kind: matrices are orthogonalised in one call only where their kinds are equal (the options of their group).
        family: parameters can be gathered in one fused call where their families are equal (their mesh and placements).
    """

    name: str
    layout: Layout
    grid: Grid
    rule: MatrixRule
    cost: CostModel
    kind: Hashable = None
    family: Hashable = None


@dataclass(frozen=True, slots=True)
class Job:
    """One matrix in the plan: of tenant number `tenant`, orthogonalised at seat `owner`, for `cost` FLOPs.

    `at_home` where the owner holds it whole: it does not travel to be orthogonalised. `kind` is its tenant's.
    """

    tenant: int
    matrix: Matrix
    owner: Seat
    cost: int
    at_home: bool
    kind: Hashable


@dataclass(frozen=True, slots=True)
class Piece:
    """A segment: elements that a shard and a matrix share. `job` counts within the domain."""

    job: int
    where: Overlap


@dataclass(frozen=True)
class Bucket:
    """Matrices that travel together, as one rank sees them.

    Attributes:
        jobs: all matrices in the bucket, costliest first.
        travels: whether any of them has to travel to be orthogonalised.
        fused: whether they travel in one fused all-gather, and every rank of the owner's replica does the work.
        owned: those that this rank orthogonalises.
        gathers: where fused, the tenants whose shards this rank's replica gathers.
        gather_stride: elements that the rank then sends to each other one of its replica, padding and flags included.
        outgoing: by shard of this rank's replica, the pieces it holds of the matrices that shard's rank owns.
        incoming: by shard of this rank's replica, the pieces which that shard's rank holds of this rank's matrices.
        across: by replica, the pieces of this rank's shard whose matrices that replica owns.
    """

    jobs: tuple[int, ...]
    travels: bool
    fused: bool
    owned: tuple[int, ...]
    gathers: tuple[int, ...]
    gather_stride: int
    outgoing: tuple[tuple[Piece, ...], ...]
    incoming: tuple[tuple[Piece, ...], ...]
    across: tuple[tuple[Piece, ...], ...]


@dataclass(frozen=True)
class Domain:
    """All matrices on one grid of ranks: one world of communication."""

    grid: Grid
    seat: Seat
    jobs: tuple[Job, ...]
    buckets: tuple[Bucket, ...]
    word: int = 0
    """Elements of the status word that says whether a matrix is not finite, once a step; 0 for none."""

    @cached_property
    def reporter(self) -> int:
        """The last bucket that is not gathered everywhere, -1 for none: its way back carries the owners' words."""
        return max((number for number, bucket in enumerate(self.buckets) if not bucket.fused), default=-1)

    def word_back(self, number: int) -> int:
        """Elements of a word on a bucket's way back from the owners."""
        return self.word if number == self.reporter else 0

    def word_across(self, number: int) -> int:
        """Elements of a word on a bucket's way across replicas: the last bucket's carries all that its row knows."""
        return self.word if number == len(self.buckets) - 1 else 0

    @property
    def elements(self) -> int:
        """Elements in all matrices."""
        return sum(job.matrix.numel for job in self.jobs)

    def loads(self) -> dict[Seat, int]:
        """FLOPs per step of every seat."""
        loads = dict.fromkeys(self.grid.seats.values(), 0)
        for bucket in self.buckets:
            for job in (self.jobs[index] for index in bucket.jobs):
                for shard in range(self.grid.shards) if bucket.fused else [job.owner.shard]:
                    loads[Seat(shard, job.owner.replica)] += job.cost
        return loads

    def sent(self) -> tuple[int, int]:
        """(elements of matrices, flags and words) that this rank sends per step; fused gathers count as matrices."""
        return sum(map(self._payload, self.buckets)), sum(map(self._flags, self.buckets)) + self._words()

    def collectives(self) -> int:
        """Collectives per step."""
        reports_alone = (
            self.word and self.grid.shards > 1 and self.reporter >= 0 and not self.buckets[self.reporter].travels
        )
        trips = sum(bool(bucket.gathers) if bucket.fused else 2 * bucket.travels for bucket in self.buckets)
        return trips + bool(reports_alone)

    def sends(self) -> int:
        """Messages per step to ranks of other replicas: one to each for a bucket, unless there is nothing to say."""
        speaking = [
            bool(bucket.across[self.seat.replica]) or self.word_across(number) > 0
            for number, bucket in enumerate(self.buckets)
        ]
        return (self.grid.replicas - 1) * sum(speaking)

    def bound(self) -> float:
        """Elements a rank sends per step in the design's promise, on average over ranks."""
        shards, replicas = self.grid.shards, self.grid.replicas
        in_shards = 2 * self.elements / (replicas * shards) * (1 - 1 / shards)
        return in_shards + self.elements / shards * (1 - 1 / replicas)

    def _payload(self, bucket: Bucket) -> int:
        gathered = bucket.gather_stride * (self.grid.shards - 1)
        return gathered + self._travels(bucket, lambda pieces: sum(piece.where.numel for piece in pieces))

    def _flags(self, bucket: Bucket) -> int:
        return self._travels(bucket, len)

    def _words(self) -> int:
        """Elements of status words that this rank sends per step: the reporter's buffers hold them on both its ways."""
        ways = 1 + self.buckets[self.reporter].travels if self.reporter >= 0 else 0
        across = (self.grid.replicas - 1) * bool(self.buckets)
        return self.word * (ways * (self.grid.shards - 1) + across)

    def _travels(self, bucket: Bucket, measure: Callable[[Sequence[Piece]], int]) -> int:
        """What this rank sends of a bucket, by some measure of pieces, but for a fused gather."""
        trips = 0
        if not bucket.fused:
            for side in (bucket.outgoing, bucket.incoming):
                trips += sum(measure(pieces) for shard, pieces in enumerate(side) if shard != self.seat.shard)
        return trips + (self.grid.replicas - 1) * measure(bucket.across[self.seat.replica])


@dataclass(frozen=True)
class Plan:
    """What one rank does in a step. `print(plan)` is the report."""

    rank: int
    tenants: tuple[Tenant, ...]
    domains: tuple[Domain, ...]
    itemsize: int
    """Bytes per element exchanged."""

    @cached_property
    def bytes_sent(self) -> int:
        """Bytes that this rank sends per step, flags and status words included."""
        return sum(sum(domain.sent()) for domain in self.domains) * self.itemsize

    @cached_property
    def payload_bytes(self) -> int:
        """Bytes of matrices that this rank sends per step."""
        return sum(domain.sent()[0] for domain in self.domains) * self.itemsize

    @cached_property
    def bound_bytes(self) -> float:
        """What a rank would send on average, from the formula alone (DESIGN.md, promise 3)."""
        return sum(domain.bound() for domain in self.domains) * self.itemsize

    @cached_property
    def collectives(self) -> int:
        """Collectives per step that this rank takes part in."""
        return sum(domain.collectives() for domain in self.domains)

    @property
    def sends(self) -> int:
        """Messages that this rank sends to other replicas, per step."""
        return sum(domain.sends() for domain in self.domains)

    def __str__(self) -> str:
        return render(self)
