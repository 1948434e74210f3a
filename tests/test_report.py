"""What a plan says of itself is what it is."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import nn

import muonshard
from muonshard.layout import Cut
from muonshard.matrices import MatrixRule
from muonshard.report import scaled
from test_plan import Case, cases

EVEN = ((64, 32), (None, Cut(0)), MatrixRule())
WHOLE = ((8, 64, 32), (None, Cut(0)), MatrixRule())


def report(case: Case, rank: int = 0) -> str:
    return str(case.plans[rank])


def rows(text: str) -> dict[str, list[str]]:
    """The table at the end: columns by name."""
    lines = text[text.rindex("per step") :].splitlines()[1:]
    return {line[:34].strip(): re.split(r"\s{2,}", line[34:].strip()) for line in lines}


def test_it_says_how_much_there_is_and_how_it_travels() -> None:
    text = report(Case((2, 4), (EVEN,) * 8 + (WHOLE,), bucket_bytes=1 << 14), rank=5)
    assert text.startswith("Muon plan of rank 5: 16 matrices (32,768 elements) in 9 parameters, ")
    assert "on 2 replicas x 4 shards: 16 x (64, 32)" in text
    assert "8 of 16 lie whole with their owners and do not travel" in text


@given(cases())
def test_every_plan_can_be_read(case: Case) -> None:
    for plan in case.plans[:2]:
        text = str(plan)
        assert f"{plan.collectives:,} collective" in text
        assert (f"{plan.sends:,} send" in text) == (plan.sends > 0)
        assert len(rows(text)) == 4
        assert "nan" not in text
        assert all(len(line) <= 120 for line in text.splitlines())


def test_it_says_who_owns_what_where_there_are_few() -> None:
    lines = report(Case((4,), ((EVEN[0], (Cut(0),), EVEN[2]),) * 6), rank=1).splitlines()
    owners = [line.strip() for line in lines if line.startswith("  rank ")]
    assert [line.split(",")[0] for line in owners] == [
        "rank 0 owns 2",
        "rank 1 owns 2",
        "rank 2 owns 1",
        "rank 3 owns 1",
    ]
    assert [line.endswith(" <- this rank") for line in owners] == [False, True, False, False]
    assert ["133% of the mean" in line for line in owners] == [True, True, False, False]


def test_the_work_of_the_busiest_rank_is_that_of_who_owns_most() -> None:
    case = Case((4,), (((8, 8), (Cut(0),), MatrixRule()),) * 6)
    (cost,) = {job.cost for job in case.plans[0].domains[0].jobs}
    assert rows(report(case))["this plan"][1] == f"{2 * cost / 1000:.4g} kFLOP"


def test_it_says_how_far_loads_are_from_level_where_there_are_many() -> None:
    text = report(Case((16,), (((64, 32), (Cut(0),), MatrixRule()),) * 24))
    assert "owners' loads: 0.67 to 1.33 of the mean" in text
    assert "this rank owns 2" in text


def test_its_figures_are_those_of_the_plan() -> None:
    case = Case((1, 4), (((1000, 500), (None, Cut(0)), MatrixRule()),) * 4)
    plan, flops = case.plans[0], 5 * (4 * 500 * 500 * 1000 + 2 * 500**3)
    table = rows(report(case))
    assert plan.payload_bytes == plan.bound_bytes == 2 * 2 * 500_000 * 3 / 4
    assert table["this plan"] == ["1.5 MB", f"{flops / 1e9:.4g} GFLOP"]
    assert table["by the formula, mean over ranks"][0] == "1.5 MB"
    assert table["one fused all-gather"] == ["3 MB", f"{4 * flops / 1e9:.4g} GFLOP"]
    assert table["everything everywhere, in float32"] == ["6 MB", f"{4 * flops / 1e9:.4g} GFLOP"]


def test_it_says_what_is_gathered_everywhere() -> None:
    case = Case((4,), (((4, 4), (Cut(0),), MatrixRule()),) * 3, exchange="allgather")
    assert "3 are gathered everywhere, and orthogonalised by every rank" in report(case)
    assert "gathered everywhere" not in report(Case(case.mesh, case.tensors, exchange="owner"))


def test_shapes_beyond_the_four_most_common_are_counted() -> None:
    shapes = [(4, 4)] * 3 + [(4, size) for size in range(5, 10)]
    text = report(Case((2,), tuple((shape, (Cut(0),), MatrixRule()) for shape in shapes)))
    assert ": 3 x (4, 4), 1 x (4, 5), 1 x (4, 6), 1 x (4, 7) and 2 more shapes" in text


@pytest.mark.parametrize(
    ("case", "says"),
    [
        (Case((2,), (((0, 4), (Cut(0),), MatrixRule()),)), "0 matrices (0 elements) in 1 parameter"),
        (Case((2,), (((1, 1), (Cut(0),), MatrixRule()),)), "1 matrix (1 elements) in 1 parameter, 1 bucket"),
    ],
)
def test_it_counts_in_plain_english(case: Case, says: str) -> None:
    assert says in report(case)


def test_there_is_a_report_where_nothing_is_computed_or_nothing_is_there() -> None:
    weight = nn.Parameter(torch.zeros(4, 4))
    assert "nothing to compute" in str(muonshard.Muon([weight], ns_steps=0).plan)
    groups: list[dict[str, Any]] = [{"params": [weight], "algorithm": "adamw"}]
    assert str(muonshard.Muon(groups).plan) == "Muon plan of rank 0: no matrices"


@pytest.mark.parametrize(
    ("count", "shown"), [(0, "0 B"), (999, "999 B"), (1e3, "1 kB"), (2.5e12, "2.5 TB"), (1e22, "1e+04 EB")]
)
def test_bytes_have_the_prefix_that_suits_them(count: float, shown: str) -> None:
    assert scaled(count, "B") == shown
