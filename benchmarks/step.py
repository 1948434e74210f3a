"""Compares a step of our optimizer with other ways: `python -m benchmarks.step --quick`.

Four gloo processes with one thread each run every method on the same weights, mesh and gradients, in turn.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rich.console import Console

from benchmarks.methods.registry import METHODS, find
from benchmarks.problem import MESHES, SETS
from benchmarks.report import EXPLANATION, json_of, table_of
from benchmarks.world import Case, CaseResult, run_case

OURS = "ours"
MESHES_OF_MANY = [name for name, kind in MESHES.items() if kind.world > 1]
FULL = [(weights, mesh) for weights in ("dense", "llama", "moe", "odd") for mesh in MESHES_OF_MANY] + [
    ("many", "alone")
]
QUICK = [("small", "fsdp"), ("small", "hsdp")]
ROUNDS, QUICK_ROUNDS = 7, 5
WIDTH = 130  # of the tables where the output is no terminal


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small set on two meshes, in under two minutes")
    parser.add_argument("--sets", nargs="+", choices=SETS, help="sets of weights (default: all but small)")
    parser.add_argument("--meshes", nargs="+", choices=MESHES, help="default: those of several ranks")
    parser.add_argument("--methods", nargs="+", help=f"default: all of {' '.join(METHODS)}")
    parser.add_argument("--without", nargs="+", default=[], help="methods to leave out")
    parser.add_argument("--plugin", action="append", default=[], help="one more method: module:Class")
    parser.add_argument(
        "--rounds", type=int, help=f"timed steps of each method (default {ROUNDS}; quick {QUICK_ROUNDS})"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="let packages compile what they decorate (minutes)")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    return parser.parse_args()


def _cases(asked: argparse.Namespace, names: list[str]) -> list[Case]:
    """What was asked for; a default that the other choices leave open is of the quick or of the full comparison."""
    pairs = QUICK if asked.quick else FULL
    if asked.sets or asked.meshes:
        sets = asked.sets or sorted({weights for weights, _ in pairs})
        meshes = asked.meshes or MESHES_OF_MANY
        pairs = [(weights, mesh) for weights in sets for mesh in meshes]
    rounds = asked.rounds or (QUICK_ROUNDS if asked.quick else ROUNDS)
    return [Case(*pair, tuple(names), rounds, seed=asked.seed, compile=asked.compile) for pair in pairs]


def _run(case: Case, console: Console) -> CaseResult:
    title = f"{case.weights} on {case.mesh}"
    with console.status(title) as status:
        return run_case(case, lambda text: status.update(f"{title}: {text}"))


def main() -> None:
    """Run the cases that the command line names, and print them."""
    asked = _arguments()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the allocator warns of every block it did not see allocated
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    names = [name for name in asked.methods or METHODS if name not in asked.without] + asked.plugin
    for name in names:
        find(name)  # a misspelt name ends here, before anything runs
    ours = OURS if OURS in names else None
    results = []
    for case in _cases(asked, names):
        results.append(_run(case, console))
        console.print(table_of(results[-1], ours))
        console.print()
        if asked.json is not None:
            asked.json.write_text(json_of(results, ours))
    console.print(EXPLANATION)


if __name__ == "__main__":
    main()
