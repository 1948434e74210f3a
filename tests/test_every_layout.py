"""The heart: whatever the mesh, placements, matrices and gradients, the weights are those of one process."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from layout_cases import WORLD, Case, mismatches, run_cases
from pool import Pool
from random_cases import cases


@settings(max_examples=max(40, settings.default.max_examples // 6))
@given(drawn=st.lists(cases(), min_size=1, max_size=8))
def test_every_layout_gives_the_bits_of_one_process(pool: Pool, drawn: list[Case]) -> None:
    by_rank = pool.run(WORLD, run_cases, drawn)
    for case, results in zip(drawn, zip(*by_rank, strict=True), strict=True):
        assert mismatches(case, results) == [], f"run it again from tests/ with layout_cases.rerun({case!r})"
