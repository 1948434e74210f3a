"""The demo's picture: validation loss against steps, and against seconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from muonshard.demo.runs import Run, first_at

COLOURS = {"adamw": "#8a8f98", "muon": "#d1495b"}
LABELS = {"adamw": "AdamW", "muon": "Muon (muonshard)"}


def draw(runs: Sequence[Run], path: Path) -> None:
    """Write the picture of all runs to `path`, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}):
        figure, (by_step, by_second) = pyplot.subplots(1, 2, figsize=(12, 5), sharey=True, layout="constrained")
        for axes, label in ((by_step, "steps"), (by_second, "seconds of training")):
            for run in runs:
                positions = run.steps if axes is by_step else run.seconds
                colour, name = COLOURS[run.optimizer], LABELS[run.optimizer]
                axes.plot(positions[1:], run.losses[1:], color=colour, linewidth=2.2, marker="o", markersize=3.5)
                axes.annotate(
                    f"{name}\n{run.losses[-1]:.3f}",
                    (positions[-1], run.losses[-1]),
                    xytext=(8, 0),
                    textcoords="offset points",
                    va="center",
                    color=colour,
                    fontweight="bold",
                )
            axes.set_xlabel(label)
            axes.grid(axis="y", color="#e6e6e6")
            axes.margins(x=0.02)
            axes.set_xlim(right=axes.get_xlim()[1] * 1.22)
            _mark_lead(axes, runs, by_step=axes is by_step)
        by_step.set_ylabel("validation loss, nats per byte")
        figure.suptitle("A small GPT on the Python standard library, sharded over local processes", fontweight="bold")
        figure.savefig(path, dpi=130)
        pyplot.close(figure)


def _mark_lead(axes: object, runs: Sequence[Run], by_step: bool) -> None:
    """A dashed line at AdamW's last loss, from where Muon gets there."""
    named = {run.optimizer: run for run in runs}
    if named.keys() != {"adamw", "muon"}:
        return
    adamw, muon = named["adamw"], named["muon"]
    ends = (adamw.steps, muon.steps) if by_step else (adamw.seconds, muon.seconds)
    reached = first_at(ends[1], muon.losses, adamw.losses[-1])
    if reached is not None:
        axes.plot([reached, ends[0][-1]], [adamw.losses[-1]] * 2, color="#444444", linestyle=":", linewidth=1.4)  # type: ignore[attr-defined]
