"""How the learning rates of train_gpt.py were chosen: the demo's whole run at several rates, for both optimizers.

    python examples/sweep.py            # writes examples/sweep.json and examples/sweep.md; hours on two cores

AdamW gets three rates and Muon two, a factor of two apart, and both the same steps, schedule, data and weight decay.
AdamW comes first: the part of the model that Muon leaves to AdamW uses AdamW's best rate, 2e-3. Runs that sweep.json
holds already are not repeated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RATES = {"adamw": [1e-3, 2e-3, 4e-3], "muon": [2e-2, 4e-2]}


def final_loss(optimizer: str, lr: float, seed: int, steps: int, processes: int) -> float:
    """Validation loss, in nats per byte, at the end of a run."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.json"
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
        command = [*launch, f"--nproc_per_node={processes}", str(HERE / "train_gpt.py"), f"--optimizer={optimizer}"]
        options = [f"--lr={lr}", f"--seed={seed}", f"--steps={steps}", f"--validate-every={steps}", f"--out={out}"]
        subprocess.run([*command, *options], check=True, stdout=subprocess.DEVNULL)
        return float(json.loads(out.read_text())["curve"][-1]["loss"])


def as_markdown(results: list[dict[str, Any]]) -> str:
    """A table of the losses: a line for each optimizer and rate, a column for each number of steps and seed."""
    columns = sorted({(r["steps"], r["seed"]) for r in results})
    heads = [f"{steps} steps, seed {seed}" for steps, seed in columns]
    lines = [
        "# Learning rates",
        "",
        "Validation loss at the end of a run, in nats per byte, by `python examples/sweep.py`.",
        "",
    ]
    lines += ["| optimizer | learning rate | " + " | ".join(heads) + " |", "| --- | ---: |" + " ---: |" * len(heads)]
    for optimizer, rates in RATES.items():
        for lr in rates:
            of = {(r["steps"], r["seed"]): r["loss"] for r in results if (r["optimizer"], r["lr"]) == (optimizer, lr)}
            if of:
                cells = [f"{of[column]:.4f}" if column in of else "" for column in columns]
                lines.append(f"| {optimizer} | {lr:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizers", nargs="+", choices=list(RATES), default=list(RATES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--processes", type=int, default=1, help="any number trains on the same batches (default: 1)")
    options = parser.parse_args()
    store = HERE / "sweep.json"
    results: list[dict[str, Any]] = json.loads(store.read_text()) if store.exists() else []
    for optimizer in options.optimizers:
        for seed in options.seeds:
            for lr in RATES[optimizer]:
                run = {"optimizer": optimizer, "lr": lr, "seed": seed, "steps": options.steps}
                if any(run.items() <= result.items() for result in results):
                    continue
                results.append(run | {"loss": final_loss(processes=options.processes, **run)})
                print(results[-1], flush=True)
                store.write_text("[\n" + ",\n".join(json.dumps(result) for result in results) + "\n]\n")
    (HERE / "sweep.md").write_text(as_markdown(results))


if __name__ == "__main__":
    main()
