"""One table for each case, and the same figures as JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table

from benchmarks.measure import RankResult
from benchmarks.world import CaseResult

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Row:
    """One method's line: its ranks put together."""

    method: str
    milliseconds: float  # the median over rounds of the slowest rank's step
    cpu_milliseconds: float  # the median over rounds of what all ranks' threads took together
    ratio: float | None  # the median over rounds of this method's time over ours in the same round
    bytes_sent_mean: float
    bytes_sent_max: int
    collectives: int
    flops: int
    peak_extra_bytes: int  # on the rank where it is largest
    difference: float | None
    torch_difference: float | None
    seconds_by_round: tuple[float, ...]
    calls: dict[str, int]


def rows_of(result: CaseResult, ours: str | None) -> list[Row]:
    """A row for each method that ran, in the case's order; ratios are to `ours` where it ran."""
    times = {name: _slowest(ranks) for name, ranks in result.ran.items()}
    base = times.get(ours) if ours is not None else None
    rows = []
    for name, ranks in result.ran.items():
        sent = [rank.bytes_sent for rank in ranks]
        ratios = [mine / other for mine, other in zip(times[name], base, strict=True)] if base else None
        rows.append(
            Row(
                method=name,
                milliseconds=1e3 * statistics.median(times[name]),
                cpu_milliseconds=1e3 * statistics.median(_together(ranks)),
                ratio=statistics.median(ratios) if ratios else None,
                bytes_sent_mean=statistics.fmean(sent),
                bytes_sent_max=max(sent),
                collectives=max(rank.collectives for rank in ranks),
                flops=sum(rank.flops for rank in ranks),
                peak_extra_bytes=max(rank.peak_extra_bytes for rank in ranks),
                difference=_largest([rank.difference for rank in ranks]),
                torch_difference=_largest([rank.torch_difference for rank in ranks]),
                seconds_by_round=times[name],
                calls=ranks[0].calls,
            )
        )
    return rows


def _slowest(ranks: Sequence[RankResult]) -> tuple[float, ...]:
    return tuple(max(seconds) for seconds in zip(*(rank.seconds for rank in ranks), strict=True))


def _together(ranks: Sequence[RankResult]) -> tuple[float, ...]:
    return tuple(sum(seconds) for seconds in zip(*(rank.cpu_seconds for rank in ranks), strict=True))


def _largest(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return max(known) if known else None


def table_of(result: CaseResult, ours: str | None) -> Table:
    """The case's table; methods that did not run stand below it with their errors."""
    case = result.case
    table = Table(title=f"{case.weights} on {case.mesh}: medians of {case.rounds} rounds", title_justify="left")
    table.add_column("method")
    headings = "step ms|/ ours|CPU ms|sent MiB|calls|GFLOP|extra MiB|off 1 process|off torch"
    for heading in headings.split("|"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows_of(result, ours):
        table.add_row(
            row.method,
            f"{row.milliseconds:.1f}",
            "-" if row.ratio is None else f"{row.ratio:.2f}",
            f"{row.cpu_milliseconds:.1f}",
            f"{row.bytes_sent_mean / MIB:.2f}",
            str(row.collectives),
            f"{row.flops / 1e9:.1f}",
            f"{row.peak_extra_bytes / MIB:.1f}",
            *("-" if value is None else f"{value:.1e}" for value in (row.difference, row.torch_difference)),
        )
    failed = [f"{name} did not run: {_first_line(error)}" for name, error in result.failed.items()]
    table.caption = "\n".join(failed) or None
    table.caption_justify = "left"
    return table


def _first_line(text: str, width: int = 200) -> str:
    line = text.splitlines()[0] if text else ""
    return line if len(line) <= width else line[: width - 3] + "..."


EXPLANATION = """\
step: the slowest rank's wall time; CPU: of all ranks together, which other work on the machine disturbs least;
sent: by each rank, mean over ranks (benchmarks/wire.py says how it is counted); calls: collectives of one step;
GFLOP: all ranks together; extra: beyond weights, gradients and state, on the rank that takes most;
off 1 process: largest difference of a weight, after two steps, from the same method in one process (for other
libraries: from torch.optim.Muon there); off torch: from torch.optim.Muon in one process."""


def json_of(results: Sequence[CaseResult], ours: str | None) -> str:
    """Everything in the tables and more, with what it was measured on."""
    cases: list[dict[str, Any]] = []
    for result in results:
        rows = [asdict(row) for row in rows_of(result, ours)]
        cases.append({"case": asdict(result.case), "ours": ours, "rows": rows, "failed": result.failed})
    machine = {"torch": torch.__version__, "processor": platform.machine(), "cores": os.cpu_count()}
    return json.dumps({"machine": machine, "cases": cases}, indent=2)
