"""A step's whole communication, known before the first step.

From the parameters' layouts and matrices: which rank owns each matrix, which matrices travel together in a bucket, and
which pieces of which shard go where. A plan is made for one rank; ranks that agree on the inputs make plans that fit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

from muonshard.layout import Layout, Overlap
from muonshard.matrices import Matrix, MatrixRule, find_matrices
from muonshard.owners import CostModel, Seat, Work, deal, longest_first

PIPELINE_BUCKETS = 4
"""Buckets a domain is cut into, at least, so that one can travel while another is orthogonalised ..."""
PIPELINE_MIN_ELEMENTS = 1 << 18
"""... unless they would then hold fewer elements per shard than this, where latency costs more than overlap gains."""


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
    """

    name: str
    layout: Layout
    grid: Grid
    rule: MatrixRule
    cost: CostModel
    kind: Hashable = None


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
        owned: those that this rank orthogonalises.
        outgoing: by shard of this rank's replica, the pieces it holds of the matrices that shard's rank owns.
        incoming: by shard of this rank's replica, the pieces which that shard's rank holds of this rank's matrices.
        across: by replica, the pieces of this rank's shard whose matrices that replica owns.
    """

    jobs: tuple[int, ...]
    travels: bool
    owned: tuple[int, ...]
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

    @property
    def elements(self) -> int:
        """Elements in all matrices."""
        return sum(job.matrix.numel for job in self.jobs)

    def loads(self) -> dict[Seat, int]:
        """FLOPs per step of every seat."""
        loads = dict.fromkeys(self.grid.seats.values(), 0)
        for job in self.jobs:
            loads[job.owner] += job.cost
        return loads

    def sent(self) -> tuple[int, int]:
        """(elements of matrices, presence flags) that this rank sends per step."""
        return sum(map(self._payload, self.buckets)), sum(map(self._flags, self.buckets))

    def bound(self) -> float:
        """Elements a rank sends per step in the design's promise, on average over ranks."""
        shards, replicas = self.grid.shards, self.grid.replicas
        in_shards = 2 * self.elements / (replicas * shards) * (1 - 1 / shards)
        return in_shards + self.elements / shards * (1 - 1 / replicas)

    def _payload(self, bucket: Bucket) -> int:
        return self._travels(bucket, lambda pieces: sum(piece.where.numel for piece in pieces))

    def _flags(self, bucket: Bucket) -> int:
        return self._travels(bucket, len)

    def _travels(self, bucket: Bucket, measure: Callable[[Sequence[Piece]], int]) -> int:
        there, back = (
            sum(measure(pieces) for shard, pieces in enumerate(side) if shard != self.seat.shard)
            for side in (bucket.outgoing, bucket.incoming)
        )
        return there + back + (self.grid.replicas - 1) * measure(bucket.across[self.seat.replica])


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
        """Bytes that this rank sends per step, presence flags included."""
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
        return sum(
            len(domain.buckets) * (2 * (domain.grid.shards > 1) + (domain.grid.replicas > 1)) for domain in self.domains
        )

    def __str__(self) -> str:
        from muonshard.report import render

        return render(self)


def make_plan(tenants: Sequence[Tenant], rank: int, itemsize: int, bucket_bytes: int) -> Plan:
    """The plan of `rank` for these tenants, `itemsize` bytes per element exchanged.

    A bucket holds at most `bucket_bytes` of any shard and of any owner's matrices, or one matrix that is larger.

    Raises:
        ValueError: a tenant cannot be read as matrices; the message names it.
    """
    grids: dict[Grid, list[int]] = {}
    for index, tenant in enumerate(tenants):
        grids.setdefault(tenant.grid, []).append(index)
    limit = max(1, bucket_bytes // itemsize)
    domains = (
        _make_domain(grid, grid.seats[rank], tenants, members, limit)
        for grid, members in sorted(grids.items(), key=lambda item: item[0].ranks)
    )
    return Plan(rank, tuple(tenants), tuple(domains), itemsize)


def _make_domain(grid: Grid, seat: Seat, tenants: Sequence[Tenant], members: list[int], limit: int) -> Domain:
    works: list[Work] = []
    homes: list[int] = []
    for index in members:
        tenant = tenants[index]
        try:
            matrices = find_matrices(tenant.layout.shape, tenant.rule)
        except ValueError as error:
            raise ValueError(f"{tenant.name}: {error}") from None
        works += [Work(matrix, tenant.layout, tenant.cost(matrix.rows, matrix.cols)) for matrix in matrices]
        homes += [index] * len(matrices)
    owners = deal(works, grid.shards, grid.replicas)
    jobs = tuple(
        Job(tenant, work.matrix, owner, work.cost, _at_home(work, owner), tenants[tenant].kind)
        for tenant, work, owner in zip(homes, works, owners, strict=True)
    )
    layouts = [tenant.layout for tenant in tenants]
    groups = _fill_buckets(jobs, layouts, longest_first(works), limit)
    buckets = tuple(_make_bucket(group, jobs, layouts, grid, seat) for group in groups)
    return Domain(grid, seat, jobs, buckets)


def _at_home(work: Work, owner: Seat) -> bool:
    return work.layout.held(owner.shard, work.matrix.box) == work.matrix.numel


@dataclass
class _Fill:
    """A bucket while it is filled: elements per owner, per parameter, and at most in any shard."""

    jobs: Sequence[Job]
    layouts: Sequence[Layout]
    members: list[int] = field(default_factory=list)
    owned: Counter[Seat] = field(default_factory=Counter)
    tenants: Counter[int] = field(default_factory=Counter)
    local: int = 0
    largest: int = 0

    def needs(self, wave: Sequence[int]) -> tuple[int, int, int]:
        """Elements with `wave` in the bucket too: at most in any shard, at the fullest owner, in the largest matrix."""
        local, largest = self.local, self.largest
        owned: Counter[Seat] = Counter()
        tenants: Counter[int] = Counter()
        for job in (self.jobs[index] for index in wave):
            numel, before = job.matrix.numel, self.tenants[job.tenant] + tenants[job.tenant]
            most = self.layouts[job.tenant].max_local_numel
            local += min(most, before + numel) - min(most, before)  # a parameter adds its largest shard at most
            owned[job.owner] += numel
            tenants[job.tenant] += numel
            largest = max(largest, numel)
        return local, max(self.owned[seat] + more for seat, more in owned.items()), largest

    def fits(self, wave: Sequence[int], limit: int) -> bool:
        """Whether, with `wave`, a rank needs room for at most `limit` elements, or for one matrix."""
        local, peak, largest = self.needs(wave)
        return len(self.members) + len(wave) < 2 or (local <= limit and peak <= max(limit, largest))

    def add(self, wave: Sequence[int]) -> None:
        """Put `wave` in the bucket."""
        self.local, _, self.largest = self.needs(wave)
        self.members += wave
        for job in (self.jobs[index] for index in wave):
            self.owned[job.owner] += job.matrix.numel
            self.tenants[job.tenant] += job.matrix.numel


def _fill_buckets(
    jobs: Sequence[Job], layouts: Sequence[Layout], order: Sequence[int], limit: int
) -> list[tuple[int, ...]]:
    """Cut the jobs, costliest first, into buckets of at most `limit` elements per rank, or one larger matrix.

    A wave, in which every owner has at most one matrix, stays together where the limit allows, so that the owners' work
    in a bucket is level. The last buckets are the cheapest: little compute is left when all has arrived.
    """
    if not order:
        return []
    whole = max(_Fill(jobs, layouts).needs(order)[:2])
    limit = min(limit, max(-(-whole // PIPELINE_BUCKETS), PIPELINE_MIN_ELEMENTS))
    fills = [_Fill(jobs, layouts)]
    for wave in _waves(jobs, order):
        for part in _cut(wave, jobs, layouts, limit):
            if not fills[-1].fits(part, limit):
                fills.append(_Fill(jobs, layouts))
            fills[-1].add(part)
    return [tuple(fill.members) for fill in fills]


def _cut(wave: list[int], jobs: Sequence[Job], layouts: Sequence[Layout], limit: int) -> list[list[int]]:
    """A wave as the fewest parts of about equal number that are each within the limit."""
    for parts in range(1, len(wave) + 1):
        size = -(-len(wave) // parts)
        cut = [wave[start : start + size] for start in range(0, len(wave), size)]
        if all(_Fill(jobs, layouts).fits(part, limit) for part in cut):
            return cut
    raise AssertionError("a single matrix always fits")


def _waves(jobs: Sequence[Job], order: Sequence[int]) -> list[list[int]]:
    """The first matrix of every owner, then the second of every owner, and so on."""
    waves: list[list[int]] = []
    dealt: Counter[Seat] = Counter()
    for index in order:
        owner = jobs[index].owner
        if dealt[owner] == len(waves):
            waves.append([])
        waves[dealt[owner]].append(index)
        dealt[owner] += 1
    return waves


def _make_bucket(
    members: tuple[int, ...], jobs: Sequence[Job], layouts: Sequence[Layout], grid: Grid, seat: Seat
) -> Bucket:
    """What travels from and to `seat` for these jobs."""
    outgoing: list[list[list[Piece]]] = [[[] for _ in range(grid.shards)] for _ in range(grid.replicas)]
    incoming: list[list[Piece]] = [[] for _ in range(grid.shards)]
    for index in members:
        job = jobs[index]
        layout, box = layouts[job.tenant], job.matrix.box
        outgoing[job.owner.replica][job.owner.shard] += _pieces(index, layout.overlaps(seat.shard, box))
        if job.owner == seat:
            for shard in layout.holders(box):
                incoming[shard] += _pieces(index, layout.overlaps(shard, box))
    return Bucket(
        jobs=members,
        travels=not all(jobs[index].at_home for index in members),
        owned=tuple(index for index in members if jobs[index].owner == seat),
        outgoing=tuple(map(tuple, outgoing[seat.replica])),
        incoming=tuple(map(tuple, incoming)),
        across=tuple(tuple(chain.from_iterable(by_shard)) for by_shard in outgoing),
    )


def _pieces(job: int, overlaps: Iterable[Overlap]) -> list[Piece]:
    return [Piece(job, where) for where in overlaps]
