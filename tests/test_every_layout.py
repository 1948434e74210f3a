"""The heart: whatever the mesh, the placements, the matrices and the gradients, the weights are one process's.

Hundreds of cases by default, thousands with HYPOTHESIS_PROFILE=thorough. A failure prints a case for rerun_case.py.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from layout_cases import WORLD, Case, mismatches, run_cases
from pool import Pool
from random_cases import cases

TRIPS = 60
"""Calls of the pool by default, of several cases each."""


@settings(max_examples=max(TRIPS, settings.default.max_examples // 4))
@given(drawn=st.lists(cases(), min_size=1, max_size=8))
def test_every_layout_gives_the_bits_of_one_process(pool: Pool, drawn: list[Case]) -> None:
    by_rank = pool.run(WORLD, run_cases, drawn)
    for case, results in zip(drawn, zip(*by_rank, strict=True), strict=True):
        assert mismatches(case, results) == [], f"again: python tests/rerun_case.py '{case!r}'"
