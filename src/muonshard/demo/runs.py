"""Runs of the training script on local processes, and what they tell."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from muonshard.demo.launch import launch

SCRIPT = Path(__file__).with_name("train_gpt.py")
"""examples/train_gpt.py, which people copy from."""


@dataclass(frozen=True, slots=True)
class Run:
    """One training run.

    Attributes:
        optimizer: "adamw" or "muon".
        steps: steps at which the validation loss was taken.
        seconds: seconds of training up to each of them.
        losses: validation losses there, in nats per byte.
        optimizer_ms: milliseconds of each optimizer step, on rank 0.
        bytes_sent: bytes that rank 0's optimizer sends per step.
        sample: text written by the trained model.
    """

    optimizer: str
    steps: tuple[float, ...]
    seconds: tuple[float, ...]
    losses: tuple[float, ...]
    optimizer_ms: tuple[float, ...]
    bytes_sent: int
    sample: str

    @property
    def median_ms(self) -> float:
        """The usual time of an optimizer step."""
        return median(self.optimizer_ms)


def usual_steps() -> int:
    """How many steps both runs do in about five minutes on two cores, by what those cores multiply fast."""
    import torch

    from muonshard.demo.train_gpt import fast_dtype

    return 320 if fast_dtype(torch.device("cpu")) == torch.bfloat16 else 160


def run(optimizer: str, steps: int, processes: int, folder: Path) -> Run:
    """Train on local processes, and return what rank 0 wrote. Nothing is left running, whatever happens.

    Raises:
        RunError: a process ended with an error.
        KeyboardInterrupt: this process was told to stop.
    """
    out = folder / f"{optimizer}.json"
    options = [
        f"--optimizer={optimizer}",
        f"--steps={steps}",
        f"--validate-every={max(1, steps // 16)}",
        f"--out={out}",
    ]
    launch([sys.executable, str(SCRIPT), *options], processes)
    return load(out)


def load(path: Path) -> Run:
    """A run from the JSON that the training script wrote."""
    told = json.loads(path.read_text())
    curve = told["curve"]
    return Run(
        optimizer=told["optimizer"],
        steps=tuple(point["step"] for point in curve),
        seconds=tuple(point["seconds"] for point in curve),
        losses=tuple(point["loss"] for point in curve),
        optimizer_ms=tuple(told["optimizer_ms"]),
        bytes_sent=told["bytes_sent"],
        sample=told["sample"],
    )


def first_at(positions: tuple[float, ...], losses: tuple[float, ...], target: float) -> float | None:
    """Where a curve first comes down to `target`, between its points by straight lines; None if it does not."""
    if losses[0] <= target:
        return positions[0]
    points = zip(positions, losses, strict=True)
    for (before, high), (after, low) in pairwise(points):
        if low <= target:
            return before + (after - before) * (high - target) / (high - low)
    return None
