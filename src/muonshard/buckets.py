"""Which matrices travel together, and whether they make two trips or one fused gather."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from muonshard.layout import Layout
from muonshard.owners import Seat
from muonshard.plan import Grid, Job, Tenant

Exchange = Literal["auto", "owner", "allgather"]
"""How matrices become whole: by a trip to their owner and back, by one fused all-gather, or whichever is quicker."""

ALIGNMENT = 512
"""Bytes to which tensors in a fused all-gather are aligned."""

PIPELINE_BUCKETS = 4
"""Buckets a domain is cut into, at least, so that one can travel while another is orthogonalised ..."""
PIPELINE_MIN_ELEMENTS = 1 << 18
"""... unless they would then hold fewer elements per shard than this, where latency costs more than overlap gains."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What decides between two trips and one: seconds per collective, bytes and FLOPs per second of one rank."""

    latency: float
    bandwidth: float
    flops: float


@dataclass(frozen=True, slots=True)
class Batch:
    """Jobs that travel together, costliest first; `fused` where they are gathered everywhere."""

    jobs: tuple[int, ...]
    fused: bool


@dataclass(frozen=True, slots=True)
class Terms:
    """What all ranks fill buckets by.

    Attributes:
        limit: at most so many elements for any rank.
        itemsize: bytes of each.
        exchange: how matrices become whole.
        machine: what that costs.
        backwards: whether buckets are filled in the order in which backward reaches parameters, last to first, and not
            costliest first.
    """

    limit: int
    itemsize: int
    exchange: Exchange
    machine: Machine
    backwards: bool


def make_batches(
    jobs: Sequence[Job], tenants: Sequence[Tenant], grid: Grid, order: Sequence[int], terms: Terms
) -> list[Batch]:
    """Cut `jobs`, taken in `order`, into batches.

    With exchange="allgather" every family that can be gathered in one call is; with "auto", a batch of one such family
    is where that is quicker on the machine.
    """
    layouts = [tenant.layout for tenant in tenants]
    if terms.exchange == "owner":
        return [Batch(members, False) for members in _fill(jobs, layouts, order, terms.limit)]
    families: dict[Hashable, list[int]] = {}
    for index in order:
        tenant = tenants[jobs[index].tenant]
        families.setdefault(tenant.family if can_gather(tenant, grid) else None, []).append(index)
    if terms.exchange == "auto":
        batches = _fill(jobs, layouts, order, terms.limit)
        fits = set(order) - set(families.get(None, ()))
        return [
            Batch(members, fits.issuperset(members) and _gather_is_quicker(members, jobs, tenants, grid, terms))
            for members in batches
        ]
    apart = families.pop(None, [])
    return [Batch(members, False) for members in _fill(jobs, layouts, apart, terms.limit)] + [
        Batch(members, True)
        for members_of_family in families.values()
        for members in _fill_whole(jobs, members_of_family, terms.limit)
    ]


def can_gather(tenant: Tenant, grid: Grid) -> bool:
    """Whether one all-gather makes the tenant whole: one mesh axis cuts it, into one run each, in rank order."""
    return (
        tenant.family is not None
        and grid.shards > 1
        and len(tenant.layout.axes) == 1
        and all(len(runs) <= 1 for split in tenant.layout.dims for runs in split.shares.values())
        and all(list(row) == sorted(row) for row in grid.ranks)
    )


def gather_stride(layouts: Iterable[Layout], itemsize: int) -> int:
    """Elements a rank sends to each other one in a fused all-gather: shards padded to the largest, aligned; flags."""
    block = ALIGNMENT // itemsize
    sizes = [layout.max_local_numel for layout in layouts]
    return sum(-(-size // block) * block for size in [*sizes, len(sizes) + 1]) if sizes else 0


def _gather_is_quicker(
    members: Sequence[int], jobs: Sequence[Job], tenants: Sequence[Tenant], grid: Grid, terms: Terms
) -> bool:
    """One gather and all the work, against two trips and a share of it; the way across replicas is the same."""
    elements = sum(jobs[index].matrix.numel for index in members) / grid.replicas
    if len({tenants[jobs[index].tenant].family for index in members}) > 1 or elements > terms.limit:
        return False
    machine, others = terms.machine, grid.shards - 1
    cost = sum(jobs[index].cost for index in members) / grid.replicas
    stride = gather_stride((tenants[t].layout for t in {jobs[index].tenant for index in members}), terms.itemsize)
    travelling = sum(jobs[index].matrix.numel for index in members if not jobs[index].at_home) / grid.replicas
    seconds_per_element = terms.itemsize / machine.bandwidth
    trips = 2 * machine.latency * bool(travelling) + 2 * travelling / grid.shards**2 * others * seconds_per_element
    gather = machine.latency + stride * others * seconds_per_element
    return gather + cost / machine.flops < trips + cost / grid.shards / machine.flops


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
        owned: Counter[Seat] = Counter()
        tenants: Counter[int] = Counter()
        for job in (self.jobs[index] for index in wave):
            owned[job.owner] += job.matrix.numel
            tenants[job.tenant] += job.matrix.numel
        local = self.local + sum(self._added(tenant, numel) for tenant, numel in tenants.items())
        largest = max(self.largest, max(self.jobs[index].matrix.numel for index in wave))
        return local, max(self.owned[seat] + more for seat, more in owned.items()), largest

    def fits(self, wave: Sequence[int], limit: int) -> bool:
        """Whether, with `wave`, a rank needs room for at most `limit` elements, or for one matrix."""
        local, peak, largest = self.needs(wave)
        return len(self.members) + len(wave) < 2 or (local <= limit and peak <= max(limit, largest))

    def add(self, wave: Sequence[int]) -> None:
        """Put `wave` in the bucket."""
        self.members += wave
        for job in (self.jobs[index] for index in wave):
            self.local += self._added(job.tenant, job.matrix.numel)
            self.owned[job.owner] += job.matrix.numel
            self.tenants[job.tenant] += job.matrix.numel
            self.largest = max(self.largest, job.matrix.numel)

    def _added(self, tenant: int, numel: int) -> int:
        """Elements that so many more of a parameter add to a shard: of all, no more than its largest shard has."""
        before, most = self.tenants[tenant], self.layouts[tenant].max_local_numel
        return min(most, before + numel) - min(most, before)


def _fill(jobs: Sequence[Job], layouts: Sequence[Layout], order: Sequence[int], limit: int) -> list[tuple[int, ...]]:
    """Batches of at most `limit` elements per rank, or of one larger matrix.

    A wave, in which every owner has at most one matrix, stays together where the limit allows, so that the owners' work
    in a batch is level. The last batches are the cheapest: little compute is left when all has arrived.
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


def _fill_whole(jobs: Sequence[Job], order: Sequence[int], limit: int) -> list[tuple[int, ...]]:
    """Batches of at most `limit` elements in all, or of one larger matrix; matrices of one parameter stay together."""
    by_tenant: dict[int, list[int]] = {}
    for index in order:
        by_tenant.setdefault(jobs[index].tenant, []).append(index)
    batches: list[list[int]] = []
    room = 0
    for members in by_tenant.values():
        size = sum(jobs[index].matrix.numel for index in members)
        if not batches or size > room:
            batches.append([])
            room = limit
        batches[-1] += members
        room -= size
    return [tuple(batch) for batch in batches]


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
