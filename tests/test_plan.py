"""The plans of all ranks, made without processes, fit together; and each of them keeps what it promises."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from muonshard.buckets import Exchange, Machine
from muonshard.layout import Box, Cut, Layout, Overlap, make_layout
from muonshard.matrices import MatrixRule
from muonshard.meshes import make_grid
from muonshard.owners import Seat
from muonshard.plan import Bucket, Domain, Grid, Piece, Plan, Tenant
from muonshard.planner import make_plan

Shape = tuple[int, ...]
Cuts = tuple[Cut | None, ...]


def cost(rows: int, cols: int) -> int:
    """FLOPs of five quintic Newton-Schulz steps."""
    m, n = min(rows, cols), max(rows, cols)
    return 5 * (4 * m * m * n + 2 * m**3)


@dataclass(frozen=True)
class Case:
    """Tensors, each with a cut or none for every axis of a mesh and a rule, and how they are exchanged."""

    mesh: Shape
    tensors: tuple[tuple[Shape, Cuts, MatrixRule], ...]
    exchange: Exchange = "owner"
    bucket_bytes: int = 1 << 20
    itemsize: int = 2
    reversed_ranks: bool = False

    @cached_property
    def tenants(self) -> list[Tenant]:
        ranks = np.arange(np.prod(self.mesh)).reshape(self.mesh)
        if self.reversed_ranks:
            ranks = ranks[::-1]
        return [
            Tenant(f"tensor {i}", make_layout(shape, self.mesh, cuts), make_grid(ranks, cuts), rule, cost, None, cuts)
            for i, (shape, cuts, rule) in enumerate(self.tensors)
        ]

    @cached_property
    def plans(self) -> list[Plan]:
        """The plan of every rank."""
        ranks = range(int(np.prod(self.mesh)))
        return [make_plan(self.tenants, rank, self.itemsize, self.bucket_bytes, self.exchange) for rank in ranks]

    def domains(self) -> Iterator[dict[Seat, Domain]]:
        """Each domain, as the rank at every seat sees it."""
        for views in zip(*(plan.domains for plan in self.plans), strict=True):
            yield {view.seat: view for view in views}

    def buckets(self) -> Iterator[tuple[Domain, dict[Seat, Bucket]]]:
        """Each bucket, as the rank at every seat sees it, with its domain."""
        for views in self.domains():
            some = next(iter(views.values()))
            for number in range(len(some.buckets)):
                yield some, {seat: view.buckets[number] for seat, view in views.items()}


RULES = [
    ((4, 6), MatrixRule(num_heads=2)),
    ((6, 4), MatrixRule((4, 2))),
    ((3, 4), MatrixRule(num_heads=4, split_dim=1)),
]


@st.composite
def cases(draw: st.DrawFn, exchanges: Sequence[Exchange] = ("owner", "allgather", "auto")) -> Case:
    """Matrices, stacks and heads on one mesh, some of them cut along one of its axes and some along another."""
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda sizes: np.prod(sizes) <= 16)))
    tensors = []
    for _ in range(draw(st.integers(1, 6))):
        sizes = st.lists(st.integers(0, 9), min_size=2, max_size=3).map(lambda shape: (tuple(shape), MatrixRule()))
        shape, rule = draw(st.one_of(sizes, sizes, st.sampled_from(RULES)))
        cut = st.builds(Cut, st.integers(0, len(shape) - 1), st.sampled_from([1, 1, 2]))
        tensors.append((shape, tuple(draw(st.one_of(st.none(), cut, cut)) for _ in mesh), rule))
    return Case(
        mesh,
        tuple(tensors),
        draw(st.sampled_from(exchanges)),
        draw(st.sampled_from([1, 40, 200, 1 << 20])),
        draw(st.sampled_from([2, 4])),
        draw(st.booleans()),
    )


HYBRID = Case((2, 3), (((7, 4), (None, Cut(0)), MatrixRule()),) * 5, bucket_bytes=100)
FSDP_OVER_TP = Case((2, 2), (((7, 5), (Cut(0, 2), Cut(0)), MatrixRule()),) * 5)
GATHERED = Case((2,), (((4, 4), (Cut(0),), MatrixRule()),) * 6, "allgather", bucket_bytes=90)
HEADS_ACROSS_SHARDS = Case((4,), (((6, 4), (Cut(0),), MatrixRule(num_heads=2)),) * 3)


def covered(shape: Shape, where: Sequence[tuple[slice, ...]]) -> Any:
    """How often each element of a tensor is in one of these places."""
    counts = np.zeros(shape, int)
    for place in where:
        counts[place] += 1
    return counts


@given(cases())
@example(HYBRID)
def test_all_ranks_have_the_same_jobs_in_the_same_buckets(case: Case) -> None:
    for views in case.domains():
        assert len({view.grid for view in views.values()}) == 1
        assert set(views) == set(next(iter(views.values())).grid.seats.values())
        assert len({view.jobs for view in views.values()}) == 1
        assert len({tuple((b.jobs, b.travels, b.fused) for b in view.buckets) for view in views.values()}) == 1
    for plan in case.plans:
        assert [domain.grid.ranks for domain in plan.domains] == sorted({t.grid.ranks for t in case.tenants})


@given(cases())
def test_every_matrix_is_in_one_bucket(case: Case) -> None:
    for views in case.domains():
        domain = next(iter(views.values()))
        assert sorted(job for bucket in domain.buckets for job in bucket.jobs) == list(range(len(domain.jobs)))


@given(cases())
@example(HYBRID)
@example(FSDP_OVER_TP)
@example(HEADS_ACROSS_SHARDS)
def test_what_a_rank_sends_to_another_is_what_the_other_expects(case: Case) -> None:
    """There: a's pieces for b are those b awaits from a; back they are the same, and so are those across replicas."""
    for _, views in case.buckets():
        for (a, sender), (b, receiver) in product(views.items(), repeat=2):
            if a.replica == b.replica and not sender.fused:
                assert sender.outgoing[b.shard] == receiver.incoming[a.shard]
            if a.shard == b.shard:
                assert sender.across == receiver.across


@given(cases())
@example(FSDP_OVER_TP)
@example(HEADS_ACROSS_SHARDS)
def test_an_owner_gets_every_element_of_its_matrices_once(case: Case) -> None:
    for domain, views in case.buckets():
        for seat, bucket in views.items():
            expected = [i for i in bucket.jobs if domain.jobs[i].owner.replica == seat.replica]
            if not bucket.fused:
                expected = [i for i in expected if domain.jobs[i].owner == seat]
                arriving = [piece for pieces in bucket.incoming for piece in pieces]
                for index in expected:
                    where = [piece.where.inner for piece in arriving if piece.job == index]
                    assert (covered(domain.jobs[index].matrix.box_shape, where) == 1).all()
            assert list(bucket.owned) == expected
            gathered = {domain.jobs[i].tenant for i in expected} if bucket.fused else set()
            assert set(bucket.gathers) == gathered


@given(cases())
@example(FSDP_OVER_TP)
def test_every_element_of_a_shard_gets_one_update(case: Case) -> None:
    for plan in case.plans:
        wheres: dict[int, list[tuple[slice, ...]]] = {index: [] for index in range(len(case.tenants))}
        for domain in plan.domains:
            for bucket in domain.buckets:
                for piece in (piece for pieces in bucket.across for piece in pieces):
                    wheres[domain.jobs[piece.job].tenant].append(piece.where.local)
        for tenant, where in zip(case.tenants, wheres.values(), strict=True):
            shape = tenant.layout.local_shape(tenant.grid.seats[plan.rank].shard)
            assert (covered(shape, where) == 1).all()


@given(cases())
def test_pieces_across_replicas_are_those_that_were_sent_to_owners(case: Case) -> None:
    for _, views in case.buckets():
        for seat, bucket in views.items():
            assert bucket.across[seat.replica] == tuple(piece for pieces in bucket.outgoing for piece in pieces)


def elements(pieces: Sequence[Piece]) -> int:
    return sum(piece.where.numel for piece in pieces)


@given(cases())
@example(HYBRID)
@example(GATHERED)
def test_a_bucket_keeps_its_limit_or_holds_one_larger_matrix(case: Case) -> None:
    """Or, where matrices of one parameter are gathered together, one larger parameter."""
    limit = max(1, case.bucket_bytes // case.itemsize)
    for domain, views in case.buckets():
        for seat, bucket in views.items():
            jobs = [domain.jobs[index] for index in bucket.jobs]
            if bucket.fused and len({job.tenant for job in jobs}) > 1:
                most = limit if case.exchange == "allgather" else limit * domain.grid.replicas
                assert sum(job.matrix.numel for job in jobs) <= most
            elif not bucket.fused and len(jobs) > 1:
                owned = sum(job.matrix.numel for job in jobs if job.owner == seat)
                assert owned <= max(limit, max(job.matrix.numel for job in jobs))
                assert sum(map(elements, bucket.across)) <= limit


@given(cases(exchanges=("owner",)))
@example(FSDP_OVER_TP)
@example(HEADS_ACROSS_SHARDS)
def test_all_ranks_together_send_no_more_than_the_bound(case: Case) -> None:
    assert sum(plan.payload_bytes for plan in case.plans) <= sum(plan.bound_bytes for plan in case.plans) + 1e-6


@given(cases(exchanges=("owner",)))
def test_what_is_said_to_be_sent_is_what_owners_do_not_hold_there_and_back_and_a_copy_for_every_replica(
    case: Case,
) -> None:
    payload, flags = 0, 0
    for views in case.domains():
        domain = next(iter(views.values()))
        for job in domain.jobs:
            layout, box = case.tenants[job.tenant].layout, job.matrix.box
            others = domain.grid.replicas - 1
            for shard in range(domain.grid.shards):
                ways = 2 * (shard != job.owner.shard) + others
                payload += ways * layout.held(shard, box)
                flags += ways * len(layout.overlaps(shard, box))
    assert sum(plan.payload_bytes for plan in case.plans) == payload * case.itemsize
    assert sum(plan.bytes_sent for plan in case.plans) == (payload + flags) * case.itemsize


@given(cases())
def test_the_loads_are_those_of_who_does_the_work(case: Case) -> None:
    for views in case.domains():
        expected: Counter[Seat] = Counter(dict.fromkeys(views, 0))
        for seat, view in views.items():
            expected[seat] += sum(view.jobs[index].cost for bucket in view.buckets for index in bucket.owned)
        assert all(view.loads() == expected for view in views.values())


@given(cases())
def test_ranks_that_exchange_a_bucket_take_part_in_as_many_collectives(case: Case) -> None:
    for views in case.domains():
        for replica in {seat.replica for seat in views}:
            row = [view for seat, view in views.items() if seat.replica == replica]
            counts = {Plan(0, (), (view,), case.itemsize).collectives for view in row}
            assert len(counts) == 1


def only(case: Case) -> Domain:
    (domain,) = case.plans[0].domains
    return domain


def test_where_everything_lies_whole_with_its_owner_there_is_no_collective() -> None:
    case = Case((4,), (((8, 3, 3), (Cut(0),), MatrixRule()),))
    assert not any(bucket.travels for bucket in only(case).buckets)
    assert case.plans[0].collectives == 0
    assert case.plans[0].bytes_sent == 0


def test_replicas_share_the_work_and_then_the_updates() -> None:
    case = Case((4,), (((8, 3), (None,), MatrixRule()),) * 8)
    assert Counter(job.owner.replica for job in only(case).jobs) == {0: 2, 1: 2, 2: 2, 3: 2}
    assert (case.plans[0].collectives, case.plans[0].sends) == (0, 3 * len(only(case).buckets))


def test_parameters_cut_along_other_axes_are_other_domains() -> None:
    tensors = tuple(((4, 4), cuts, MatrixRule()) for cuts in [(Cut(0), None), (None, Cut(0)), (Cut(1), None)])
    plan = Case((2, 2), tensors).plans[3]
    assert [domain.grid.ranks for domain in plan.domains] == [((0, 1), (2, 3)), ((0, 2), (1, 3))]
    assert [len(domain.jobs) for domain in plan.domains] == [1, 2]


def test_the_costliest_matrix_goes_first() -> None:
    shapes = [(4, 4), (16, 16), (8, 8)]
    domain = only(Case((2,), tuple((shape, (Cut(0),), MatrixRule()) for shape in shapes), bucket_bytes=1))
    assert [domain.jobs[bucket.jobs[0]].matrix.rows for bucket in domain.buckets] == [16, 8, 4]


def test_large_domains_are_cut_into_several_buckets_so_that_they_overlap() -> None:
    domain = only(Case((2,), (((2048, 1024), (Cut(0),), MatrixRule()),) * 8, bucket_bytes=1 << 40))
    assert len(domain.buckets) == 4


def test_tiny_matrices_are_gathered_where_a_second_trip_costs_more() -> None:
    tenants = Case((2,), (((4, 4), (Cut(0),), MatrixRule()),) * 3).tenants
    slow_wire, slow_compute = Machine(1.0, 1e9, 1e12), Machine(1e-9, 1e9, 1e3)
    fused = [
        [b.fused for b in make_plan(tenants, 0, 2, 1 << 20, "auto", machine).domains[0].buckets]
        for machine in (slow_wire, slow_compute)
    ]
    assert fused == [[True], [False]]


def test_a_tensor_that_cannot_be_read_is_named() -> None:
    with pytest.raises(ValueError, match=r"tensor 1: num_heads=3 does not divide"):
        Case((2,), (((4, 4), (Cut(0),), MatrixRule()), ((4, 4), (Cut(0),), MatrixRule(num_heads=3)))).plans  # noqa: B018


class Count:
    """Counts the calls of a method of Layout, and its results."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.calls = self.results = 0
        real = getattr(Layout, name)

        def counted(*args: Any) -> Any:
            self.calls += 1
            result = real(*args)
            self.results += len(result) if isinstance(result, list) else 0
            return result

        monkeypatch.setattr(Layout, name, counted)


def test_planning_for_many_ranks_looks_at_each_matrix_and_at_the_holders_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Never at matrices times ranks: 7,000 times 512 here."""
    world, blocks = 512, 1000
    grid = Grid((tuple(range(world)),))
    shapes = [(4096, 4096), (4096, 4096), (1024, 4096), (1024, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
    layouts = [make_layout(shape, (world,), (Cut(0),)) for shape in shapes]
    tenants = [Tenant(f"{i}", layout, grid, MatrixRule(), cost) for i in range(blocks) for layout in layouts]
    overlaps, held, largest = (Count(monkeypatch, name) for name in ("overlaps", "held", "largest_holders"))
    plan = make_plan(tenants, 17, 2, 64 << 20, "owner")
    (domain,) = plan.domains
    matrices, owned = len(domain.jobs), sum(len(bucket.owned) for bucket in domain.buckets)
    assert matrices == 7000
    assert overlaps.calls == overlaps.results == matrices + owned * world
    assert held.calls <= 4 * matrices
    assert largest.calls == len(set(layouts))
    pieces = sum(map(len, [side for b in domain.buckets for side in (*b.outgoing, *b.incoming, *b.across)]))
    assert pieces <= 2 * overlaps.results
    assert max(domain.loads().values()) <= 1.1 * sum(domain.loads().values()) / world


def test_a_piece_has_no_more_numbers_than_its_dims() -> None:
    box: Box = ((0, 1 << 20), (0, 1 << 20))
    (overlap,) = make_layout((1 << 20, 1 << 20), (4,), (Cut(0),)).overlaps(1, box)
    half = 1 << 18
    assert overlap == Overlap(
        (slice(0, half), slice(0, 1 << 20)), (slice(half, 2 * half), slice(0, 1 << 20)), half << 20
    )
