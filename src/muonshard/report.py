"""A plan as text: `print(optimizer.plan)`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from muonshard.owners import Seat

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
    lines += ["", f"{'per step':<34}{'bytes sent by this rank':>26}{'TFLOPs on the busiest rank':>30}"]
    lines += [f"{name:<34}{_bytes(sent):>26}{flops / 1e12:>30.4g}" for name, sent, flops in _rivals(plan)]
    return "\n".join(lines)


def _count(plan: Plan) -> str:
    matrices = sum(len(domain.jobs) for domain in plan.domains)
    elements = sum(domain.elements for domain in plan.domains)
    buckets = sum(len(domain.buckets) for domain in plan.domains)
    return (
        f"{matrices:,} matrices ({elements:,} elements) in {len(plan.tenants):,} parameters, "
        f"{buckets} buckets, {plan.collectives} collectives per step"
    )


def _domain(domain: Domain) -> list[str]:
    grid = domain.grid
    shapes = Counter((job.matrix.rows, job.matrix.cols) for job in domain.jobs)
    shown = ", ".join(f"{count} x ({rows}, {cols})" for (rows, cols), count in shapes.most_common(4))
    more = len(shapes) - 4
    owned = Counter(job.owner for job in domain.jobs)
    home = sum(job.at_home for job in domain.jobs)
    return [
        f"on {grid.replicas} replicas x {grid.shards} shards: {shown}"
        + (f" and {more} more shapes" if more > 0 else ""),
        f"  {home} of {len(domain.jobs)} matrices lie whole with their owners and do not travel to be orthogonalised",
        *_loads(domain, owned),
    ]


def _loads(domain: Domain, owned: Counter[Seat]) -> list[str]:
    """Owners' loads: each on small grids, the spread on large ones."""
    loads = domain.loads()
    mean = sum(loads.values()) / len(loads)
    if len(loads) > 8:
        return [
            f"  owners' loads: {min(loads.values()) / mean:.2f} to {max(loads.values()) / mean:.2f} of the mean, "
            f"{mean / 1e9:.4g} GFLOPs; this rank owns {owned[domain.seat]}"
        ]
    return [
        f"  rank {domain.grid.rank(seat)} owns {owned[seat]:,} matrices, {load / 1e9:.4g} GFLOPs "
        f"({load / mean:.0%} of the mean)" + (" <- this rank" if seat == domain.seat else "")
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


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:,.4g} {unit}"
        count /= 1000
    raise AssertionError("unreachable")
