"""How the demo's learning rates were chosen: the same short run at each of several rates, for both optimizers.

    python examples/sweep.py --processes 4 --steps 120

Prints a table, and with --out writes it as Markdown. Both optimizers get the same number of rates, a factor of two
apart, the same schedule, data and steps. Muon's own sweep is run after AdamW's, whose best rate its embedding, norms
and head then use.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = Path(__file__).parent / "train_gpt.py"
RATES = {"adamw": [1e-3, 2e-3, 4e-3, 8e-3], "muon": [5e-3, 1e-2, 2e-2, 4e-2]}


def final_loss(optimizer: str, lr: float, steps: int, processes: int) -> float:
    """Validation loss, in nats per byte, at the end of a run."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.json"
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        options = [f"--optimizer={optimizer}", f"--lr={lr}", f"--steps={steps}", f"--validate-every={steps}"]
        subprocess.run([*launch, str(SCRIPT), *options, f"--out={out}"], check=True, stdout=subprocess.DEVNULL)
        return float(json.loads(out.read_text())["curve"][-1]["loss"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizers", nargs="+", choices=list(RATES), default=list(RATES))
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lines = [f"| optimizer | learning rate | validation loss after {options.steps} steps |", "| --- | --- | --- |"]
    for optimizer in options.optimizers:
        for lr in RATES[optimizer]:
            lines.append(
                f"| {optimizer} | {lr:g} | {final_loss(optimizer, lr, options.steps, options.processes):.4f} |"
            )
            print(lines[-1], flush=True)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
