"""Runs of the training script on local processes, and what they tell."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

SCRIPT = Path(__file__).with_name("train_gpt.py")
"""examples/train_gpt.py, which people copy from."""


@dataclass(frozen=True)
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


class RunFailed(RuntimeError):  # noqa: N818, it tells what happened
    """A training run ended with an error, which its processes have printed."""


def run(optimizer: str, steps: int, processes: int, folder: Path) -> Run:
    """Train on local processes and return what rank 0 wrote. Nothing is left running, whatever happens.

    Raises:
        RunFailed: a process ended with an error; all the others have been ended then.
    """
    out = folder / f"{optimizer}.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command += [str(SCRIPT), f"--optimizer={optimizer}", f"--steps={steps}", f"--out={out}"]
    environment = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ}
    with subprocess.Popen(command, env=environment) as launcher:
        try:
            code = launcher.wait()
        except BaseException:
            launcher.send_signal(signal.SIGTERM)  # the launcher ends its workers, then itself
            launcher.wait()
            raise
    if code != 0:
        raise RunFailed(f"the {optimizer} run ended with exit code {code}; its error stands above")
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
