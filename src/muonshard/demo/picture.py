"""The demo's picture: validation loss against steps, and against seconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muonshard.demo.runs import Run, first_at

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, PAPER, GRID = "#22262e", "#fbfaf7", "#e4e2dc"
COLOURS = {"adamw": "#7b8494", "muon": "#c8374f"}
NAMES = {"adamw": "AdamW", "muon": "Muon"}
STYLE: dict[Any, Any] = {
    "font.size": 11,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.facecolor": PAPER,
    "figure.facecolor": PAPER,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def draw(runs: Sequence[Run], path: Path) -> None:
    """Write the picture of AdamW's run and Muon's to `path`, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(STYLE):
        figure, (by_step, by_second) = pyplot.subplots(1, 2, figsize=(12.5, 5.4), sharey=True, layout="constrained")
        _panel(by_step, [(run, run.steps) for run in runs], "steps")
        _panel(by_second, [(run, run.seconds) for run in runs], "seconds")
        by_step.set_ylabel("validation loss, nats per byte")
        figure.suptitle(
            "A small GPT learns the Python standard library, sharded over local processes",
            x=0.012,
            ha="left",
            fontweight="bold",
            fontsize=14,
        )
        figure.savefig(path, dpi=140)
        pyplot.close(figure)


def _panel(axes: Axes, curves: Sequence[tuple[Run, tuple[float, ...]]], unit: str) -> None:
    """Both losses against one measure of the way, without the loss of the untrained model."""
    for run, positions in curves:
        colour = COLOURS[run.optimizer]
        axes.plot(positions[1:], run.losses[1:], color=colour, linewidth=2.4, marker="o", markersize=4)
        axes.annotate(
            f"{NAMES[run.optimizer]}  {run.losses[-1]:.3f}",
            (positions[-1], run.losses[-1]),
            xytext=(9, 0),
            textcoords="offset points",
            va="center",
            color=colour,
            fontweight="bold",
            annotation_clip=False,
        )
    axes.set_xlabel(unit if unit == "steps" else "seconds of training")
    axes.set_xlim(left=0)
    axes.grid(axis="y", color=GRID)
    (slow, there), (fast, here) = curves
    reached = first_at(here, fast.losses, slow.losses[-1])
    if reached is not None:
        _mark_lead(axes, reached, there[-1], slow.losses[-1], unit)


def _mark_lead(axes: Axes, reached: float, end: float, loss: float, unit: str) -> None:
    """An arrow at AdamW's last loss, from where AdamW gets there to where Muon does."""
    arrow = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.2, "shrinkA": 6, "shrinkB": 2}
    axes.annotate("", (reached, loss), xytext=(end, loss), arrowprops=arrow)
    axes.annotate(
        f"the same loss after {reached:.0f} of {end:.0f} {unit}: {end / reached:.2f}x as fast",
        (end, loss),
        xytext=(0, -16),
        textcoords="offset points",
        ha="right",
        fontsize=9.5,
    )
