"""A plan as text: `print(optimizer.plan)`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # plans render themselves: at run time plan imports report
    from muonshard.plan import Domain, Plan

MASTER_ITEMSIZE = 4
"""Bytes per element when momentum is gathered as it is kept, in float32."""


def render(plan: Plan) -> str:
    """The report: what there is, who owns it, what travels, and what the two usual ways would cost instead."""
    if not plan.domains:
        return f"Muon plan of rank {plan.rank}: no matrices"
    lines = [f"Muon plan of rank {plan.rank}: {_count(plan)}"]
    for domain in plan.domains:
        lines += ["", *_domain(domain)]
    lines += ["", f"{'per step':<34}{'sent by this rank':>20}{'work of the busiest rank':>28}"]
    lines += [f"{name:<34}{scaled(sent, 'B'):>20}{scaled(flops, 'FLOP'):>28}" for name, sent, flops in _rivals(plan)]
    return "\n".join(lines)


def _count(plan: Plan) -> str:
    matrices = sum(len(domain.jobs) for domain in plan.domains)
    elements = sum(domain.elements for domain in plan.domains)
    buckets = sum(len(domain.buckets) for domain in plan.domains)
    sends = f" and {_many(plan.sends, 'send')}" if plan.sends else ""
    return (
        f"{_many(matrices, 'matrix', 'matrices')} ({elements:,} elements) in {_many(len(plan.tenants), 'parameter')}, "
        f"{_many(buckets, 'bucket')}, {_many(plan.collectives, 'collective')}{sends} per step"
    )


def _domain(domain: Domain) -> list[str]:
    grid = domain.grid
    shapes = Counter((job.matrix.rows, job.matrix.cols) for job in domain.jobs)
    shown = ", ".join(f"{count:,} x ({rows}, {cols})" for (rows, cols), count in shapes.most_common(4))
    more = len(shapes) - 4
    home = sum(job.at_home for job in domain.jobs)
    fused = sum(len(bucket.jobs) for bucket in domain.buckets if bucket.fused)
    lines = [
        f"on {_many(grid.replicas, 'replica')} x {_many(grid.shards, 'shard')}: {shown or 'no elements'}"
        + (f" and {_many(more, 'more shape')}" if more > 0 else ""),
        f"  {home:,} of {len(domain.jobs):,} lie whole with their owners and do not travel to be orthogonalised",
    ]
    if fused:
        lines.append(f"  {fused:,} are gathered everywhere, and orthogonalised by every rank of their owner's replica")
    return lines + _loads(domain)


def _loads(domain: Domain) -> list[str]:
    """Owners' loads: each on small grids, the spread on large ones."""
    owned = Counter(job.owner for job in domain.jobs)
    loads = domain.loads()
    mean = sum(loads.values()) / len(loads)
    if mean == 0:
        return ["  nothing to compute"]
    if len(loads) > 8:
        return [
            f"  owners' loads: {min(loads.values()) / mean:.2f} to {max(loads.values()) / mean:.2f} of the mean, "
            f"{scaled(mean, 'FLOP')}; this rank owns {owned[domain.seat]:,}"
        ]
    return [
        f"  rank {domain.grid.rank(seat)} owns {owned[seat]:,}, {scaled(load, 'FLOP')} ({load / mean:.0%} of the mean)"
        + (" <- this rank" if seat == domain.seat else "")
        for seat, load in sorted(loads.items(), key=lambda item: domain.grid.rank(item[0]))
    ]


def _rivals(plan: Plan) -> list[tuple[str, float, float]]:
    """(name, bytes sent, FLOPs of the busiest rank) for this plan, a fused all-gather, and everything everywhere."""
    busiest = sum(max(domain.loads().values()) for domain in plan.domains)
    total = sum(job.cost for domain in plan.domains for job in domain.jobs)
    gathered = sum(domain.elements * (1 - 1 / domain.grid.shards) for domain in plan.domains)
    return [
        ("this plan", plan.bytes_sent, busiest),
        ("  by the formula, mean over ranks", plan.bound_bytes, busiest),
        ("one fused all-gather", gathered * plan.itemsize, total),
        ("everything everywhere, in float32", gathered * MASTER_ITEMSIZE, total),
    ]


def _many(count: int, one: str, several: str = "") -> str:
    return f"{count:,} {one if count == 1 else several or one + 's'}"


def scaled(value: float, unit: str) -> str:
    """With the prefix that leaves one to three digits before the point."""
    prefixes = ["", "k", "M", "G", "T", "P", "E"]
    while value >= 999.5 and len(prefixes) > 1:
        value, prefixes = value / 1000, prefixes[1:]
    return f"{value:,.4g} {prefixes[0]}{unit}"
