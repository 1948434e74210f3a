"""What each set of coefficients does: `python -m benchmarks.coefficients`.

For each number of steps, the FLOPs for one matrix over those of the standard form with five quintic steps, in plain
products, and the interval that singular values in [1e-3, 1] are mapped to. Exact arithmetic: nothing is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from muonshard.orthogonalize import CUBIC, JORDAN, Coefficients, NewtonSchulz, polar_express
from muonshard.orthogonalize.coefficients import image

LOWER = 1e-3
SETS: dict[str, Callable[[int], tuple[Coefficients, ...]]] = {
    "Jordan": lambda steps: (JORDAN,) * steps,
    "Polar Express": polar_express,
    "Polar Express, no safety factor": lambda steps: polar_express(steps, safety=1.0),
    "cubic": lambda steps: (CUBIC,) * steps,
}


def rows(m: int, n: int, dtype: torch.dtype) -> list[tuple[str, int, float, float, float]]:
    """`(set, steps, FLOPs over the standard form's, low, high)`, by set and then by steps."""
    standard = 5 * (4 * m * m * n + 2 * m**3)
    table = []
    for name, generate in SETS.items():
        for steps in range(3, 9):
            composition = generate(steps)
            flops = NewtonSchulz(composition, dtype=dtype).flops(m, n, "meta")  # "meta" cuts no product into blocks
            table.append((name, steps, flops / standard, *image(composition, LOWER, 1.0)))
    return table


def table(m: int, n: int, dtype: torch.dtype) -> str:
    """The rows as a table in Markdown, each line ended."""
    name = str(dtype).removeprefix("torch.")
    lines = [
        f"| coefficients | steps | FLOPs, ({m}, {n}) in {name} | [{LOWER:g}, 1] is mapped to |",
        "|---|---|---|---|",
    ]
    for kind, steps, flops, low, high in rows(m, n, dtype):
        lines.append(f"| {kind} | {steps} | {flops:.2f} | {low:.4f} .. {high:.4f} |")
    return "".join(f"{line}\n" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs=2, default=(512, 2048), metavar=("M", "N"))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the iteration")
    arguments = parser.parse_args()
    m, n = sorted(arguments.shape)
    print(table(m, n, getattr(torch, arguments.dtype)), end="")


if __name__ == "__main__":
    main()
