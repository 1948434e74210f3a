"""The demo's table, and its sample of text."""

from __future__ import annotations

from collections.abc import Sequence

from muonshard.demo.runs import Run, first_at


def show(runs: Sequence[Run]) -> None:
    """Print a table of both runs, by how much the second was faster, and what its model writes."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table(title="A small GPT on the Python standard library", title_justify="left")
    table.add_column("")
    for run in runs:
        table.add_column(run.optimizer, justify="right")
    for name, *values in rows(runs):
        table.add_row(name, *values)
    console.print()
    console.print(table)
    console.print(verdict(runs))
    console.print(Panel(Text(runs[-1].sample), title=f"what the {runs[-1].optimizer} model writes", expand=False))


def rows(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """(what, a value for each run) for every line of the table."""
    target = runs[0].losses[-1]
    reached = [first_at(run.steps, run.losses, target) for run in runs]
    return [
        ("validation loss at the end, nats per byte", *(f"{run.losses[-1]:.4f}" for run in runs)),
        ("steps", *(f"{run.steps[-1]:.0f}" for run in runs)),
        (f"steps to {runs[0].optimizer}'s last loss", *("never" if at is None else f"{at:.0f}" for at in reached)),
        ("seconds of training", *(f"{run.seconds[-1]:.0f}" for run in runs)),
        ("optimizer, ms per step (median)", *(f"{run.median_ms:.1f}" for run in runs)),
        ("optimizer's share of the time", *(f"{sum(run.optimizer_ms) / 1e3 / run.seconds[-1]:.0%}" for run in runs)),
        ("the optimizer sends, per rank and step", *(f"{run.bytes_sent / 1e6:.2f} MB" for run in runs)),
    ]


def verdict(runs: Sequence[Run]) -> str:
    """By how many steps the second optimizer was faster to the first one's last loss, or that it was not."""
    slow, fast = runs
    target = slow.losses[-1]
    steps, seconds = first_at(fast.steps, fast.losses, target), first_at(fast.seconds, fast.losses, target)
    if steps is None or seconds is None:
        return (
            f"{fast.optimizer} did not reach {slow.optimizer}'s last loss, {target:.4f}, in {fast.steps[-1]:.0f} steps."
        )
    return (
        f"{fast.optimizer} reaches {slow.optimizer}'s last loss, {target:.4f}, "
        f"after {steps:.0f} of {slow.steps[-1]:.0f} steps ({slow.steps[-1] / steps:.2f}x fewer) "
        f"and {seconds:.0f} of {slow.seconds[-1]:.0f} seconds."
    )
