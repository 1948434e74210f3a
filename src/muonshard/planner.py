"""Makes a plan from the parameters' layouts and matrices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from muonshard.buckets import Batch, Exchange, Machine, Terms, gather_stride, make_batches
from muonshard.layout import Layout, Overlap
from muonshard.matrices import find_matrices
from muonshard.owners import Seat, Work, deal, longest_first
from muonshard.plan import Bucket, Domain, Grid, Job, Piece, Plan, Tenant
from muonshard.verdict import word_elements

MACHINES = {
    "cpu": Machine(latency=200e-6, bandwidth=1e9, flops=50e9),
    "cuda": Machine(latency=40e-6, bandwidth=50e9, flops=200e12),
}
"""Round figures by device: processes on a few cores that talk over gloo; data-centre GPUs that talk over NCCL."""


def make_plan(
    tenants: Sequence[Tenant],
    rank: int,
    itemsize: int,
    bucket_bytes: int,
    exchange: Exchange = "auto",
    machine: Machine = MACHINES["cpu"],
    backwards: bool = False,
    reports: bool = False,
) -> Plan:
    """The plan of `rank` for these tenants, `itemsize` bytes per element exchanged.

    A bucket holds at most `bucket_bytes` of any shard and of any owner's matrices (or, where it is gathered everywhere,
    of all its matrices), or one matrix that is larger. Buckets are filled costliest matrix first, so that the last
    compute is short, or `backwards`, from the last tenant to the first, as backward makes their gradients final. Once a
    step, ranks of a domain report to each other whether all matrices are finite, if `reports`.

    Raises:
        ValueError: a tenant cannot be read as matrices; the message names it.
    """
    grids: dict[Grid, list[int]] = {}
    for index, tenant in enumerate(tenants):
        grids.setdefault(tenant.grid, []).append(index)
    terms = Terms(max(1, bucket_bytes // itemsize), itemsize, exchange, machine, backwards)
    word = word_elements(itemsize) if reports else 0
    domains = (
        _make_domain(grid, grid.seats[rank], tenants, members, terms, word)
        for grid, members in sorted(grids.items(), key=lambda item: (len(item[0].seats), item[0].ranks))
    )
    return Plan(rank, tuple(tenants), tuple(domains), itemsize)


def _make_domain(
    grid: Grid, seat: Seat, tenants: Sequence[Tenant], members: list[int], terms: Terms, word: int
) -> Domain:
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
    order = list(reversed(range(len(jobs)))) if terms.backwards else longest_first(works)
    batches = make_batches(jobs, tenants, grid, order, terms)
    layouts = [tenant.layout for tenant in tenants]
    buckets = tuple(_make_bucket(batch, jobs, layouts, grid, seat, terms.itemsize) for batch in batches)
    return Domain(grid, seat, jobs, buckets, word)


def _at_home(work: Work, owner: Seat) -> bool:
    return work.layout.held(owner.shard, work.matrix.box) == work.matrix.numel


def _make_bucket(
    batch: Batch, jobs: Sequence[Job], layouts: Sequence[Layout], grid: Grid, seat: Seat, itemsize: int
) -> Bucket:
    """What travels from and to `seat` for these jobs."""
    outgoing: list[list[list[Piece]]] = [[[] for _ in range(grid.shards)] for _ in range(grid.replicas)]
    incoming: list[list[Piece]] = [[] for _ in range(grid.shards)]
    for index in batch.jobs:
        job = jobs[index]
        layout, box = layouts[job.tenant], job.matrix.box
        outgoing[job.owner.replica][job.owner.shard] += _pieces(index, layout.overlaps(seat.shard, box))
        if job.owner == seat and not batch.fused:
            for shard in layout.holders(box):
                incoming[shard] += _pieces(index, layout.overlaps(shard, box))
    here = [index for index in batch.jobs if jobs[index].owner.replica == seat.replica]
    gathers = tuple(dict.fromkeys(jobs[index].tenant for index in here)) if batch.fused else ()
    return Bucket(
        jobs=batch.jobs,
        travels=not all(jobs[index].at_home for index in batch.jobs),
        fused=batch.fused,
        owned=tuple(index for index in here if batch.fused or jobs[index].owner == seat),
        gathers=gathers,
        gather_stride=gather_stride([layouts[tenant] for tenant in gathers], itemsize),
        outgoing=tuple(map(tuple, outgoing[seat.replica])),
        incoming=tuple(map(tuple, incoming)),
        across=tuple(tuple(chain.from_iterable(by_shard)) for by_shard in outgoing),
    )


def _pieces(job: int, overlaps: Iterable[Overlap]) -> list[Piece]:
    return [Piece(job, where) for where in overlaps]
