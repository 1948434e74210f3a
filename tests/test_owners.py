"""Who orthogonalises what: level loads, nothing that need not travel, and never more bytes than promised."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from muonshard.layout import Cut, make_layout
from muonshard.matrices import Matrix, MatrixRule, find_matrices
from muonshard.owners import Seat, Work, deal, longest_first

Shape = tuple[int, ...]
WHOLE = MatrixRule()


@dataclass(frozen=True)
class Table:
    """Tensors, each with a cut for every one of `axes`, on a grid with some replicas."""

    tensors: tuple[tuple[Shape, tuple[Cut, ...]], ...]
    axes: tuple[int, ...]
    replicas: int = 1
    rule: MatrixRule = WHOLE

    @property
    def shards(self) -> int:
        return prod(self.axes)

    @property
    def seats(self) -> list[Seat]:
        return [Seat(shard, replica) for shard, replica in product(range(self.shards), range(self.replicas))]

    def works(self) -> list[Work]:
        """The matrices of all tensors, for the FLOPs of five quintic steps each."""
        works = []
        for shape, cuts in self.tensors:
            layout = make_layout(shape, self.axes, cuts)
            for matrix in find_matrices(shape, self.rule):
                m, n = sorted((matrix.rows, matrix.cols))
                works.append(Work(matrix, layout, 5 * (4 * m * m * n + 2 * m**3)))
        return works

    def dealt(self) -> list[tuple[Work, Seat]]:
        works = self.works()
        return list(zip(works, deal(works, self.shards, self.replicas), strict=True))


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """Matrices and stacks, cut over one or two axes along any dims, on one to three replicas."""
    axes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
    tensors = []
    for _ in range(draw(st.integers(1, 8))):
        shape = tuple(draw(st.lists(st.integers(0, 9), min_size=2, max_size=3)))
        cuts = tuple(Cut(draw(st.integers(0, len(shape) - 1)), draw(st.sampled_from([1, 1, 2]))) for _ in axes)
        tensors.append((shape, cuts))
    return Table(tuple(tensors), axes, draw(st.integers(1, 3)))


@st.composite
def even_tables(draw: st.DrawFn) -> Table:
    """Matrices of several shapes whose rows divide over one axis of at least two shards."""
    shards = draw(st.integers(2, 5))
    shapes = draw(st.lists(st.tuples(st.integers(1, 4).map(lambda rows: rows * shards), st.integers(1, 9)), min_size=1))
    return Table(tuple((shape, (Cut(0),)) for shape in shapes), (shards,), draw(st.integers(1, 3)))


def held(work: Work, owner: Seat) -> int:
    return work.layout.held(owner.shard, work.matrix.box)


def loads(table: Table) -> list[int]:
    """FLOPs of every seat."""
    dealt = table.dealt()
    return [sum(work.cost for work, owner in dealt if owner == seat) for seat in table.seats]


LAST_SHARD_EMPTY = Table((((9, 5), (Cut(0),)),) * 3, (4,), 2)
ONE_ROW = Table((((1, 8), (Cut(0),)),) * 5, (4,), 2)


@given(tables())
@example(LAST_SHARD_EMPTY)
def test_no_more_travels_than_if_every_owner_held_its_fair_share(table: Table) -> None:
    dealt = table.dealt()
    travels = sum(work.matrix.numel - held(work, owner) for work, owner in dealt)
    assert travels * table.shards <= sum(work.matrix.numel for work, _ in dealt) * (table.shards - 1)


@given(tables())
@example(ONE_ROW)
def test_a_matrix_that_one_shard_holds_whole_stays_there(table: Table) -> None:
    for work, owner in table.dealt():
        whole = [shard for shard in range(table.shards) if held(work, Seat(shard, 0)) == work.matrix.numel]
        assert owner in table.seats
        assert not whole or owner.shard in whole


@given(tables())
def test_owners_are_the_same_in_every_process(table: Table) -> None:
    owners = [owner for _, owner in table.dealt()]
    make_layout.cache_clear()  # equal layouts are other objects in another process
    assert [owner for _, owner in table.dealt()] == owners


@given(even_tables())
def test_no_rank_has_more_than_the_mean_and_one_matrix_where_shards_are_even(table: Table) -> None:
    """Graham 1966: list scheduling on p machines ends at mean + (1 - 1/p) longest at the latest."""
    costs, ranks = [work.cost for work in table.works()], len(table.seats)
    assert max(loads(table)) * ranks <= sum(costs) + (ranks - 1) * max(costs)


def shortest_makespan(costs: list[int], ranks: int) -> int:
    """The least possible peak load, by trying everything."""
    return min(
        max(sum(cost for cost, at in zip(costs, where, strict=True) if at == rank) for rank in range(ranks))
        for where in product(range(ranks), repeat=len(costs))
    )


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 3))
def test_the_peak_is_within_a_third_of_the_best_where_every_rank_holds_everything(costs: list[int], ranks: int) -> None:
    """Graham 1969: longest first on p machines ends within 4/3 - 1/(3 p) of the optimum."""
    matrix, layout = Matrix(((0, 2), (0, 3)), 2, 3), make_layout((2, 3), (), ())
    owners = deal([Work(matrix, layout, cost) for cost in costs], shards=1, replicas=ranks)
    peak = max(sum(c for c, o in zip(costs, owners, strict=True) if o.replica == rank) for rank in range(ranks))
    assert peak * 3 * ranks <= (4 * ranks - 1) * shortest_makespan(costs, ranks)


@given(st.integers(1, 30), st.integers(2, 5), st.integers(1, 3))
def test_equal_matrices_are_shared_out_evenly(count: int, shards: int, replicas: int) -> None:
    table = Table((((2 * shards, 3), (Cut(0),)),) * count, (shards,), replicas)
    owners = [owner for _, owner in table.dealt()]
    counts = [owners.count(seat) for seat in table.seats]
    assert max(counts) - min(counts) <= 1


def test_equal_matrices_are_shared_out_evenly_over_uneven_shards_too() -> None:
    table = Table((((1000, 8), (Cut(0),)),) * 512, (64,))
    assert set(loads(table)) == {sum(work.cost for work in table.works()) // 64}


def test_a_rank_that_holds_twice_the_average_part_gets_the_matrix_where_loads_allow() -> None:
    table = Table((((16, 8), (Cut(0),)),), (8,), rule=MatrixRule(num_heads=4))
    assert [owner.shard // 2 for _, owner in table.dealt()] == [0, 1, 2, 3]


def test_loads_come_before_bytes_where_holders_would_be_overloaded() -> None:
    table = Table((((2, 8), (Cut(0),)),) * 8, (4,))
    assert max(loads(table)) < sum(loads(table)) / 2


def test_works_are_taken_by_falling_cost_and_equals_in_order() -> None:
    matrix, layout = Matrix(((0, 1), (0, 1)), 1, 1), make_layout((1, 1), (), ())
    assert longest_first([Work(matrix, layout, cost) for cost in (3, 7, 3, 9)]) == [3, 1, 0, 2]


@pytest.mark.parametrize(("shards", "replicas"), [(1, 1), (4, 3)])
def test_nothing_to_deal_is_dealt(shards: int, replicas: int) -> None:
    assert deal([], shards, replicas) == []
