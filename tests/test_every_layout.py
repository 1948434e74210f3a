"""The heart: whatever the mesh, the placements, the matrices and the gradients, the weights are one process's.

Hundreds of cases by default, thousands with HYPOTHESIS_PROFILE=thorough. A failure prints a case for rerun_case.py.
"""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from layout_cases import WORLD, Case, Mesh, Param, mismatches, run_cases
from pool import Pool
from random_cases import cases

TRIPS = 60
"""Calls of the pool by default, of several cases each."""

FOUR = Mesh((4,), (0, 1, 2, 3))
FLAGS_OF_COLUMNS = Case(
    (FOUR,),
    (Param((6, 4), 0, (1,), absent=(frozenset(), frozenset(range(4)), frozenset())), Param((6, 4), 0, (1,))),
    {"exchange": "allgather"},
)
UNEVEN_FSDP_OVER_TP = Case((Mesh((4, 2), tuple(range(8))),), (Param((9, 17), 0, (0, 0), inner_first=True),))
ALONE_ON_A_MESH = Case((Mesh((1,), (7,)),), (Param((7, 5), 0, (0,)),), {"exchange": "allgather"})
UNLIKE_NUMBERS_OF_GROUPS = [
    Case((Mesh((2, 2), (0, 1, 2, 3)),), (Param((6, 5), 0, (0, 1)),)),
    Case((Mesh((2, 2, 2), tuple(range(8))),), (Param((6, 8), 0, (None, 0, None)),)),
]


@settings(max_examples=max(TRIPS, settings.default.max_examples // 4))
@given(drawn=st.lists(cases(), min_size=1, max_size=8))
@example([FLAGS_OF_COLUMNS, UNEVEN_FSDP_OVER_TP, ALONE_ON_A_MESH])
@example(UNLIKE_NUMBERS_OF_GROUPS)
def test_every_layout_gives_the_bits_of_one_process(pool: Pool, drawn: list[Case]) -> None:
    by_rank = pool.run(WORLD, run_cases, drawn)
    for case, results in zip(drawn, zip(*by_rank, strict=True), strict=True):
        assert mismatches(case, results) == [], f"again: python tests/rerun_case.py '{case!r}'"
